//! Runs the suite for GPU machines: `affinode-gpu-suite CONTAINERD_BIN_DIR REPORT.json [simulated]`.

use std::{path::PathBuf, process::ExitCode};

use affinode_e2e::{gpu::Gpu, release::Release, suite, world::PLENTY_BYTES};
use anyhow::{Context, Result};

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Whether every goal was met.
fn run() -> Result<bool> {
    let mut arguments = std::env::args_os().skip(1);
    let usage = "usage: affinode-gpu-suite CONTAINERD_BIN_DIR REPORT.json [simulated]";
    let release = Release::probe(&PathBuf::from(arguments.next().context(usage)?))?;
    let file = PathBuf::from(arguments.next().context(usage)?);
    let gpu = match arguments.next() {
        Some(word) if word == "simulated" => Gpu::Simulated { vram_bytes: PLENTY_BYTES },
        _ => Gpu::Real,
    };
    let report = suite::run(&release, gpu)?;
    std::fs::write(&file, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    print(&report);
    Ok(!report.failed())
}

#[expect(clippy::print_stdout, reason = "the result, for people")]
fn print(report: &suite::Report) {
    println!("{}", report.table());
}

#[expect(clippy::print_stderr, reason = "why there is no result")]
fn complain(error: &anyhow::Error) {
    eprintln!("affinode-gpu-suite: {error:#}");
}
