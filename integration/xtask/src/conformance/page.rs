//! Writes the Markdown page that contains the conformance tables of all suites.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::sh;

const HEAD: &str = "# Conformance

`cargo xtask conformance` wrote this page. It ran the test suites of other projects on one machine:
once with the stock runtime (`io.containerd.runc.v2`) and once with Affinode's. A test that fails
with both runtimes therefore fails for a reason other than Affinode. containerd's client tests
select Affinode's runtime by its name, `io.containerd.affinode.v1`. critest selects it by the
handler that `affinode install` writes into containerd's configuration. With CRI-O, critest compares
the handler of `config/crio/affinode.conf`, which runs `affinode-runtime`, with a handler that runs
runc.
";

/// Returns a text with the date, the machine and the versions of a run. `engine` is the container
/// engine with its version. `runc` is the path of the runc that it runs.
pub fn machine(engine: &str, runc: &Path) -> Result<String> {
    let read = |program: &str, argument: &str| sh::read(Command::new(program).arg(argument));
    let runc = sh::read(Command::new(runc).arg("--version"))?;
    let (date, kernel) = (read("date", "--iso-8601")?, read("uname", "--kernel-release")?);
    Ok(format!(
        "{}: {engine}, {}, Linux {}.",
        date.trim(),
        runc.lines().next().unwrap_or("runc"),
        // The text after the first hyphen is the distribution's suffix.
        kernel.trim().split('-').next().unwrap_or_default(),
    ))
}

/// Writes the table of a suite to the page, in place of an older table of the same suite.
pub fn put(file: &Path, table: &str) -> Result<()> {
    let page = if file.exists() { fs::read_to_string(file)? } else { String::new() };
    fs::write(file, with(&page, table)).with_context(|| format!("cannot write {}", file.display()))
}

fn with(page: &str, table: &str) -> String {
    const SECTION: &str = "\n## ";
    // A suite is identified by the words of its title without the version number.
    let name = |section: &str| -> String {
        let title = section.trim_start_matches("## ").lines().next().unwrap_or_default();
        title.split(' ').filter(|word| !word.starts_with(|c: char| c.is_ascii_digit())).collect()
    };
    let mut sections: Vec<String> =
        page.split(SECTION).skip(1).map(|section| section.trim().to_owned()).collect();
    let table = table.trim().trim_start_matches("## ").to_owned();
    match sections.iter_mut().find(|section| name(section) == name(&table)) {
        Some(older) => *older = table,
        None => sections.push(table),
    }
    let sections = sections.iter().map(|section| format!("{SECTION}{section}\n"));
    HEAD.to_owned() + &sections.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_replaces_the_older_one_of_its_suite() {
        let page = with("", "## critest 1.0\n\nold\n");
        let page = with(&page, "## other tests\n\nthese\n");
        let page = with(&page, "## critest 2.0\n\nnew\n");
        let tables = page.strip_prefix(HEAD).unwrap();
        assert_eq!(tables, "\n## critest 2.0\n\nnew\n\n## other tests\n\nthese\n");
    }
}
