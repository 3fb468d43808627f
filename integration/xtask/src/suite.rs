//! `cargo xtask test`: runs all tests that can run on this machine.

use std::{collections::BTreeSet, ffi::OsStr, fs, path::PathBuf, process::Command};

use affinode_e2e::artifacts::{ARTIFACTS_ENV, workspace_dir};
use affinode_test_notes::{NOTES_ENV, SKIPPED};
use anyhow::{Context, Result, bail};
use clap::Args;
use nix::unistd::Uid;

use crate::{build, deps, docs, helm, output, personas, sh};

#[derive(Args)]
pub struct Options {
    /// Only the end-to-end tests.
    #[arg(long)]
    e2e: bool,
    /// Passed to the tests: a filter, or flags after `--`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Builds everything, then runs the tests of all crates, the end-to-end tests among them. Without
/// a filter, also runs the documents' commands for users with one machine.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the end-to-end tests start containerd and mount: run as root");
    }
    let releases = deps::all()?;
    let artifacts = build::all(build::Profile::Dev)?;
    output::step("Comparing the generated pages with the code");
    docs::check(&artifacts.bin("affinode")?, &artifacts.bin("kubectl-affinode")?)?;
    let mut path = vec![deps::promtool()?.into_os_string()];
    let helm = helm::prepare(&artifacts).map(PathBuf::into_os_string);
    path.extend(helm.into_iter().chain(std::env::var_os("PATH")));
    let path = path.join(OsStr::new(":"));
    let notes = artifacts.root().join("test-notes");
    fs::write(&notes, "").with_context(|| format!("cannot write {}", notes.display()))?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let test = |targets: &[String]| {
        let mut command = Command::new(&cargo);
        command.current_dir(workspace_dir()).args(["test", "--workspace"]);
        for target in targets {
            command.args(["--test", target]);
        }
        command.args(&options.rest);
        command.env(ARTIFACTS_ENV, artifacts.root()).env("PATH", &path).env(NOTES_ENV, &notes);
        // This command has fetched promtool already, so a test that cannot find promtool must fail
        // instead of being skipped.
        command.env("AFFINODE_NEEDS_PROMTOOL", "1");
        // Backtraces are disabled, because the message of a failed check is enough to find the
        // failure.
        command.env("RUST_LIB_BACKTRACE", "0");
        sh::run(&mut command)
    };
    let outcome = (|| {
        output::step(if options.e2e { "End-to-end tests" } else { "Tests of all crates" });
        // No `--package`: it would choose other features of shared crates and build them again.
        let targets = if options.e2e { end_to_end_targets()? } else { Vec::new() };
        test(&targets)?;
        match options.rest.is_empty() {
            true => personas::of_one_machine(&artifacts, releases.own()?),
            false => Ok(()),
        }
    })();
    let text = fs::read_to_string(&notes);
    output::out(&summary(&text.with_context(|| format!("cannot read {}", notes.display()))?));
    outcome
}

/// Returns the names of the test programs of the end-to-end crate.
fn end_to_end_targets() -> Result<Vec<String>> {
    let folder = workspace_dir().join("integration/e2e/tests");
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    // Each file `NAME.rs` and each folder `NAME` with a `main.rs` is a test program.
    let paths = entries.flatten().map(|entry| entry.path());
    let names = paths.filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned()));
    Ok(names.collect())
}

/// Returns a summary of the notes that tests have written: counts, then the skipped tests with
/// their reasons.
fn summary(notes: &str) -> String {
    let (skipped, told): (Vec<&str>, Vec<&str>) =
        notes.lines().partition(|line| line.starts_with(SKIPPED));
    let skipped: BTreeSet<&str> =
        skipped.into_iter().filter_map(|line| line.strip_prefix(SKIPPED)).collect();
    let mut lines: Vec<String> = told.into_iter().map(str::to_owned).collect();
    lines.push(match skipped.len() {
        0 => "No test was skipped.".into(),
        1 => "1 test was skipped:".into(),
        count => format!("{count} tests were skipped:"),
    });
    lines.extend(skipped.iter().map(|line| format!("  {line}")));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_and_names_each_skip_once() {
        let notes = "skipped e2e::ways::python: python3: not installed\n\
                     e2e::copier::again: restores: 11 of 12\n\
                     skipped e2e::spec::line: containerd-line: no 1.6\n\
                     skipped e2e::spec::line: containerd-line: no 1.6\n";
        let told = "e2e::copier::again: restores: 11 of 12\n2 tests were skipped:\n  \
                    e2e::spec::line: containerd-line: no 1.6\n  e2e::ways::python: python3: not installed";
        assert_eq!(summary(notes), told);
        assert_eq!(summary(""), "No test was skipped.");
    }
}
