//! `cargo xtask docs`: generates reference pages from the code. With `--limits` it instead lowers
//! the limits for avoided words: the number of times that the project's texts may contain each
//! word.

mod api;
mod chart;
mod markdown;
mod pages;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::{
    artifacts::{target_dir, workspace_dir},
    language,
};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde::de::DeserializeOwned;

use crate::{output, sh};

#[derive(Args)]
pub struct Options {
    /// Write nothing; fail if a page differs from the code.
    #[arg(long)]
    check: bool,
    /// Lower the limits of integration/e2e/language-limits.txt to the present counts.
    #[arg(long, conflicts_with = "check")]
    limits: bool,
}

/// A generated page: its path in the repository, and its text.
type Page = (&'static str, String);

pub fn run(options: &Options) -> Result<()> {
    if options.limits {
        return lower_limits();
    }
    let (affinode, plugin) = build()?;
    let pages = generate(&affinode, &plugin)?;
    if options.check { compare(&pages) } else { write(&pages) }
}

/// Fails if a page in the repository differs from the page that the built commands generate.
pub fn check(affinode: &Path, plugin: &Path) -> Result<()> {
    compare(&generate(affinode, plugin)?)
}

/// Builds the commands `affinode` and `kubectl affinode`, and returns their paths.
fn build() -> Result<(PathBuf, PathBuf)> {
    output::step("Building affinode and kubectl-affinode");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.current_dir(workspace_dir());
    build.args(["build", "--quiet", "-p", "affinode-cli", "-p", "affinode-cluster"]);
    sh::run(build.args(["--bin", "affinode", "--bin", "kubectl-affinode"]))?;
    let built = |name: &str| target_dir().join("debug").join(name);
    Ok((built("affinode"), built("kubectl-affinode")))
}

fn printed<T: DeserializeOwned>(program: &Path) -> Result<T> {
    let text = sh::read(Command::new(program).arg("reference"))?;
    serde_json::from_str(&text)
        .with_context(|| format!("cannot parse the output of {} reference", program.display()))
}

fn generate(affinode: &Path, plugin: &Path) -> Result<Vec<Page>> {
    let known: pages::Reference = printed(affinode)?;
    let plugin: pages::Commands = printed(plugin)?;
    let read = |path: &str| {
        let path = workspace_dir().join(path);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    Ok(vec![
        ("docs/configuration.md", pages::configuration(&known)),
        ("docs/annotations.md", pages::annotations(&known)),
        ("docs/troubleshooting.md", pages::troubleshooting(&known)),
        ("docs/reference/metrics.md", pages::metrics(&known)),
        ("docs/reference/cli.md", pages::cli(&known, &plugin)),
        (
            "docs/reference/api.md",
            api::page(&read("config/openapi.yaml")?, &read("proto/control.proto")?)?,
        ),
        (
            "docs/reference/chart.md",
            chart::page(
                &read("config/helm/affinode/values.yaml")?,
                &read("config/helm/affinode/values.schema.json")?,
            )?,
        ),
    ])
}

fn write(pages: &[Page]) -> Result<()> {
    for (path, text) in pages {
        let file = workspace_dir().join(path);
        let folder = file.parent().context("the page's path has no folder")?;
        fs::create_dir_all(folder)?;
        if fs::read_to_string(&file).is_ok_and(|old| old == *text) {
            continue;
        }
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        output::note(&format!("wrote {path}"));
    }
    Ok(())
}

fn compare(pages: &[Page]) -> Result<()> {
    let mut differing = Vec::new();
    for (path, text) in pages {
        let found = fs::read_to_string(workspace_dir().join(path)).unwrap_or_default();
        if found != *text {
            let line = first_difference(&found, text);
            differing.push(format!("{path}, line {line}"));
        }
    }
    if differing.is_empty() {
        return Ok(());
    }
    bail!("generated pages differ: {}; run `cargo xtask docs`", differing.join("; "))
}

fn first_difference(found: &str, wanted: &str) -> usize {
    let mut wanted = wanted.lines();
    let same = found.lines().take_while(|line| wanted.next() == Some(line)).count();
    same + 1
}

fn lower_limits() -> Result<()> {
    let root = workspace_dir();
    let file = root.join(language::LIMITS_FILE);
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let limits = language::parse_limits(&text)?;
    let counts = language::count(&root)?;
    let above = language::above(&limits, &counts);
    let lowered = language::lowered(&text, &counts);
    if lowered != text {
        fs::write(&file, &lowered).with_context(|| format!("cannot write {}", file.display()))?;
        output::note(&format!("wrote {}", language::LIMITS_FILE));
    }
    if above.is_empty() {
        return Ok(());
    }
    bail!(
        "these counts are above their limits; lower the counts, a limit must not be raised:\n{}",
        above.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_difference_is_a_line_number() {
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), 2);
        assert_eq!(first_difference("", "a\n"), 1);
        assert_eq!(first_difference("a\n", "a\nb\n"), 2);
    }

    #[test]
    fn differing_pages_name_the_command() {
        let error = compare(&[("docs/none.md", "text".into())]).unwrap_err().to_string();
        assert!(error.contains("docs/none.md") && error.contains("cargo xtask docs"), "{error}");
    }
}
