//! `cargo xtask matrix`: tests installation, use, upgrade and removal of Affinode on each
//! containerd release.
//!
//! ```text
//!  Debian's archive ─── 1.6, 1.7, 2.1 ──┐
//!  Go's module proxy ── newest 2.x ─────┴─> a node of its own for each ──> steps ──> table
//! ```
//!
//! Each containerd release has a node of its own, on which the steps run. After these steps, faults
//! are injected into installations, each on a new node. Finally, steps run on nodes that also have
//! NVIDIA's container toolkit, which is built from source, too.
//!
//! A step passes if its expected result was observed. Its cell in the table contains the
//! observation. The GPU is simulated. The programs are installed into the node's own folders. A
//! test program in place of systemctl restarts containerd. CI does not run the matrix, because the
//! first run builds a containerd.

mod newest;
mod steps;
mod table;
mod toolkit;
mod toolkit_steps;

use std::path::PathBuf;

use affinode_e2e::{faults, installed, release::Release, testbed::TestbedConfig};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use nix::unistd::Uid;

use self::table::{Column, Table};
use crate::{build, deps, output};

/// Which releases to test, and how to print the table.
#[derive(Args)]
pub struct Options {
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Only test releases of containerd whose version begins with this text, for example 1.7.
    #[arg(long, value_name = "VERSION")]
    containerd: Option<String>,
    /// Run only parts whose names contain this text. Each fault and each node with NVIDIA's toolkit
    /// has its own name. All steps of the installation together have the name "life".
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Also write the table to this file, with date and versions.
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

/// Runs all steps, prints the table, and fails if a step failed.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("run this command as root: it starts containerd and containers");
    }
    let known = deps::all()?;
    if let Some((line, reason)) = known.unavailable.iter().next() {
        bail!(
            "containerd {line} is not available ({reason}), so its column of the table would be missing"
        );
    }
    let artifacts = build::all(build::Profile::Dev)?;
    let upgrade = tempfile::tempdir()?;
    installed::another_build(&artifacts, upgrade.path())?;
    let mut releases = known.available;
    let wanted = |version: &str| {
        let only = options.containerd.as_deref().unwrap_or_default();
        version.trim_start_matches('v').starts_with(only)
    };
    releases.retain(|release: &Release| wanted(&release.version));
    if wanted(newest::VERSION) {
        releases.push(newest::release(&artifacts)?);
    }
    ensure!(!releases.is_empty(), "no containerd of this version is available");
    let only = options.only.as_deref().unwrap_or_default();
    let toolkits = toolkit::releases(&artifacts)?;
    let mut table = Table::here()?;
    for release in &releases {
        output::step(&format!("containerd {}", release.version));
        let mut column = Column::new(&release.version);
        if "life".contains(only) {
            steps::run(&mut column, release, &artifacts, upgrade.path());
        }
        for (name, fault) in faults::ALL.into_iter().filter(|(name, _)| name.contains(only)) {
            let recipe =
                TestbedConfig::default().node().artifacts(artifacts.clone()).release(release);
            column.step(name, || recipe.world().and_then(|world| fault(&world)));
        }
        let beside = (toolkits.as_slice(), upgrade.path());
        toolkit_steps::run(&mut column, release, &artifacts, beside, |name| name.contains(only));
        table.columns.push(column);
    }
    match options.json {
        true => output::out(&serde_json::to_string_pretty(&table)?),
        false => output::out(&table.to_string()),
    }
    if let Some(file) = &options.table {
        std::fs::write(file, table.page())
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    match table.failures() {
        0 => Ok(()),
        failed => bail!("{failed} cells of the table failed"),
    }
}
