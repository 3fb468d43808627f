//! Checks the structure of the controller's source code. The files of `controller/core`, and the
//! modules of `controller/src`, may depend on each other in one direction only. The methods of a
//! type may be in two files at most.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result};

/// A call graph. It maps the name of each file or module to the names of the files or modules to
/// which it refers.
type Calls = BTreeMap<String, BTreeSet<String>>;

/// Checks that no files of the controller's core call each other in a circle. The core can then be
/// read file by file, from the bottom up.
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

/// Checks that no modules of the controller refer to each other in a circle. The modules can then
/// be read from the bottom up.
#[test]
fn controller_modules_refer_in_one_direction() -> Result<()> {
    let folder = workspace_dir().join("controller/src");
    let mut modules: BTreeMap<String, String> = BTreeMap::new();
    for (path, text) in product_files(&folder)? {
        let below = path.strip_prefix(&folder)?;
        let first = below.components().next().context("a file has no name")?;
        let name = Path::new(&first).file_stem().context("a file has no name")?.to_string_lossy();
        if !["lib", "bin"].contains(&name.as_ref()) {
            modules.entry(name.into_owned()).or_default().push_str(&text);
        }
    }
    let references = references(&modules);
    let count: usize = references.values().map(BTreeSet::len).sum();
    assert!(count > 40, "only {count} references were found, so the check sees too little");
    assert_eq!(circle(&references), None, "these modules refer to each other in a circle");
    Ok(())
}

/// Checks that no type has methods in more than two files. The type that holds all data of a crate
/// would otherwise grow a method for each feature.
#[test]
fn a_type_has_methods_in_two_files_at_most() -> Result<()> {
    let crates = [
        ("controller/core", "Node"),
        ("controller", "NodeActor"),
        ("controller/cli", ""),
        ("controller/copier", ""),
        ("controller/installer", ""),
        ("controller/simulate", "SimulatedNode"),
        ("controller/cluster", ""),
        ("runtime-shim", ""),
        ("preload", ""),
        ("proto", ""),
    ];
    for (name, known) in crates {
        let mut places: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
        for (path, text) in product_files(&workspace_dir().join(name).join("src"))? {
            for implemented in text.lines().filter_map(implemented) {
                places.entry(implemented).or_default().insert(path.clone());
            }
        }
        assert!(known.is_empty() || places.contains_key(known), "{name}: {places:?}");
        assert!(places.len() > 10, "{name}: the check sees too little: {places:?}");
        let spread: Vec<_> = places.iter().filter(|(_, files)| files.len() > 2).collect();
        assert!(spread.is_empty(), "{name}: these types have methods in many files: {spread:?}");
    }
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

#[test]
fn circle_of_modules_is_found() {
    let module = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let mut modules = BTreeMap::from([
        module("top", "use crate::{\n    middle::{base, Node},\n    side,\n};\n"),
        module("middle", "fn go() {\n    crate::base::say()\n}\n"),
        module("base", "use super::top;\n"),
        module("side", ""),
    ]);
    let found = references(&modules);
    assert_eq!(found["top"], BTreeSet::from(["middle".to_owned(), "side".to_owned()]));
    assert_eq!(circle(&found), None);
    modules.insert("base".into(), "use crate::{error, top};\n".into());
    let circle = circle(&references(&modules)).unwrap_or_default();
    assert_eq!(circle.len(), 3, "{circle:?}");
}

#[test]
fn implementing_lines_name_their_type() {
    let name = |line: &str| implemented(line).unwrap_or_default();
    assert_eq!(name("impl Node {"), "Node");
    assert_eq!(name("impl<'a> SimulatedNode<'a> {"), "SimulatedNode");
    assert_eq!(name("impl<T> Drop for Guard<T> {"), "");
}

/// Reads the product code below a folder, file by file. Files that are compiled only for tests are
/// omitted.
fn product_files(folder: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let (mut files, mut tests) = (BTreeMap::new(), BTreeSet::new());
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path)?;
                let own = match path.file_stem().map(|stem| stem.to_string_lossy()) {
                    Some(stem) if !["mod", "lib", "main"].contains(&stem.as_ref()) => {
                        folder.join(stem.as_ref())
                    }
                    _ => folder.clone(),
                };
                let declared = text.split("#[cfg(test)]\n").skip(1).filter_map(|rest| {
                    let (_, name) = rest.lines().next()?.strip_suffix(';')?.split_once("mod ")?;
                    Some(own.join(name))
                });
                tests.extend(declared);
                files.insert(path, without_tests(&text));
            }
        }
    }
    files.retain(|path, _| {
        let module = path.with_extension("");
        !module.ancestors().any(|part| tests.contains(part))
    });
    Ok(files)
}

/// Returns the name of the type in a line such as `impl Node {` or `impl<'a> Node<'a> {`.
fn implemented(line: &str) -> Option<String> {
    let rest = line.strip_prefix("impl")?.strip_suffix(" {")?;
    let rest = match rest.strip_prefix('<') {
        Some(generic) => generic.split_once("> ")?.1,
        None => rest.strip_prefix(' ')?,
    };
    let name = identifier(rest);
    (!name.is_empty() && !rest.contains(" for ")).then(|| name.to_owned())
}

/// Collects the references between modules. It searches for `crate::name`, and for the names in
/// `crate::{…}`.
fn references(modules: &BTreeMap<String, String>) -> Calls {
    let of = |(name, text): (&String, &String)| {
        let paths = text.match_indices("crate::").map(|(at, path)| &text[at + path.len()..]);
        let mut others: BTreeSet<String> = paths.flat_map(first_names).collect();
        others.retain(|other| other != name && modules.contains_key(other));
        (name.clone(), others)
    };
    modules.iter().map(of).collect()
}

/// Returns the first name of a path. For a path in braces, returns the first name of each path in
/// it.
fn first_names(path: &str) -> Vec<String> {
    let Some(group) = path.strip_prefix('{') else { return vec![identifier(path).to_owned()] };
    let (mut depth, mut outer) = (0, String::new());
    for character in group.chars() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            other if depth == 0 => outer.push(other),
            _ => {}
        }
    }
    outer.split(',').map(|name| identifier(name.trim()).to_owned()).collect()
}

/// Collects the calls between files. A call is a function after the name of its file, as in
/// `file::function(`. The call of a method of `NodeState` through `node.` or `self.` also counts.
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

/// Returns the product code of a file, without its tests and comments. Lines that begin with a
/// method call are joined to the line before.
fn without_tests(text: &str) -> String {
    let is_tests =
        |rest: &str| rest.lines().next().is_some_and(|line| line.ends_with("mod tests {"));
    let mut ends = text.match_indices("#[cfg(test)]\n");
    let end = ends.find(|(at, attribute)| is_tests(&text[at + attribute.len()..]));
    let product = &text[..end.map_or(text.len(), |(at, _)| at)];
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

/// Returns the files that form a circle of calls. `None` if there is no circle. It repeatedly
/// removes files that call no remaining file or that no remaining file calls.
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
