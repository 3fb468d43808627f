//! Runs every hazard test, without Affinode and with it, as `cargo xtask hazards` does. With
//! Affinode, every hazard must be survived. Without Affinode, the listed hazards must have their
//! known results, such as a lost process.

use affinode_e2e::{
    gpu::Gpu,
    hazards::{self, Options},
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::Result;

#[test]
fn every_hazard_is_survived() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    let options = Options { gpu, filters: Vec::new(), turns: 10 };
    let report = hazards::run(&TestbedConfig::default, &options, &mut |_| {})?;
    assert!(!report.failed(), "{}", report.table());
    // Without Affinode these hazards kill or lose a process.
    for (hazard, end) in [
        ("cuCtxSynchronize while offloaded", "dies of a segmentation fault"),
        ("cuStreamSynchronize while offloaded", "dies of a segmentation fault"),
        ("cuStreamQuery while offloaded", "dies of a segmentation fault"),
        ("cuEventQuery while offloaded", "dies of a segmentation fault"),
        ("cuEventSynchronize while offloaded", "dies of a segmentation fault"),
        ("peer access between GPUs", ": lost"),
        ("nvml: called while offloaded", "blocks until it is restored"),
        ("nvml: linked, called while offloaded", "blocks until it is restored"),
        ("memory limit of 1 GiB, 4 GiB of VRAM", "is killed"),
        ("the same limit on an ancestor", "is killed"),
        ("restore while VRAM is short", ": lost, although VRAM is free again"),
        ("kill -9 of the caller in mid-checkpoint", "return [0, 0]; contents intact"),
        ("profiler, begun while offloaded", ": lost"),
        ("profiler, moved while it begins", ": lost"),
        ("profiler, ended before the move", "dies of a segmentation fault"),
    ] {
        let row = report.rows.iter().find(|row| row.hazard == hazard);
        assert!(row.is_some_and(|row| row.without.contains(end)), "{hazard}: {}", report.table());
    }
    Ok(())
}
