//! `cargo xtask systemd`: runs tests on a private node with a real systemd. They cover containerd's
//! unit, the controller's unit, and jobs of systemd-run and Slurm.
//!
//! ```text
//! Debian's archive ──> tree ──copy──> node: systemd is process 1, own pid, mount, uts, ipc, network
//!                                     and cgroup namespaces, loopback alone, simulated GPU
//!                                       ──> steps ──> table ──> power off, nothing is left
//! ```
//!
//! A step passes if the expected result was observed. Its row in the table contains the
//! observation. CI does not run these tests, because the first run downloads a Debian system.

mod controller;
mod install;
mod node;
mod program;
mod rows;
mod slurm;
mod tree;
mod units;

use anyhow::{Result, bail};
use clap::Args;
use nix::unistd::Uid;

use self::{
    controller::Controller, install::Install, node::Node, rows::Rows, slurm::Slurm, units::Units,
};
use crate::{build, deps, output};

/// How to print the observations.
#[derive(Args)]
pub struct Options {
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Runs all steps, prints the table, and fails if a step failed.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the node needs private namespaces and cgroups: run as root");
    }
    deps::own()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let base = tree::base(&artifacts)?;
    output::step("Booting a node");
    let node = Node::boot(&artifacts, &base)?;
    let mut rows = Rows::new(node.sh("systemctl --version | head -1; uname --kernel-release")?);
    if let Err(error) = all(&node, &mut rows) {
        output::note(&format!("{error:#}"));
        output::note(&node.log());
    }
    rows.part("the node's end", &[("`systemctl poweroff`", end)], &mut Some(node));
    match options.json {
        true => output::out(&serde_json::to_string_pretty(&rows)?),
        false => output::out(&rows.to_string()),
    }
    match rows.failures() {
        0 => Ok(()),
        failed => bail!("{failed} steps failed"),
    }
}

/// Runs all parts of the tests. A part that needs an earlier part runs only if the earlier part has
/// passed.
fn all(node: &Node, rows: &mut Rows) -> Result<()> {
    let holds = |held: bool, part: &str| match held {
        true => Ok(()),
        false => bail!("a step of {part} failed; the node's log:"),
    };
    let mut install = Install::new(node)?;
    holds(rows.part("containerd's unit", &install::steps(), &mut install), "the installation")?;
    let mut controller = Controller::new(node)?;
    let held = rows.part("the controller's unit", &controller::steps(), &mut controller);
    holds(held, "the controller's unit")?;
    let mut units = Units::new(node)?;
    holds(rows.part("`systemd-run`", &units::steps(), &mut units), "systemd-run")?;
    let mut slurm = Slurm::new(node)?;
    holds(rows.part("Slurm", &slurm::steps(), &mut slurm), "Slurm")
}

fn end(node: &mut Option<Node>) -> Result<String> {
    node.take().map_or_else(|| Ok(String::new()), Node::end)
}
