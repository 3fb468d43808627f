//! Tests with a driver that is not in the folders that the dynamic loader searches, as in the
//! driver container of NVIDIA's GPU Operator.

use std::{fs, path::Path};

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::Result;

use crate::{copier::fills, offload::MANUAL};

/// File names of the driver libraries that the controller and its copiers load.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libcuda.so.1"];

/// Copies the driver's libraries into the folder `folder` below the root folder `root`, which is
/// not the machine's own.
fn install(world: &Testbed, root: &Path, folder: &str) -> Result<()> {
    let folder = root.join(folder);
    fs::create_dir_all(&folder)?;
    // The controller looks for NVML, so NVML is installed last.
    for name in LIBRARIES.iter().rev() {
        let fresh = folder.join("fresh");
        fs::copy(world.artifacts().sim_dir().join(name), &fresh)?;
        fs::rename(&fresh, folder.join(name))?;
    }
    Ok(())
}

/// Offloads and wakes the container until a copier has restored it. The controller needs NVML for
/// this, and the copier needs libcuda, so both have found the driver.
fn offload_and_wake_by_copier(world: &Testbed, worker: &mut Worker) -> Result<()> {
    until("a restore by the copier", || {
        let before = fills(world)?;
        world.cli().move_out("worker")?;
        assert!(worker.verify()?);
        world.cli().wait_resident("worker")?;
        Ok((fills(world)? > before).then_some(()))
    })
}

#[test]
fn driver_root_appears_and_is_replaced() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let root = parent.path().join("driver");
    let config = MANUAL.replace("[policy]", "[policy]\nengine = \"full\"");
    let config = format!("{config}\n[driver]\nroot = {:?}\n", root.display().to_string());
    // Without `LD_LIBRARY_PATH`, the controller's loader finds no driver.
    let world = TestbedConfig::default().env("LD_LIBRARY_PATH", "").config(&config).world()?;
    let mut worker = Worker::start(&world, "worker", 320)?;
    assert!(worker.verify()?);
    world.cli().registered("worker")?;
    assert!(
        world.cli().ps_now()?.gpus.is_empty(),
        "the controller lists GPUs although it cannot find NVML"
    );

    install(&world, &root, "usr/lib/x86_64-linux-gnu")?;
    world.cli().wait_gpu("NVML", |_| true)?;
    offload_and_wake_by_copier(&world, &mut worker)?;

    // Simulates a restart of the driver's pod: the root gets new files, in another folder.
    fs::rename(&root, parent.path().join("old"))?;
    install(&world, &root, "usr/lib64")?;
    offload_and_wake_by_copier(&world, &mut worker)
}
