//! `cargo xtask chaos`: causes random faults, such as the kill of a process, while containers are
//! offloaded and restored on simulated GPUs. A round is a series of faults, after which all
//! containers are checked.

use affinode_e2e::{
    chaos,
    gpu::Gpu,
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::{Result, bail};
use clap::Args;
use nix::unistd::Uid;

use crate::{build, deps, output};

#[derive(Args)]
pub struct Options {
    /// Number of rounds to run.
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// Seed of the rounds; the same seed gives the same rounds.
    #[arg(long)]
    seed: Option<u64>,
    /// Run only the round with this number.
    #[arg(long)]
    round: Option<u64>,
    /// Number of test environments that run rounds at the same time.
    #[arg(long, default_value_t = 2)]
    worlds: usize,
    /// Number of simulated GPUs of each environment.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    gpus: u8,
    /// Print JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// Builds the programs, runs the rounds, and prints the findings.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the campaign starts containerd and containers: run as root");
    }
    let release = deps::own()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let seed = options.seed.unwrap_or_else(fresh_seed);
    output::step(&format!("Chaos, seed {seed}"));
    let recipe = || TestbedConfig::default().artifacts(artifacts.clone()).release(&release);
    let (first, rounds) = match options.round {
        Some(round) => (round, 1),
        None => (0, options.rounds),
    };
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    let (worlds, gpus) = (options.worlds, usize::from(options.gpus));
    let campaign = chaos::Options { seed, first, rounds, gpu, worlds, gpus };
    let report = chaos::run(&recipe, &campaign, &mut output::note)?;
    if options.json {
        output::out(&serde_json::to_string_pretty(&report)?);
    } else {
        output::out(&report.table());
    }
    if report.failed() {
        bail!("{} findings; replay one with --seed {seed} --round R", report.findings.len());
    }
    Ok(())
}

/// Returns a new seed from the clock. The seed is printed, so that the campaign can be repeated.
fn fresh_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(1, |since| since.subsec_nanos().into())
}
