//! `cargo xtask conformance`: suites that others wrote, with the stock runtime and with ours.
//!
//! ```text
//! Go's module proxy ──> source of the suite ──> test program ─┬─ stock runc ──> outcome of each test ─┐
//! images made here ──> registry on loopback ──────────────────┴─ affinode ────> outcome of each test ─┴─> table
//! ```
//!
//! What passes with the stock runtime must pass with ours. A test that does not is run again,
//! alone and with both: some of these tests look at the whole machine.

mod client;
mod go;
mod outcome;
mod registry;

use std::path::PathBuf;

use affinode_e2e::release::{Line, Release};
use anyhow::{Context, Result, bail};
use clap::Args;
use nix::unistd::Uid;

use self::{client::Client, outcome::Comparison};
use crate::{build, deps, say};

/// Which suites, and where the table goes.
#[derive(Args)]
pub struct Options {
    /// Only tests whose name this regular expression matches, as of Go's -test.run.
    #[arg(long, value_name = "REGEX")]
    run: Option<String>,
    /// Write the table here as well, with date and versions.
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

/// Runs everything, prints the table, and fails when ours fails where the stock one passes.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the suites start containerd and containers: run as root");
    }
    let releases = deps::all()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let release = (releases.available.iter().find(|release| release.line == Line::V2))
        .context("no containerd 2 was found, which the suite belongs to")?;
    registry::serve()?;
    let suite = Client::prepare(&artifacts, release)?;
    let comparison = compare(&suite, options.run.as_deref())?;
    let title = format!("containerd's client tests, {}", version(release));
    let table = comparison.table(&title);
    say::out(&table);
    if let Some(file) = &options.table {
        let page = format!("{}\n{table}", head(release)?);
        std::fs::write(file, page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    match comparison.regressions().count() {
        0 => Ok(()),
        worse => bail!("{worse} tests pass with the stock runtime and not with ours"),
    }
}

fn compare(suite: &Client, only: Option<&str>) -> Result<Comparison> {
    say::step("The suite with the stock runtime");
    let stock = suite.run(false, only)?;
    say::step("The suite with ours");
    let mut comparison = Comparison::new(stock, suite.run(true, only)?);
    for name in comparison.differing() {
        say::note(&format!("again, alone: {name}"));
        let only = format!("^{name}$");
        comparison.again(&suite.run(false, Some(&only))?, &suite.run(true, Some(&only))?);
    }
    Ok(comparison)
}

fn version(release: &Release) -> String {
    format!("containerd {}", release.version)
}

fn head(release: &Release) -> Result<String> {
    let read = |program: &str, argument: &str| {
        crate::sh::read(std::process::Command::new(program).arg(argument))
    };
    let runc = read("runc", "--version")?;
    let (date, kernel) = (read("date", "--iso-8601")?, read("uname", "--kernel-release")?);
    Ok(format!(
        "# Conformance\n\n\
         Printed by `cargo xtask conformance`: suites of others, run with the stock runtime\n\
         (`io.containerd.runc.v2`) and with ours (`io.containerd.affinode.v1`) on one machine.\n\n\
         {}: {}, {}, Linux {}.\n",
        date.trim(),
        version(release),
        runc.lines().next().unwrap_or("runc"),
        // What follows is the distribution's own.
        kernel.trim().split('-').next().unwrap_or_default(),
    ))
}
