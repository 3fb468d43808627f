//! `cargo xtask hazards`: what happens without Affinode, and what happens with it.

use affinode_e2e::{
    gpu::Gpu,
    hazards,
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::{Result, bail};
use clap::Args;
use nix::unistd::Uid;

use crate::{build, deps, output};

/// How to show it.
#[derive(Args)]
pub struct Options {
    /// As JSON on standard output.
    #[arg(long)]
    json: bool,
    /// Only hazards whose name holds this.
    #[arg(default_value = "")]
    filter: String,
    /// How often two containers are woken at once.
    #[arg(long, default_value_t = 200)]
    turns: usize,
}

/// Builds, plays, and prints the table.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the hazards run in containers of a containerd of their own: run as root");
    }
    let release = deps::own()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let recipe = || TestbedConfig::default().artifacts(artifacts.clone()).release(&release);
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    output::step("Hazards, on the simulated GPU");
    let chosen = hazards::Options { gpu, filter: options.filter.clone(), turns: options.turns };
    let report = hazards::run(&recipe, &chosen, &mut output::note)?;
    if options.json {
        output::out(&serde_json::to_string_pretty(&report)?);
    } else {
        output::out(&report.table());
    }
    if report.failed() {
        bail!("a hazard was not survived");
    }
    Ok(())
}
