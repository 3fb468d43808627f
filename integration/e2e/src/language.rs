//! Counts words and phrases that the project avoids, and compares the counts with limits.
//!
//! The limits are in [`LIMITS_FILE`] and may only be lowered. The counts cover comments and string
//! literals in Rust, Markdown files, and the files below `config/`.

mod links;
mod rust_text;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

pub use links::broken_links;
use rust_text::RustText;

/// Path of the file with the limits. Each line contains a name and a number.
pub const LIMITS_FILE: &str = "integration/e2e/language-limits.txt";
/// Folders that are not searched, because they contain no text of the project.
const SKIPPED: [&str; 5] = ["target", "node_modules", "corpus", ".git", ".cache"];
/// Files of this module. They are not counted, because they contain the avoided words themselves.
const OWN: [&str; 2] = ["integration/e2e/src/language.rs", "integration/e2e/src/language"];
/// File name extensions below `config/` that are not text.
const BINARY: [&str; 1] = ["png"];
/// Folders of the product's crates. The share of one-word type names is counted only in these
/// crates.
const PRODUCT: [&str; 4] = ["proto", "preload", "controller", "runtime-shim"];
/// Maximum length of a test's name, in characters.
const MAX_TEST_NAME: usize = 45;
/// Number of words up to which an item's documentation counts as too short.
const SHORT_DOC_WORDS: usize = 3;

/// Counts by name. A name has the form `scope.marker`, such as `comments.nobody`.
pub type Counts = BTreeMap<String, u64>;

/// Name of a marker (an avoided word or phrase), and a function that counts the marker in a line.
type Marker = (&'static str, fn(&str) -> usize);

const MARKERS: [Marker; 6] = [
    ("nobody", |line| usize::from(has_word(line, &["nobody", "somebody", "everybody", "anybody"]))),
    ("who-clause", who_clauses),
    ("so-many", |line| usize::from(has_so_many(line))),
    ("of-one-that", |line| usize::from(has_of_one_that(line))),
    ("home", |line| usize::from(has_word(line, &["home"]))),
    ("away", |line| usize::from(has_word(line, &["away"]))),
];

/// Texts in which an avoided word is legitimate. They are not counted.
const EXCEPTIONS: [&str; 6] = [
    // The entry of the user `nobody` in `/etc/passwd`.
    "nobody:x:65534:65534:nobody",
    // Paths and variables of users' folders.
    "/home",
    "HOME",
    "--create-home",
    "cd {home}",
    // "Takes the GPU away" describes the product in one sentence.
    "takes the GPU away",
];

/// Counts all markers (avoided words and phrases) in the files below a repository's root.
///
/// # Errors
/// When a file cannot be read.
pub fn count(root: &Path) -> Result<Counts> {
    let mut counts = Counts::new();
    for (marker, _) in MARKERS {
        for scope in ["comments", "strings", "markdown", "config"] {
            counts.insert(format!("{scope}.{marker}"), 0);
        }
    }
    let mut types = BTreeSet::new();
    let (mut short_docs, mut bounds, mut long_tests) = (0, 0, 0);
    for path in files(root)? {
        let relative = path.strip_prefix(root)?;
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let top = relative.components().next().map(|part| part.as_os_str().to_string_lossy());
        let in_config = top.as_deref() == Some("config");
        if OWN.iter().any(|own| relative.starts_with(own)) {
            continue;
        }
        if ending != "rs" && ending != "md" && (!in_config || BINARY.contains(&ending)) {
            continue;
        }
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        match ending {
            "rs" => {
                let parts = RustText::of(&text);
                add_markers(&mut counts, "comments", parts.comments.iter().map(String::as_str));
                add_markers(&mut counts, "strings", parts.strings.iter().flat_map(|s| s.lines()));
                short_docs += count_short_docs(&text);
                bounds += count_bounds(&parts.code);
                long_tests += count_long_tests(&parts.code);
                if top.is_some_and(|top| PRODUCT.contains(&top.as_ref())) {
                    types.extend(type_names(&parts.code));
                }
            }
            "md" => add_markers(&mut counts, "markdown", text.lines()),
            _ => add_markers(&mut counts, "config", text.lines()),
        }
    }
    let one_word = types.iter().filter(|name| is_one_word(name)).count();
    // The percentage is rounded up, so that one additional one-word name raises the percentage even
    // if there are many names.
    let percent = (one_word * 100).div_ceil(types.len().max(1));
    counts.insert("rust.short-docs".into(), short_docs);
    counts.insert("rust.most-least-longest-constants".into(), bounds);
    counts.insert("rust.test-names-over-45-characters".into(), long_tests);
    counts.insert("rust.one-word-type-names-percent".into(), u64::try_from(percent)?);
    Ok(counts)
}

/// Parses the text of the file with the limits.
///
/// # Errors
/// When a line is neither a comment nor a name and a number.
pub fn parse_limits(text: &str) -> Result<Counts> {
    let mut limits = Counts::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let parsed = line
            .split_once(' ')
            .and_then(|(name, number)| Some((name.to_owned(), number.trim().parse().ok()?)));
        let Some((name, number)) = parsed else {
            bail!("{LIMITS_FILE}: {line:?} is no name and number");
        };
        if limits.insert(name, number).is_some() {
            bail!("{LIMITS_FILE}: {line:?} is there twice");
        }
    }
    Ok(limits)
}

/// Returns one line of text for each count that exceeds its limit or has no limit.
#[must_use]
pub fn above(limits: &Counts, counts: &Counts) -> Vec<String> {
    let over = counts.iter().filter_map(|(name, count)| match limits.get(name) {
        Some(limit) if count <= limit => None,
        Some(limit) => Some(format!("{name}: {count}, the limit is {limit}")),
        None => Some(format!("{name}: {count}, there is no limit")),
    });
    over.collect()
}

/// Returns one line of text for each limit that is higher than its count or has no count.
#[must_use]
pub fn slack(limits: &Counts, counts: &Counts) -> Vec<String> {
    let loose = limits.iter().filter_map(|(name, limit)| match counts.get(name) {
        Some(count) if count >= limit => None,
        Some(count) => Some(format!("{name}: {count}, the limit is {limit}")),
        None => Some(format!("{name}: nothing is counted under this name")),
    });
    loose.collect()
}

/// Returns the text of the file with the limits, with each limit lowered to its count. No limit is
/// raised.
#[must_use]
pub fn lowered(text: &str, counts: &Counts) -> String {
    let line = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        let (limit, count) = (number.trim().parse::<u64>().ok()?, counts.get(name)?);
        (*count < limit).then(|| format!("{name} {count}"))
    };
    text.lines().map(|l| line(l).unwrap_or_else(|| l.to_owned()) + "\n").collect()
}

/// Returns the number of words of a Markdown text, and of its longest paragraph. Code blocks are
/// excluded. An item of a list counts as a paragraph, but a row of a table does not.
#[must_use]
pub fn markdown_words(text: &str) -> (usize, usize) {
    let (mut all, mut longest, mut paragraph) = (0, 0, 0);
    let mut fenced = false;
    for line in text.lines().map(str::trim) {
        let fence = line.starts_with("```");
        fenced ^= fence;
        let words = if fence || fenced { 0 } else { line.split_whitespace().count() };
        all += words;
        let alone = words == 0 || line.starts_with(['|', '#']);
        if alone || line.starts_with("- ") {
            paragraph = 0;
        }
        if !alone {
            paragraph += words;
        }
        longest = longest.max(paragraph);
    }
    (all, longest)
}

/// Lists the files of the project, in a fixed order.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            let skipped = SKIPPED.iter().any(|name| entry.file_name() == *name);
            if kind.is_dir() && !skipped {
                folders.push(path);
            } else if kind.is_file() {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn add_markers<'a>(counts: &mut Counts, scope: &str, lines: impl Iterator<Item = &'a str>) {
    for line in lines {
        let line = EXCEPTIONS.iter().fold(line.to_owned(), |line, known| line.replace(known, ""));
        for (name, of) in MARKERS {
            let found = u64::try_from(of(&line)).unwrap_or(u64::MAX);
            *counts.entry(format!("{scope}.{name}")).or_default() += found;
        }
    }
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

fn has_word(line: &str, wanted: &[&str]) -> bool {
    words(line).any(|word| wanted.iter().any(|other| word.eq_ignore_ascii_case(other)))
}

/// Counts the matches of `(?i)(^|[.;:,(]\s*)(who|whoever)\s` in a line.
fn who_clauses(line: &str) -> usize {
    let lower = line.to_ascii_lowercase();
    let opens = |at: usize| {
        let before = lower[..at].trim_end();
        at == 0 || before.ends_with(['.', ';', ':', ',', '('])
    };
    let ends =
        |at: usize, word: &str| lower[at + word.len()..].starts_with(|c: char| c.is_whitespace());
    let found = |word: &'static str| {
        lower.match_indices(word).filter(|(at, _)| opens(*at) && ends(*at, word)).count()
    };
    found("who") + found("whoever")
}

/// Whether a line matches `\b[Ss]o (many|often|long|soon|much)\b(?! (as|that))`.
fn has_so_many(line: &str) -> bool {
    let amounts = ["many", "often", "long", "soon", "much"];
    after_each(line, &["So ", "so "]).any(|rest| {
        let word = words(rest).next().filter(|word| rest.starts_with(word)).unwrap_or_default();
        let follows = &rest[word.len()..];
        let compared = [" as", " that"].iter().any(|next| follows.starts_with(next));
        amounts.contains(&word) && !compared
    })
}

/// Whether a line matches `\b[Oo]f (one|those) that\b`.
fn has_of_one_that(line: &str) -> bool {
    after_each(line, &["Of ", "of "]).any(|rest| {
        let mut next = words(rest);
        let first = next.next().is_some_and(|word| word == "one" || word == "those");
        first && next.next() == Some("that")
    })
}

/// Returns the text after each occurrence of one of `beginnings`. An occurrence counts only at the
/// start of a word.
fn after_each<'a>(line: &'a str, beginnings: &[&'a str]) -> impl Iterator<Item = &'a str> {
    beginnings.iter().flat_map(|beginning| line.match_indices(*beginning)).filter_map(
        |(at, beginning)| {
            let before = line[..at].chars().next_back();
            let starts = before.is_none_or(|c| !c.is_alphanumeric() && c != '_');
            starts.then(|| &line[at + beginning.len()..])
        },
    )
}

/// Counts the `///` blocks with three words or fewer.
fn count_short_docs(text: &str) -> u64 {
    let (mut short, mut block): (u64, Option<usize>) = (0, None);
    for line in text.lines().chain([""]) {
        match line.trim_start().strip_prefix("///") {
            Some(doc) if !doc.starts_with('/') => {
                // Text with a path, a pattern or a link is specific enough, so it does not count as
                // short.
                let is_reference = doc.contains('`');
                let words = doc.split_whitespace().count();
                *block.get_or_insert(0) += words + usize::from(is_reference) * SHORT_DOC_WORDS;
            }
            _ => short += u64::from(block.take().is_some_and(|words| words <= SHORT_DOC_WORDS)),
        }
    }
    short
}

/// Counts the constants whose names begin with MOST, LEAST or LONGEST instead of MAX or MIN.
fn count_bounds(code: &str) -> u64 {
    let named = |line: &str| {
        let name = words(line).skip_while(|word| *word != "const" && *word != "static").nth(1);
        let first = name.and_then(|name| name.split('_').next());
        first.is_some_and(|first| ["MOST", "LEAST", "LONGEST"].contains(&first))
    };
    code.lines().filter(|line| named(line)).count() as u64
}

/// Counts the tests whose names are longer than 45 characters.
fn count_long_tests(code: &str) -> u64 {
    let (mut long, mut is_test) = (0, false);
    for line in code.lines().map(str::trim_start) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        }
        if let Some(name) = words(line).skip_while(|word| *word != "fn").nth(1) {
            long += u64::from(is_test && name.len() > MAX_TEST_NAME);
            is_test = false;
        }
    }
    long
}

/// Returns the names of structs, enums, traits, unions and type aliases that are declared at the
/// beginning of a line.
fn type_names(code: &str) -> impl Iterator<Item = String> + '_ {
    code.lines().filter_map(|line| {
        let mut words = words(line)
            .skip_while(|word| ["pub", "crate", "super", "unsafe", "in", "self"].contains(word));
        let kind = words.next()?;
        let name =
            words.next().filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase()))?;
        ["struct", "enum", "trait", "union", "type"].contains(&kind).then(|| name.to_owned())
    })
}

/// Whether a type name consists of one word: its only capital is the first letter.
fn is_one_word(name: &str) -> bool {
    name.chars().filter(char::is_ascii_uppercase).count() == 1
}

#[cfg(test)]
mod tests;
