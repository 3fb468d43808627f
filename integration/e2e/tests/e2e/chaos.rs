//! A short crash campaign. `cargo xtask chaos` runs long ones.

use affinode_e2e::{
    chaos::{self, Options},
    gpu::Gpu,
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::Result;

#[test]
fn ten_rounds_of_kills_lose_nobody() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    let options = Options { seed: 1, first: 0, rounds: 10, gpu, worlds: 1 };
    let mut said = String::new();
    let report = chaos::run(&TestbedConfig::default, &options, &mut |text| {
        said.push_str(text);
        said.push('\n');
    })?;
    assert!(!report.failed(), "{said}{}", report.table());
    let seen = [report.verified, report.wakes, report.together];
    assert!(!seen.contains(&0), "{}", report.table());
    Ok(())
}

/// The cgroup and the GPU are both too small for all containers. Each waits for its turn, and the
/// kernel kills none.
#[test]
fn rounds_without_host_memory_lose_no_process() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    // Block number 7 of ten (rounds 70 to 79) is the one with little host memory.
    let options = Options { seed: 1, first: 70, rounds: 3, gpu, worlds: 1 };
    let mut said = String::new();
    let report = chaos::run(&TestbedConfig::default, &options, &mut |text| {
        said.push_str(text);
        said.push('\n');
    })?;
    assert!(!report.failed(), "{said}{}", report.table());
    assert!(report.verified > 0 && report.wakes > 0, "{}", report.table());
    Ok(())
}

/// Each move takes seconds. This is longer than holds, proofs and the agents' time limits.
#[test]
fn rounds_of_slow_moves_lose_no_process() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    // Block number 4 of ten (rounds 40 to 49) is the slow one.
    let options = Options { seed: 1, first: 40, rounds: 2, gpu, worlds: 1 };
    let mut said = String::new();
    let report = chaos::run(&TestbedConfig::default, &options, &mut |text| {
        said.push_str(text);
        said.push('\n');
    })?;
    assert!(!report.failed(), "{said}{}", report.table());
    assert!(report.verified > 0 && report.wakes > 0, "{}", report.table());
    Ok(())
}
