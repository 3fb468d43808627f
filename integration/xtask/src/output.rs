//! The one place that prints.
#![expect(clippy::print_stderr, clippy::print_stdout, reason = "a tool for people")]

/// What is being done now.
pub fn step(text: &str) {
    eprintln!("==> {text}");
}

/// Something that the reader should know.
pub fn note(text: &str) {
    eprintln!("    {text}");
}

/// A line of the result.
pub fn out(text: &str) {
    println!("{text}");
}

/// The end of a failed task: the whole chain of causes.
pub fn error(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
}
