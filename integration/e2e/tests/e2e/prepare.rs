//! `prepare`: host memory is ready before a container leaves, and the vault copies it out beside
//! the driver's checkpoint.

use std::process::Child;

use affinode_e2e::{
    container::Spec,
    until::until,
    worker::{USUAL, Worker},
    world::{MIB, Recipe, World},
};
use anyhow::{Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    offload::{MANUAL, wait_gpu_empty},
    recovery::shoot_controller,
};

const WORKER_MIB: u64 = 320;

fn world() -> Result<World> {
    Recipe::default().config(MANUAL).world()
}

/// A worker whose idleness lasts long enough to be prepared, and not longer.
fn start(world: &World, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec.prepared())?;
    worker.wait_filled()?;
    Ok(worker)
}

fn plain(world: &World) -> Result<Worker> {
    start(world, Worker::spec("worker", USUAL, WORKER_MIB))
}

/// Until its host memory is ready: the vault's pid.
fn wait_prepared(world: &World) -> Result<Pid> {
    until("host memory that is ready", || {
        let gpu = world.cli().gpu()?;
        Ok((gpu.vault_prepared == 1).then_some(Pid::from_raw(gpu.vault_pid)))
    })
}

/// Until neither the process nor the vault has hold of the memory: a context is what the vault has.
fn wait_nowhere_on_the_device(world: &World) -> Result<()> {
    until("the memory to be let go of", || {
        Ok((world.cli().gpu()?.vram_used_bytes < WORKER_MIB * MIB).then_some(()))
    })
}

/// Moves it out and home until vaults have copied so many more out: one at a time on a machine, so
/// now and then it copies by itself beside other tests. The contents are as before each time.
fn leaves_through_the_vault(world: &World, worker: &mut Worker, more: u64) -> Result<()> {
    let wanted = world.cli().gpu()?.vault_copies + more;
    for _ in 0..12 {
        wait_prepared(world)?;
        world.cli().move_out("worker")?;
        wait_nowhere_on_the_device(world)?;
        worker.call("touch")?;
        assert!(worker.verify()?);
        if world.cli().gpu()?.vault_copies >= wanted {
            return Ok(());
        }
    }
    bail!("in 12 rounds the vault has not copied {more} times")
}

/// Until its process has handed everything over, or that is over already.
fn wait_handed(world: &World, asked: &mut Child) -> Result<()> {
    until("it to be handed over", || {
        let parked = world.cli().known("worker")?.processes.remove(0).phase == "Parked";
        Ok((parked || asked.try_wait()?.is_some()).then_some(()))
    })
}

#[test]
fn a_prepared_process_leaves_through_the_vault_again_and_again() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    wait_prepared(&world)?;
    until("its host memory to show", || {
        let kept_bytes = world.cli().known("worker")?.processes.remove(0).kept_bytes;
        Ok((kept_bytes >= WORKER_MIB * MIB).then_some(()))
    })?;
    world.cli().move_out("worker")?;
    let row = world.cli().known("worker")?.processes.remove(0);
    assert_eq!(row.parked_bytes, WORKER_MIB * MIB);
    wait_gpu_empty(&world)?;
    assert!(worker.verify()?);
    leaves_through_the_vault(&world, &mut worker, 3)
}

/// What it has made for itself the driver does not let us export: it is copied on the device first.
#[test]
fn memory_that_cannot_be_exported_leaves_through_the_vault_too() -> Result<()> {
    let world = world()?;
    let spec =
        Worker::pieces("worker", "fast", WORKER_MIB, &["--piece-mib", "16", "--handle-types", "0"]);
    let mut worker = start(&world, spec)?;
    leaves_through_the_vault(&world, &mut worker, 3)?;
    assert!(worker.ends_with_nothing_left(&world)?);
    Ok(())
}

#[test]
fn a_call_ends_the_preparation_and_the_next_idleness_begins_another() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    wait_prepared(&world)?;
    // In use for longer than an idle timeout, call by call.
    until("the preparation to end", || {
        worker.call("streamsync")?;
        Ok((world.cli().gpu()?.vault_prepared == 0).then_some(()))
    })?;
    leaves_through_the_vault(&world, &mut worker, 1)
}

#[test]
fn a_prepared_process_whose_vault_was_killed_leaves_by_itself() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    let vault = wait_prepared(&world)?;
    kill(vault, Signal::SIGKILL)?;
    until("the vault to be gone", || {
        Ok((world.cli().gpu()?.vault_pid != vault.as_raw()).then_some(()))
    })?;
    world.cli().move_out("worker")?;
    wait_gpu_empty(&world)?;
    assert!(worker.verify()?);
    assert_eq!(world.cli().gpu()?.vault_copies, 0);
    // And the next time through the next one.
    leaves_through_the_vault(&world, &mut worker, 1)
}

/// An offload that is asked for while the vault is stopped. Now and then the process copies by itself
/// beside other tests: then it is asked for again.
fn hands_over_in_vain(
    world: &World,
    worker: &mut Worker,
    meanwhile: impl Fn(Pid) -> Result<()>,
) -> Result<Pid> {
    for _ in 0..12 {
        let vault = wait_prepared(world)?;
        kill(vault, Signal::SIGSTOP)?;
        let mut asked = world.cli().command(&["offload", "worker"]).spawn()?;
        wait_handed(world, &mut asked)?;
        meanwhile(vault)?;
        if !asked.wait()?.success() {
            return Ok(vault);
        }
        // Nothing depends on it any more, whether it is there or not.
        let _ = kill(vault, Signal::SIGCONT);
        assert!(worker.verify()?);
    }
    bail!("in 12 rounds it has handed nothing over")
}

/// Its content is nowhere but in device memory that it has descriptors of, while it is checkpointed.
#[test]
fn what_a_stopped_vault_was_handed_comes_home() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    let vault = hands_over_in_vain(&world, &mut worker, |_| Ok(()))?;
    assert!(worker.verify()?);
    let row = world.cli().known("worker")?;
    assert!(row.vram_bytes >= WORKER_MIB * MIB, "{row:?}");
    kill(vault, Signal::SIGCONT)?;
    // What it was handed it lets go of, and nothing of it is there twice.
    until("the vault to let go", || {
        let used = world.cli().gpu()?.vram_used_bytes;
        Ok((used < 2 * WORKER_MIB * MIB).then_some(()))
    })?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn what_a_vault_was_handed_that_is_killed_comes_home() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    hands_over_in_vain(&world, &mut worker, |vault| Ok(kill(vault, Signal::SIGKILL)?))?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn what_was_handed_over_when_the_controller_died_comes_home() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    hands_over_in_vain(&world, &mut worker, |_| shoot_controller(&world))?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    Ok(())
}
