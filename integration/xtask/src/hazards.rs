//! `cargo xtask hazards`: runs each hazard (a use of CUDA that makes a move unsafe) without
//! Affinode and with it.

use affinode_e2e::{
    gpu::Gpu,
    hazards,
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::{Result, bail};
use clap::Args;
use nix::unistd::Uid;

use crate::{build, deps, output};

/// Which hazards to play, and how to print them.
#[derive(Args)]
pub struct Options {
    /// Print JSON on standard output.
    #[arg(long)]
    json: bool,
    /// Only hazards whose name contains this text.
    #[arg(default_value = "")]
    filter: String,
    /// Number of times that two containers are woken at the same time.
    #[arg(long, default_value_t = 200)]
    turns: usize,
}

/// Builds the programs, runs the hazards, and prints the table.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the hazards start a private containerd with containers: run as root");
    }
    let release = deps::own()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let recipe = || TestbedConfig::default().artifacts(artifacts.clone()).release(&release);
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    output::step("Hazards, on the simulated GPU");
    let filters = vec![options.filter.clone()];
    let chosen = hazards::Options { gpu, filters, turns: options.turns };
    let report = hazards::run(&recipe, &chosen, &mut output::note)?;
    if options.json {
        output::out(&serde_json::to_string_pretty(&report)?);
    } else {
        output::out(&report.table());
    }
    if report.failed() {
        bail!("at least one hazard failed with Affinode");
    }
    Ok(())
}
