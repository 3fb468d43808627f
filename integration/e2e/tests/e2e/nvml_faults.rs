//! Tests of a GPU that NVML can no longer read, and of calls of NVML that do not return.

use std::{fs, path::Path};

use affinode_e2e::{
    gpu::Gpu,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Result, ensure};

use crate::offload::MANUAL;

/// Starts a node with two GPUs, whose NVML has the faults in this folder.
fn world(faults: &Path) -> Result<Testbed> {
    TestbedConfig::default()
        .gpu(Gpu::Simulated { vram_bytes: 512 * MIB })
        .sim_options(&["--gpus", "2"])
        .env("AFFINODE_SIM_NVML_FAULTS", &faults.to_string_lossy())
        .config(MANUAL)
        .world()
}

/// Waits until the controller shows an error of NVML with this text, or no error if it is empty.
fn wait_error(world: &Testbed, part: &str) -> Result<()> {
    until(&format!("the error {part:?}"), || {
        let error = world.cli().ps()?.gpu_error.unwrap_or_default();
        Ok((error.contains(part) && error.is_empty() == part.is_empty()).then_some(()))
    })
}

#[test]
fn lost_gpu_does_not_stop_the_others() -> Result<()> {
    let faults = tempfile::tempdir()?;
    let world = world(faults.path())?;
    let mut worker = Worker::start(&world, "moves", 64)?;
    let lost = faults.path().join("lost-1");
    fs::write(&lost, "")?;
    wait_error(&world, "NVML cannot read GPU 1 (GPU-")?;
    world.cli().move_out("moves")?;
    ensure!(worker.verify()?, "the memory has changed");
    world.cli().wait_resident("moves")?;
    fs::remove_file(&lost)?;
    wait_error(&world, "")
}

#[test]
fn blocked_nvml_stops_moves_until_it_answers() -> Result<()> {
    let faults = tempfile::tempdir()?;
    let world = world(faults.path())?;
    let mut worker = Worker::start(&world, "moves", 64)?;
    let blocked = faults.path().join("blocked");
    fs::write(&blocked, "")?;
    wait_error(&world, "NVML has not answered for")?;
    let refused = world.cli().offload("moves")?;
    ensure!(!refused.done, "{refused:?}");
    fs::remove_file(&blocked)?;
    wait_error(&world, "")?;
    world.cli().move_out("moves")?;
    ensure!(worker.verify()?, "the memory has changed");
    Ok(())
}
