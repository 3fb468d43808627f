//! Prints to the terminal. No other module prints.
#![expect(clippy::print_stderr, clippy::print_stdout, reason = "a tool for people")]

/// Prints the name of the step that begins.
pub fn step(text: &str) {
    eprintln!("==> {text}");
}

/// Prints a remark about the current step.
pub fn note(text: &str) {
    eprintln!("    {text}");
}

/// Prints a line of the result.
pub fn out(text: &str) {
    println!("{text}");
}

/// Prints the error of a failed task with all its causes.
pub fn error(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
}
