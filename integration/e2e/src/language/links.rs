//! Finds broken links in Markdown files. A link may lead to a file or a heading of the project.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, Result};

use super::files;

/// Returns each link whose target does not exist, as file, line and target.
///
/// # Errors
/// When a file cannot be read.
pub fn broken_links(root: &Path) -> Result<Vec<String>> {
    let mut texts = BTreeMap::new();
    for path in files(root)? {
        if path.extension().is_some_and(|ending| ending == "md") {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            texts.insert(path, text);
        }
    }
    let anchors: BTreeMap<&Path, BTreeSet<String>> =
        texts.iter().map(|(path, text)| (path.as_path(), anchors(text))).collect();
    let mut broken = Vec::new();
    for (path, text) in &texts {
        for (line, target) in targets(text) {
            let why = fault(root, path, target, &anchors);
            if let Some(why) = why {
                let shown = path.strip_prefix(root)?.display();
                broken.push(format!("{shown}:{line}: {target}: {why}"));
            }
        }
    }
    Ok(broken)
}

fn fault(
    root: &Path,
    from: &Path,
    target: &str,
    anchors: &BTreeMap<&Path, BTreeSet<String>>,
) -> Option<&'static str> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = match file {
        "" => from.to_owned(),
        file => normal(&from.parent()?.join(file)),
    };
    if !path.starts_with(root) {
        return Some("outside the project");
    }
    if !path.exists() {
        return Some("no such file");
    }
    let known = || anchors.get(path.as_path()).is_some_and(|known| known.contains(anchor));
    (!anchor.is_empty() && !known()).then_some("no such heading")
}

/// Resolves `.` and `..` in a path.
fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                parts.pop();
            }
            Component::CurDir => {}
            part => parts.push(part),
        }
    }
    parts
}

/// Returns the lines of a Markdown text outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fence && !fenced).then_some((at + 1, line))
    })
}

/// Returns the targets of links of the forms `[text](target)` and `[name]: target`, with their line
/// numbers.
fn targets(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let mut rest = line;
        while let Some(at) = rest.find("](") {
            let from = &rest[at + 2..];
            let Some(end) = from.find(')') else { break };
            // Text within code quotes is not a link.
            let before = line.len() - from.len();
            let quotes = line[..before].matches('`').count();
            let closed = line[before + end..].matches('`').count();
            if quotes.is_multiple_of(2) || closed == 0 {
                let target = from[..end].split_whitespace().next().unwrap_or_default();
                found.push((number, target));
            }
            rest = &from[end..];
        }
        let definition = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
        if let Some((_, target)) = definition {
            found.push((number, target.split_whitespace().next().unwrap_or_default()));
        }
    }
    found
}

/// Returns the anchors of the headings of a Markdown text, as GitHub generates them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let anchor = anchor(title.trim());
        let mut unique = anchor.clone();
        let mut number = 0;
        while !found.insert(unique.clone()) {
            number += 1;
            unique = format!("{anchor}-{number}");
        }
    }
    found
}

/// Returns the anchor of a heading: lower case, spaces replaced by hyphens, and no punctuation
/// except `-` and `_`.
fn anchor(title: &str) -> String {
    let kept = title.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c),
        _ => None,
    });
    kept.flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_files_and_headings_are_found() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let root = folder.path();
        fs::create_dir(root.join("docs"))?;
        fs::write(
            root.join("README.md"),
            "# Top\n[a](docs/a.md#two-words) [b](docs/b.md) [c](#top) `[d](no.md)`\n```\n[e](no.md)\n```\n[f](https://example.com/x) [g](docs/a.md#three) [h](docs)\n",
        )?;
        fs::write(root.join("docs/a.md"), "## Two words\n[up](../README.md#top) [out](../../x)\n")?;
        assert_eq!(
            broken_links(root)?,
            [
                "README.md:2: docs/b.md: no such file",
                "README.md:6: docs/a.md#three: no such heading",
                "docs/a.md:2: ../../x: outside the project",
            ]
        );
        Ok(())
    }

    #[test]
    fn anchors_are_those_of_github() {
        let found = anchors("# A b: `c_d`!\n## A b: c_d\n```\n# no\n```\n### policy.mode\n#x\n");
        let expected = ["a-b-c_d", "a-b-c_d-1", "policymode"].map(str::to_owned);
        assert_eq!(found, BTreeSet::from(expected));
    }
}
