//! Checks that the files of `controller/core` call each other in one direction only.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result};

/// Names of files, and the files that each file calls.
type Calls = BTreeMap<String, BTreeSet<String>>;

/// A reader can understand the core file by file, from the bottom up, only if no files call each
/// other in a circle.
#[test]
fn core_files_call_in_one_direction() -> Result<()> {
    let folder = workspace_dir().join("controller/core/src");
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.file_stem().context("a file has no name")?.to_string_lossy();
            files.insert(name.into_owned(), fs::read_to_string(&path)?);
        }
    }
    let calls = calls(&files);
    let count: usize = calls.values().map(BTreeSet::len).sum();
    assert!(count > 100, "only {count} calls were found, so the check sees too little");
    assert_eq!(circle(&calls), None, "these files call each other in a circle");
    Ok(())
}

/// The type that holds all data would otherwise grow a method for each feature again.
#[test]
fn core_type_has_methods_in_two_files_at_most() -> Result<()> {
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut folders = vec![workspace_dir().join("controller/core/src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            for name in fs::read_to_string(&path)?.lines().filter_map(implemented) {
                let in_tests = path.components().any(|part| part.as_os_str() == "tests");
                if !in_tests {
                    places.entry(name).or_default().insert(path.display().to_string());
                }
            }
        }
    }
    assert!(places.contains_key("Node"), "{places:?}");
    let spread: Vec<_> = places.iter().filter(|(_, files)| files.len() > 2).collect();
    assert!(spread.is_empty(), "these types have methods in more than two files: {spread:?}");
    Ok(())
}

#[test]
fn circle_of_files_is_found() {
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let mut files = BTreeMap::from([
        file("top", "fn begin() {\n    middle::go(node);\n}\n"),
        file("middle", "fn go(node: &mut NodeState) {\n    node\n        .say(1);\n}\n"),
        file("base", "impl NodeState {\n    pub(super) fn say(&self) {}\n}\n"),
    ]);
    assert_eq!(circle(&calls(&files)), None);
    files.insert(
        "base".into(),
        "impl NodeState {\n    fn say(&self) {\n        top::begin()\n    }\n}\n".into(),
    );
    let circle = circle(&calls(&files)).unwrap_or_default();
    assert_eq!(circle.len(), 3, "{circle:?}");
}

/// The name of the type in a line such as `impl Node {`.
fn implemented(line: &str) -> Option<String> {
    let name = line.strip_prefix("impl ")?.strip_suffix(" {")?;
    name.chars().all(char::is_alphanumeric).then(|| name.to_owned())
}

/// Collects the calls between files: functions by the file's name, and `node.method(` if the method
/// is one of `NodeState`.
fn calls(files: &BTreeMap<String, String>) -> Calls {
    let product: BTreeMap<&String, String> =
        files.iter().map(|(name, text)| (name, without_tests(text))).collect();
    let mut methods: BTreeMap<String, &String> = BTreeMap::new();
    for (file, text) in &product {
        let block = text.split("impl NodeState {").nth(1).unwrap_or_default();
        let own = block.split("\n}").next().unwrap_or_default();
        for line in
            own.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     "))
        {
            if let Some((_, declared)) = line.split_once("fn ") {
                methods.insert(identifier(declared).to_owned(), file);
            }
        }
    }
    let mut calls: Calls = files.keys().map(|file| (file.clone(), BTreeSet::new())).collect();
    for (file, text) in &product {
        let of_modules = files.keys().filter(|other| names_function_of(text, other));
        let of_methods = ["node.", "self."].into_iter().flat_map(|receiver| {
            text.match_indices(receiver).filter_map(|(at, _)| {
                let called = &text[at + receiver.len()..];
                let name = identifier(called);
                methods.get(name).copied().filter(|_| called[name.len()..].starts_with('('))
            })
        });
        let others = of_modules.chain(of_methods).filter(|other| other != file).cloned();
        calls.entry((*file).clone()).or_default().extend(others);
    }
    calls
}

/// Whether a text calls or imports a function of a file: `file::function(` or `file::{function}`.
/// Types and constants do not count.
fn names_function_of(text: &str, file: &str) -> bool {
    let path = format!("{file}::");
    text.match_indices(&path).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let is_whole = before.is_none_or(|c| !c.is_alphanumeric() && c != '_');
        let named = &text[at + path.len()..];
        let list = named.strip_prefix('{').and_then(|list| list.split('}').next());
        let mut names = list.unwrap_or_else(|| identifier(named)).split(',');
        is_whole && names.any(|name| name.trim().starts_with(|c: char| c.is_lowercase()))
    })
}

/// Returns a file's product code without comments. Chains of calls are joined to one line.
fn without_tests(text: &str) -> String {
    let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let mut joined = String::new();
    for line in product.lines() {
        let code = line.split("//").next().unwrap_or_default().trim_end();
        if !code.trim_start().starts_with('.') {
            joined.push('\n');
            joined.push_str(code);
        } else {
            joined.push_str(code.trim_start());
        }
    }
    joined
}

fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// Removes files that call no other remaining file, or that no remaining file calls, until none is
/// left to remove. What remains forms a circle.
fn circle(calls: &Calls) -> Option<BTreeSet<String>> {
    let mut left = calls.clone();
    loop {
        let names: BTreeSet<String> = left.keys().cloned().collect();
        let called: BTreeSet<String> = left.values().flatten().cloned().collect();
        let ended: Vec<String> = left
            .iter()
            .filter(|(name, others)| others.is_disjoint(&names) || !called.contains(*name))
            .map(|(name, _)| name.clone())
            .collect();
        if ended.is_empty() {
            return (!names.is_empty()).then_some(names);
        }
        for name in ended {
            left.remove(&name);
        }
    }
}
