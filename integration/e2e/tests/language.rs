//! Checks the language of the project. The counts of avoided words only decrease, links lead to
//! existing targets, and documents stay short.

use std::{collections::BTreeSet, fs};

use affinode_e2e::{
    artifacts::workspace_dir,
    language::{self, LIMITS_FILE},
};
use anyhow::Result;

#[test]
fn avoided_words_only_become_fewer() -> Result<()> {
    let root = workspace_dir();
    let limits = language::parse_limits(&fs::read_to_string(root.join(LIMITS_FILE))?)?;
    let counts = language::count(&root)?;
    let above = language::above(&limits, &counts);
    assert!(above.is_empty(), "more than before; write it otherwise:\n{}", above.join("\n"));
    let slack = language::slack(&limits, &counts);
    let hint = "fewer than the limit; run `cargo xtask docs --limits`";
    assert!(slack.is_empty(), "{hint}:\n{}", slack.join("\n"));
    Ok(())
}

#[test]
fn links_lead_to_files_and_headings() -> Result<()> {
    let broken = language::broken_links(&workspace_dir())?;
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(())
}

#[test]
fn readme_and_architecture_stay_short() -> Result<()> {
    // Maximum number of words, and of words in the longest paragraph. Code blocks do not count.
    for (document, most, longest) in
        [("README.md", 900, Some(80)), ("ARCHITECTURE.md", 2_500, None)]
    {
        let text = fs::read_to_string(workspace_dir().join(document))?;
        let (words, paragraph) = language::markdown_words(&text);
        assert!(words > 100, "{document} has {words} words");
        assert!(words <= most, "{document} has {words} words, at most {most}");
        if let Some(longest) = longest {
            let hint = "move what is more to docs/";
            assert!(paragraph <= longest, "{document}: a paragraph of {paragraph} words; {hint}");
        }
    }
    Ok(())
}

#[test]
fn every_alert_has_a_runbook() -> Result<()> {
    let read = |path: &str| fs::read_to_string(workspace_dir().join(path));
    let rules = read("config/prometheus/affinode.rules.yml")?;
    let alerts: BTreeSet<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(!alerts.is_empty(), "the rules have no alert");
    let operations = read("docs/operations.md")?;
    let headings: BTreeSet<&str> =
        operations.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let missing: Vec<_> = alerts.difference(&headings).collect();
    assert!(missing.is_empty(), "docs/operations.md has no heading for {missing:?}");
    let named = headings.iter().filter(|heading| heading.starts_with("Affinode"));
    let gone: Vec<_> = named.filter(|heading| !alerts.contains(**heading)).collect();
    assert!(gone.is_empty(), "docs/operations.md has headings of no alert: {gone:?}");
    Ok(())
}

#[test]
fn tests_named_in_conformance_page_exist() -> Result<()> {
    let root = workspace_dir();
    let page = fs::read_to_string(root.join("integration/conformance-dra.md"))?;
    let is_test = |word: &&str| {
        word.contains('_') && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
    };
    let named: BTreeSet<&str> = page.split('`').skip(1).step_by(2).filter(is_test).collect();
    assert!(named.len() > 20, "{named:?}");
    let mut code = String::new();
    let mut folders = vec![root.join("controller/cluster"), root.join("integration/xtask/src/k8s")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|it| it == "rs") => {
                    code += &fs::read_to_string(path)?;
                }
                false => {}
            }
        }
    }
    let exists = |name: &str| {
        // A function can have parameters of lifetimes.
        ["(", "<"].iter().any(|next| code.contains(&format!("fn {name}{next}")))
    };
    let missing: Vec<_> = named.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "no test has the name: {missing:?}");
    Ok(())
}

#[test]
fn every_reason_is_given_somewhere() -> Result<()> {
    let root = workspace_dir();
    let reasons = fs::read_to_string(root.join("proto/src/reason.rs"))?;
    let variants = reasons.lines().filter_map(|line| {
        let (name, rest) = line.strip_prefix("    ")?.split_once(" = ")?;
        (rest.starts_with('"') && !name.contains(' ')).then_some(name)
    });
    let variants: BTreeSet<String> = variants.map(|name| format!("Reason::{name}")).collect();
    assert!(variants.len() > 40, "{variants:?}");
    let mut given = BTreeSet::new();
    let mut folders = vec![
        root.join("controller/src"),
        root.join("controller/cli/src"),
        root.join("controller/core/src"),
    ];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let is_test = path.file_name().is_some_and(|name| {
                let name = name.to_string_lossy();
                name == "tests" || name.ends_with("tests.rs")
            });
            if path.is_dir() && !is_test {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") && !is_test {
                let text = fs::read_to_string(&path)?;
                let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                let words = code.split(|c: char| !c.is_alphanumeric() && c != ':');
                given.extend(words.filter(|word| variants.contains(*word)).map(str::to_owned));
            }
        }
    }
    let missing: Vec<_> = variants.difference(&given).collect();
    assert!(missing.is_empty(), "no code gives the reasons {missing:?}");
    Ok(())
}
