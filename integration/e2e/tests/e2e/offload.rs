//! The main job, with every containerd: idle, away, called, back.

use affinode_e2e::{
    image,
    until::until,
    worker::{USUAL, Worker},
    world::{MIB, Recipe, World},
};
use anyhow::{Context, Result};

use crate::matrix::on_every_containerd;

/// Idle at once, away at once.
pub const EAGER: &str = r#"
[policy]
mode = "eager"
idle_timeout = "200ms"
minimum_residency = "0s"
[timing]
sample_interval = "50ms"
"#;

/// Nothing moves unless it is asked for.
pub const MANUAL: &str = r#"
[policy]
mode = "manual"
idle_timeout = "200ms"
minimum_residency = "0s"
[timing]
sample_interval = "50ms"
"#;

on_every_containerd!(
    Recipe::default().config(EAGER);
    goes_when_idle_and_comes_back_when_called,
    runs_unprivileged,
    survives_a_restart_of_containerd_while_away,
);

const WORKER_MIB: u64 = 256;

/// VRAM in use on the node's GPU, as NVML shows it to the controller.
pub fn vram_used_bytes(world: &World) -> Result<u64> {
    until("the controller to see the GPU", || {
        Ok(world.cli().ps()?.gpus.first().map(|gpu| gpu.vram_used_bytes))
    })
}

fn goes_when_idle_and_comes_back_when_called(world: &World) -> Result<()> {
    let mut worker = Worker::start(world, "worker", WORKER_MIB)?;
    let row = world.cli().wait_for_state("worker", "Offloaded")?;
    assert!(row.away_bytes >= WORKER_MIB * MIB, "{row:?}");
    assert_eq!(row.vram_bytes, 0, "{row:?}");
    assert_eq!(row.offloads, 1);
    // Not one byte is left, of the context neither.
    assert_eq!(vram_used_bytes(world)?, 0);

    assert!(worker.verify()?);
    let row = world.cli().container("worker")?.context("it is known")?;
    assert_eq!(row.restores, 1, "{row:?}");

    // And again: what changed in between is kept as well.
    worker.call("touch")?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    assert_eq!(vram_used_bytes(world)?, 0);
    assert!(worker.verify()?);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

fn runs_unprivileged(world: &World) -> Result<()> {
    let spec = Worker::spec("user", USUAL, 64).image(image::UNPRIVILEGED);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    world.cli().wait_for_state("user", "Offloaded")?;
    assert_eq!(vram_used_bytes(world)?, 0);
    assert!(worker.verify()?);
    Ok(())
}

fn survives_a_restart_of_containerd_while_away(world: &World) -> Result<()> {
    let mut worker = Worker::start(world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    world.containerd().stop(nix::sys::signal::Signal::SIGTERM)?;
    // The GPU comes back without containerd, and after it.
    assert!(worker.verify()?);
    world.cli().wait_for_state("worker", "Offloaded")?;
    world.start_containerd()?;
    assert_eq!(vram_used_bytes(world)?, 0);
    assert!(worker.verify()?);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// The same program with the same seed computes the same with and without the cycle.
#[test]
fn results_are_the_same_with_and_without_the_cycle() -> Result<()> {
    let world = Recipe::default().config(MANUAL).world()?;
    let mut checksums = Vec::new();
    for away in [false, true] {
        let mut worker = Worker::start(&world, "same", 64)?;
        for _ in 0..3 {
            worker.call("touch")?;
            if away {
                world.cli().run(&["offload", "same"])?;
                assert_eq!(vram_used_bytes(&world)?, 0);
            }
        }
        let answer = worker.call("verify")?;
        assert_eq!(answer.ok, Some(true));
        checksums.push(answer.checksum.context("verify has a checksum")?);
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    assert_eq!(checksums[0], checksums[1]);
    Ok(())
}
