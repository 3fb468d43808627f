//! A short crash campaign (rounds in which random processes are killed). `cargo xtask chaos` runs
//! long campaigns.

use affinode_e2e::{
    chaos::{self, Options, Report},
    gpu::Gpu,
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::Result;

/// Runs the rounds of a crash campaign. Requires that the rounds violate no invariant.
fn without_findings(options: &Options) -> Result<Report> {
    let mut said = String::new();
    let report = chaos::run(&TestbedConfig::default, options, &mut |text| {
        said.push_str(text);
        said.push('\n');
    })?;
    assert!(!report.failed(), "{said}{}", report.table());
    Ok(report)
}

#[test]
fn ten_rounds_of_kills_lose_nobody() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    let options = Options { seed: 1, first: 0, rounds: 10, gpu, worlds: 1, gpus: 1 };
    let report = without_findings(&options)?;
    let seen = [report.verified, report.wakes, report.together];
    assert!(!seen.contains(&0), "{}", report.table());
    Ok(())
}

/// Runs rounds in which the GPU's VRAM and the cgroup's memory limit are too small for all
/// containers. Containers must wait for their turn, and the kernel must not kill any container.
#[test]
fn rounds_without_host_memory_lose_no_process() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    // Host memory is short in block number 7 of ten (rounds 70 to 79).
    let options = Options { seed: 1, first: 70, rounds: 3, gpu, worlds: 1, gpus: 1 };
    let report = without_findings(&options)?;
    assert!(report.verified > 0 && report.wakes > 0, "{}", report.table());
    Ok(())
}

/// Runs rounds in which content goes to the host pool, which becomes full, and moves on to disk.
#[test]
fn rounds_with_content_on_disk_lose_no_process() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    // Content moves to disk in block number 2 of ten (rounds 20 to 29). Even rounds wait for it.
    let options = Options { seed: 1, first: 20, rounds: 3, gpu, worlds: 1, gpus: 1 };
    let report = without_findings(&options)?;
    assert!(report.verified > 0 && report.stored > 0, "{}", report.table());
    Ok(())
}

/// Runs rounds in which each offload or restore takes seconds, and requires that no process is
/// lost. Such a move takes longer than three time limits of the controller: for an agent's report,
/// for a pause of allocations, and for a reading of NVML.
#[test]
fn rounds_of_slow_moves_lose_no_process() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    // Moves are slow in block number 4 of ten (rounds 40 to 49).
    let options = Options { seed: 1, first: 40, rounds: 2, gpu, worlds: 1, gpus: 1 };
    let report = without_findings(&options)?;
    assert!(report.verified > 0 && report.wakes > 0, "{}", report.table());
    Ok(())
}

/// Runs rounds on two GPUs, and requires that no process is lost. Two containers use one GPU, and
/// all other containers use the other GPU. Each GPU has its own copier.
#[test]
fn rounds_on_two_gpus_lose_no_process() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    let options = Options { seed: 2, first: 0, rounds: 5, gpu, worlds: 1, gpus: 2 };
    let report = without_findings(&options)?;
    assert!(report.verified > 0 && report.wakes > 0, "{}", report.table());
    Ok(())
}
