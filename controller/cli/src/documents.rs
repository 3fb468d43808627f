//! Tests that `affinode` accepts the command lines in the project's documents.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Parser, error::ErrorKind};

use super::Args;

/// Minimum number of command lines that the search must find in the documents. If it finds fewer,
/// the search is broken.
const MIN_LINES: usize = 80;
/// Words that end a command in a line of a shell, such as a pipe or the start of a comment. The
/// words after them belong to another command, a file name or the comment.
const ENDS: [&str; 7] = ["#", "|", "&&", "||", ">", "<", ";"];

/// The parser must accept each `affinode` command line in the documents, because users type these
/// lines. The test also accepts a command without its arguments, because a text may only mention
/// the command.
#[test]
fn every_command_of_the_documents_is_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut lines = 0;
    let mut wrong = Vec::new();
    for file in documents(&root) {
        for command in commands(&fs::read_to_string(&file).unwrap()) {
            lines += 1;
            if let Err(error) = Args::try_parse_from(&command)
                && !is_named_only(error.kind())
            {
                wrong.push(format!("{}: {}: {error}", file.display(), command.join(" ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(lines >= MIN_LINES, "{lines} command lines");
}

fn is_named_only(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            | ErrorKind::DisplayVersion
            | ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
    )
}

/// Returns all documents except the command reference, which is generated from the definition of
/// the commands.
fn documents(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root.join("docs"), root.join("config")];
    let here = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    found.extend(here.filter(|path| path.extension().is_some_and(|e| e == "md")));
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("reference") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found
}

/// Returns the `affinode` commands in a document, from the lines of its code blocks and from its
/// code spans.
fn commands(text: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut prose = String::new();
    let mut fenced = false;
    for line in text.lines() {
        match (line.trim_start().starts_with("```"), fenced) {
            (true, _) => fenced = !fenced,
            (false, true) => found.extend(command(line)),
            (false, false) => prose.extend([line, "\n"]),
        }
    }
    for paragraph in prose.split("\n\n") {
        found.extend(paragraph.split('`').skip(1).step_by(2).filter_map(command));
    }
    found
}

/// Returns the words of the `affinode` command in a line, with placeholders replaced by values.
/// `None`: the line contains no such command.
fn command(line: &str) -> Option<Vec<String>> {
    let words = words(line.trim().trim_start_matches("$ "));
    let skipped = words.iter().take_while(|word| *word == "sudo").count();
    let own = words.get(skipped)?;
    // A line that has only the command's name, or only its path in the build folder, is not a
    // command line.
    if own != "affinode" && !own.ends_with("release/bin/affinode") || words.len() < skipped + 2 {
        return None;
    }
    let used = words.into_iter().skip(skipped);
    Some(used.take_while(|word| !ENDS.contains(&word.as_str())).map(|word| filled(&word)).collect())
}

/// Returns a word of a documented command, with a placeholder replaced by a value that the parser
/// accepts. Of alternatives such as `a|b`, the function takes the first. A placeholder in capital
/// letters, such as `FILE`, becomes `1`, because every option accepts `1`.
fn filled(word: &str) -> String {
    let first = word.split('|').next().unwrap_or(word);
    let name =
        |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    match name(first) {
        true => "1".into(),
        false => first.to_owned(),
    }
}

/// Splits a line of a shell into words. A quoted word may contain spaces.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if open == c => quote = None,
            (None, '\'' | '"') => quote = Some(c),
            (None, c) if c.is_whitespace() => words.push(String::new()),
            (_, c) => words.iter_mut().last().into_iter().for_each(|word| word.push(c)),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}
