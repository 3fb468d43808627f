//! `prepare`: host memory is ready before a container leaves, and the vault copies it out beside
//! the driver's checkpoint.

use std::process::Child;

use affinode_e2e::{
    cli::GpuRow,
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
    let ready = |gpu: &GpuRow| gpu.vault_prepared == 1 && gpu.vault_pid != 0;
    Ok(Pid::from_raw(world.cli().wait_gpu("host memory that is ready", ready)?.vault_pid))
}

/// Until neither the process nor the vault has hold of the memory: a context is what the vault has.
fn wait_nowhere_on_the_device(world: &World) -> Result<()> {
    until("the memory to be let go of", || {
        Ok((world.cli().gpu()?.vram_used_bytes < WORKER_MIB * MIB).then_some(()))
    })
}

/// Processes that vaults have copied out, once the worker is ready for the next time: the report
/// of a copy comes before that.
fn copies(world: &World) -> Result<u64> {
    wait_prepared(world)?;
    Ok(world.cli().gpu()?.vault_copies)
}

/// Out and home; the contents are as before.
fn leaves_and_returns(world: &World, worker: &mut Worker) -> Result<()> {
    wait_prepared(world)?;
    world.cli().move_out("worker")?;
    wait_nowhere_on_the_device(world)?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Until a vault has copied it out once: beside other tests it may copy by itself a few times.
fn leaves_through_the_vault_once(world: &World, worker: &mut Worker) -> Result<()> {
    let before = copies(world)?;
    for _ in 0..12 {
        leaves_and_returns(world, worker)?;
        if copies(world)? > before {
            return Ok(());
        }
    }
    bail!("in 12 rounds the vault has not copied it out")
}

/// One hand-over at a time on a machine, so beside other tests it copies by itself in a share of
/// the rounds. On a GPU the suite demands all of them.
fn leaves_through_the_vault(world: &World, worker: &mut Worker, what: &str) -> Result<()> {
    const ROUNDS: u64 = 8;
    let before = copies(world)?;
    for _ in 0..ROUNDS {
        leaves_and_returns(world, worker)?;
    }
    affinode_test_notes::share(what, copies(world)? - before, ROUNDS, 2.0 / 3.0);
    Ok(())
}

/// Until its process has handed everything over, or that is over already.
fn wait_handed(world: &World, asked: &mut Child) -> Result<()> {
    until("it to be handed over", || {
        let parked = world.cli().registered("worker")?.process()?.phase == "Parked";
        Ok((parked || asked.try_wait()?.is_some()).then_some(()))
    })
}

#[test]
fn a_prepared_process_leaves_through_the_vault_again_and_again() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    wait_prepared(&world)?;
    world.cli().wait_for("worker", "to show its host memory", |row| {
        row.processes.first().is_some_and(|process| process.kept_bytes >= WORKER_MIB * MIB)
    })?;
    world.cli().move_out("worker")?;
    assert_eq!(world.cli().known("worker")?.process()?.parked_bytes, WORKER_MIB * MIB);
    wait_gpu_empty(&world)?;
    assert!(worker.verify()?);
    leaves_through_the_vault(&world, &mut worker, "offloads of prepared memory by the vault")
}

/// What it has made for itself the driver does not let us export: it is copied on the device first.
#[test]
fn memory_that_cannot_be_exported_leaves_through_the_vault_too() -> Result<()> {
    let world = world()?;
    let spec =
        Worker::pieces("worker", "fast", WORKER_MIB, &["--piece-mib", "16", "--handle-types", "0"]);
    let mut worker = start(&world, spec)?;
    let what = "offloads of memory that cannot be exported by the vault";
    leaves_through_the_vault(&world, &mut worker, what)?;
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
    leaves_through_the_vault_once(&world, &mut worker)
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
    leaves_through_the_vault_once(&world, &mut worker)
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
    world.cli().wait_for("worker", "to hold its VRAM", |row| row.vram_bytes >= WORKER_MIB * MIB)?;
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
