//! Tests of the restore policy `immediate`. A container with this policy is restored as soon as it
//! makes a call, even if the containers in use have to leave the GPU for it.

use affinode_e2e::{
    gpu::Gpu,
    suite::{self, IMMEDIATE, Rows},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};

fn world(mib: u64) -> Result<Testbed> {
    TestbedConfig::default().gpu(Gpu::Simulated { vram_bytes: mib * MIB }).config(IMMEDIATE).world()
}

/// Starts a worker that makes a call every 20 ms, and prints each result.
fn busy(world: &Testbed) -> Result<Worker> {
    let mut busy = Worker::start_as(world, Worker::spec("busy", USUAL, 80).busy())?;
    busy.wait_filled()?;
    Ok(busy)
}

/// Runs the `immediate` scenario of the suite for GPU machines. Only the container that cannot be
/// offloaded may be ended.
#[test]
fn immediate_restore_ends_only_immovable() -> Result<()> {
    let world = world(512)?;
    let mut rows = Rows::default();
    suite::takes_room_at_once(&world, &mut rows)?;
    assert_eq!(rows.missed(), Vec::<String>::new());
    Ok(())
}

#[test]
fn in_the_queue_who_is_in_use_is_waited_for() -> Result<()> {
    // The VRAM suffices for one container.
    let world = world(160)?;
    let spec = Worker::spec("asker", USUAL, 80).annotation("affinode.io/restore", "queue");
    let mut asker = Worker::start_as(&world, spec)?;
    asker.wait_filled()?;
    world.cli().move_out("asker")?;
    let mut busy = busy(&world)?;
    asker.send("verify")?;
    until("the restore to wait", || {
        let row = world.cli().container("asker")?;
        Ok(row.filter(|row| row.state == "Queued" && row.reason == "waiting-for-vram"))
    })?;
    // The container continues after its restore: it makes a hundred more calls.
    (0..100).try_for_each(|_| busy.expect("period").map(|_| ()))?;
    assert!(!asker.has_answer()?);
    assert_eq!(world.cli().container("busy")?.map(|row| row.offloads), Some(0));
    busy.running.kill(&world)?;
    asker.expect("verify").map(|_| ())
}

/// Sets the annotation with which a container requests that processes of other containers are
/// ended. Without the operator's permission, no process may be ended.
#[test]
fn an_annotation_alone_ends_nobody() -> Result<()> {
    let config = IMMEDIATE.replace("by-annotation", "queue");
    let world = TestbedConfig::default().config(&config).world()?;
    let spec = Worker::spec("asker", USUAL, 32).annotation("affinode.io/restore", "immediate");
    let mut asker = Worker::start_as(&world, spec)?;
    asker.wait_filled()?;
    let row = world.cli().known("asker")?;
    assert!(row.warnings.iter().any(|line| line.contains("by-annotation")), "{row:?}");
    let shown = world.cli().run(&["policy", "show", "asker", "--no-headers"])?;
    let value = shown
        .lines()
        .find(|line| line.contains(" restore "))
        .context("the output of `affinode policy show` has no row `restore`")?;
    assert!(value.contains("queue") && value.contains("node"), "{value}");
    assert!(asker.verify()?);
    Ok(())
}
