//! Notes that tests write for the user, such as the reason why a test was skipped.
//!
//! `cargo test` prints no output of a passing test, so a skipped check would not be noticed. A test
//! that cannot run on a machine calls [`skip`]. A test that repeats a step and counts the successes
//! calls [`share`]. Each call writes a line to the file whose path is in the variable
//! [`NOTES_ENV`]. `cargo xtask test` prints this file at its end. If the variable [`MAY_SKIP_ENV`]
//! names a file with permitted skips, as in CI, any other skip is an error.

#![forbid(unsafe_code)]

use std::{fs::OpenOptions, io::Write, path::Path};

/// Environment variable with the path of the file to which notes are appended, one per line.
pub const NOTES_ENV: &str = "AFFINODE_TEST_NOTES";
/// Environment variable that names a file with the permitted reasons to skip a test: one word per
/// line. `#` begins a comment.
pub const MAY_SKIP_ENV: &str = "AFFINODE_MAY_SKIP";
/// First word of the note about a skipped test.
pub const SKIPPED: &str = "skipped ";

/// Records that the running test is skipped. `missing` is one word for what the machine lacks, and
/// `why` explains it.
///
/// # Panics
/// When there is a list of permitted reasons, and `missing` is not on it.
pub fn skip(missing: &str, why: &str) {
    note(&format!("{SKIPPED}{}: {missing}: {why}", test()));
    if let Some(list) = std::env::var_os(MAY_SKIP_ENV) {
        let text = std::fs::read_to_string(&list);
        let text = text.unwrap_or_else(|error| panic!("cannot read {}: {error}", list.display()));
        assert!(
            is_listed(&text, missing),
            "this test may not be skipped: {missing}: {why}; install it, or add the word to {}",
            Path::new(&list).display()
        );
    }
}

/// Records how many attempts of the repeated step `what` succeeded: `good` attempts out of `of`.
///
/// # Panics
/// When `good / of` is below `least`, the share that every machine must reach.
pub fn share(what: &str, good: u64, of: u64, least: f64) {
    note(&format!("{}: {what}: {good} of {of}", test()));
    assert!(
        good as f64 >= of as f64 * least,
        "{what}: {good} of {of} attempts succeeded, but the required share is {least}"
    );
}

/// Name of the running test. `cargo test` names the test's thread after it.
fn test() -> String {
    let thread = std::thread::current().name().unwrap_or("a thread of a test").to_owned();
    let program = std::env::args().next().unwrap_or_default();
    let program = Path::new(&program).file_stem().unwrap_or_default().to_string_lossy();
    // Removes the hash that cargo appends to the name.
    let program = program.rsplit_once('-').map_or(&*program, |(name, _)| name);
    format!("{program}::{thread}")
}

fn note(line: &str) {
    let Some(path) = std::env::var_os(NOTES_ENV) else { return };
    let file = OpenOptions::new().append(true).create(true).open(&path);
    // Each line is written with one call, because tests write concurrently.
    let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

fn is_listed(list: &str, missing: &str) -> bool {
    let words = list.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    words.filter(|word| !word.is_empty()).any(|word| word == missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_with_comments_names_whole_words() {
        let list = "# may be missing\ngo-runc  # where Go is not installed\n\npython3\n";
        assert!(is_listed(list, "go-runc") && is_listed(list, "python3"));
        assert!(!is_listed(list, "go") && !is_listed(list, "") && !is_listed(list, "root"));
    }

    #[test]
    fn share_above_the_bound_passes() {
        share("a thing", 6, 12, 0.5);
    }

    #[test]
    #[should_panic(expected = "5 of 12")]
    fn share_below_the_bound_fails() {
        share("a thing", 5, 12, 0.5);
    }
}
