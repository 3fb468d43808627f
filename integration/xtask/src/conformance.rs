//! `cargo xtask conformance`: runs test suites of other projects with the stock runtime and with
//! Affinode.
//!
//! ```text
//! Go's module proxy ──> source of the suite ──> test program ─┬─ stock runc ──> outcome of each test ─┐
//! images made here ──> registry on loopback ──────────────────┴─ affinode ────> outcome of each test ─┴─> table
//! ```
//!
//! A test that passes with the stock runtime must pass with Affinode. A test that fails only with
//! Affinode is run again on its own with both runtimes, because some tests depend on the state of
//! the whole machine.

mod client;
mod critest;
mod go;
mod mirror;
mod outcome;
mod page;
mod registry;

use std::path::{Path, PathBuf};

use affinode_e2e::{
    artifacts::Artifacts,
    crio::CrioPrograms,
    release::{Line, Release},
};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use nix::unistd::Uid;

use self::{
    client::Client,
    critest::Critest,
    outcome::{Comparison, Outcomes},
};
use crate::{build, crio, deps, output};

/// Which suites to run, and where the tables go.
#[derive(Args)]
pub struct Options {
    /// Run only this suite.
    #[arg(long)]
    suite: Option<Suite>,
    /// Run only tests whose names match this regular expression, as with Go's -test.run or Ginkgo's
    /// -ginkgo.focus.
    #[arg(long, value_name = "REGEX", requires = "suite")]
    run: Option<String>,
    /// Also write the tables to this file, with date and versions. Tables of other suites stay in
    /// the file.
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

/// A test suite of another project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// containerd's own client tests.
    Client,
    /// critest, the validation of CRI, with containerd.
    Critest,
    /// critest, the validation of CRI, with CRI-O.
    CritestCrio,
}

/// Runs the chosen suites and prints the tables. Fails if a test passes only with the stock
/// runtime.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the suites start containerd and containers: run as root");
    }
    let releases = deps::all()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let release = (releases.available.iter().find(|release| release.line == Line::V2))
        .context("no containerd 2 was found; the suites need one")?;
    let mut worse = 0;
    for suite in Suite::value_variants() {
        if options.suite.is_none_or(|only| only == *suite) {
            let comparison = suite.compare(&artifacts, release, options.run.as_deref())?;
            let table = comparison.table(&suite.title(), &suite.machine(&artifacts, release)?);
            output::out(&table);
            if let Some(file) = &options.table {
                page::put(file, &table)?;
            }
            worse += comparison.regressions().count();
        }
    }
    match worse {
        0 => Ok(()),
        worse => bail!("{worse} tests pass with the stock runtime but not with Affinode"),
    }
}

impl Suite {
    fn title(self) -> String {
        match self {
            Suite::Client => "containerd's client tests".into(),
            Suite::Critest => format!("critest {}", critest::VERSION),
            Suite::CritestCrio => format!("critest {} with CRI-O", critest::VERSION),
        }
    }

    /// Returns a text with the date, the machine and the versions of a run.
    fn machine(self, artifacts: &Artifacts, release: &Release) -> Result<String> {
        match self {
            Suite::Client | Suite::Critest => {
                page::machine(&format!("containerd {}", release.version), Path::new("runc"))
            }
            Suite::CritestCrio => {
                let engine = format!("CRI-O {}", crio::VERSION);
                page::machine(&engine, &artifacts.own_users_runc_dir().join("runc"))
            }
        }
    }

    fn compare(
        self,
        artifacts: &Artifacts,
        release: &Release,
        only: Option<&str>,
    ) -> Result<Comparison> {
        match self {
            Suite::Client => {
                registry::serve(None)?;
                let suite = Client::prepare(artifacts, release)?;
                compare(&|ours, only| suite.run(ours, only), &|name| format!("^{name}$"), only)
            }
            Suite::Critest => {
                let suite = Critest::prepare(artifacts, release)?;
                compare(&|ours, only| suite.run(ours, only), &critest::alone, only)
            }
            Suite::CritestCrio => {
                crio::build(artifacts).context("cannot build CRI-O")?;
                let programs = CrioPrograms::find(artifacts)
                    .context("CRI-O needs podman, conmon, crun and runc; see the notes above")?;
                let suite = Critest::prepare(artifacts, release)?.of_crio(programs);
                compare(&|ours, only| suite.run(ours, only), &critest::alone, only)
            }
        }
    }
}

/// Runs a suite with both runtimes, and runs each test with different outcomes again on its own.
/// The closure `alone` returns the expression that selects the test with a given name.
fn compare(
    run: &dyn Fn(bool, Option<&str>) -> Result<Outcomes>,
    alone: &dyn Fn(&str) -> String,
    only: Option<&str>,
) -> Result<Comparison> {
    output::step("Running the suite with the stock runtime");
    let stock = run(false, only)?;
    output::step("Running the suite with Affinode");
    let mut comparison = Comparison::new(stock, run(true, only)?);
    for name in comparison.differing() {
        output::note(&format!("running again, alone: {name}"));
        let only = alone(&name);
        comparison.again(&run(false, Some(&only))?, &run(true, Some(&only))?);
    }
    Ok(comparison)
}
