//! Tests of `prefault`: host memory is touched and registered before an offload. The copier then
//! copies out the process's memory during the driver's checkpoint.

use std::process::Child;

use affinode_e2e::{
    cli::GpuRow,
    container::Spec,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
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

fn world() -> Result<Testbed> {
    TestbedConfig::default().config(MANUAL).world()
}

/// Starts a worker whose idle timeout is barely long enough for the prefault.
fn start(world: &Testbed, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec.prepared())?;
    worker.wait_filled()?;
    Ok(worker)
}

fn plain(world: &Testbed) -> Result<Worker> {
    start(world, Worker::spec("worker", USUAL, WORKER_MIB))
}

/// Waits until the worker's host memory is prefaulted. Returns the copier's pid.
fn wait_prepared(world: &Testbed) -> Result<Pid> {
    let ready = |gpu: &GpuRow| gpu.copier_prefaulted == 1 && gpu.copier_pid != 0;
    Ok(Pid::from_raw(world.cli().wait_gpu("the host memory to be prefaulted", ready)?.copier_pid))
}

/// Waits until neither the process nor the copier holds the process's memory on the device. The
/// copier keeps only its context.
fn wait_nowhere_on_the_device(world: &Testbed) -> Result<()> {
    until("the memory to be released", || {
        Ok((world.cli().gpu()?.vram_used_bytes < WORKER_MIB * MIB).then_some(()))
    })
}

/// Number of offloads that copiers have performed. It is read after the worker is prefaulted again,
/// because all earlier offloads are counted by then.
fn copies(world: &Testbed) -> Result<u64> {
    wait_prepared(world)?;
    Ok(world.cli().gpu()?.copier_offloads)
}

/// Offloads and restores the worker, and requires that its contents are unchanged.
fn leaves_and_returns(world: &Testbed, worker: &mut Worker) -> Result<()> {
    wait_prepared(world)?;
    world.cli().move_out("worker")?;
    wait_nowhere_on_the_device(world)?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Offloads the worker repeatedly, until a copier has copied it out once. While other tests run,
/// the process may copy out its memory itself a few times.
fn leaves_through_the_copier_once(world: &Testbed, worker: &mut Worker) -> Result<()> {
    let before = copies(world)?;
    for _ in 0..12 {
        leaves_and_returns(world, worker)?;
        if copies(world)? > before {
            return Ok(());
        }
    }
    bail!("in 12 rounds the copier has not copied out the worker")
}

/// Offloads the worker in several rounds, and requires that a copier copies it out in most of them.
/// The machine permits one export (transfer of memory to the copier) at a time. While other tests
/// run, the process therefore copies out its memory itself in some rounds. On a real GPU the suite
/// requires the copier in all rounds.
fn leaves_through_the_copier(world: &Testbed, worker: &mut Worker, what: &str) -> Result<()> {
    const ROUNDS: u64 = 8;
    let before = copies(world)?;
    for _ in 0..ROUNDS {
        leaves_and_returns(world, worker)?;
    }
    affinode_test_notes::share(what, copies(world)? - before, ROUNDS, 2.0 / 3.0);
    Ok(())
}

/// Waits until the process has exported all of its memory to the copier, or the offload has ended.
fn wait_exported(world: &Testbed, asked: &mut Child) -> Result<()> {
    until("all memory to be exported", || {
        let copied_out = world.cli().registered("worker")?.process()?.phase == "CopiedOut";
        Ok((copied_out || asked.try_wait()?.is_some()).then_some(()))
    })
}

#[test]
fn prefaulted_process_offloads_through_copier() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    wait_prepared(&world)?;
    world.cli().wait_for("worker", "to show its host memory", |row| {
        row.processes.first().is_some_and(|process| process.kept_bytes >= WORKER_MIB * MIB)
    })?;
    world.cli().move_out("worker")?;
    assert_eq!(world.cli().known("worker")?.process()?.copied_out_bytes, WORKER_MIB * MIB);
    wait_gpu_empty(&world)?;
    assert!(worker.verify()?);
    leaves_through_the_copier(&world, &mut worker, "offloads of prepared memory by the copier")
}

/// Offloads a program whose memory the driver cannot export. The contents must first be copied into
/// exportable memory on the device, from which the copier reads them.
#[test]
fn unexportable_memory_offloads_through_copier() -> Result<()> {
    let world = world()?;
    let spec =
        Worker::pieces("worker", "full", WORKER_MIB, &["--piece-mib", "16", "--handle-types", "0"]);
    let mut worker = start(&world, spec)?;
    let what = "offloads of memory that cannot be exported by the copier";
    leaves_through_the_copier(&world, &mut worker, what)?;
    assert!(worker.ends_with_nothing_left(&world)?);
    Ok(())
}

#[test]
fn call_ends_prefault_until_next_idle() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    wait_prepared(&world)?;
    // Calls keep the container in use for longer than an idle timeout.
    until("the prefault to end", || {
        worker.call("streamsync")?;
        Ok((world.cli().gpu()?.copier_prefaulted == 0).then_some(()))
    })?;
    leaves_through_the_copier_once(&world, &mut worker)
}

#[test]
fn prefaulted_process_without_copier_offloads() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    let copier = wait_prepared(&world)?;
    kill(copier, Signal::SIGKILL)?;
    until("the copier to end", || {
        Ok((world.cli().gpu()?.copier_pid != copier.as_raw()).then_some(()))
    })?;
    world.cli().move_out("worker")?;
    wait_gpu_empty(&world)?;
    assert!(worker.verify()?);
    assert_eq!(world.cli().gpu()?.copier_offloads, 0);
    // The next copier must serve the next offload.
    leaves_through_the_copier_once(&world, &mut worker)
}

/// Requests an offload while the copier is stopped, and calls `meanwhile` after the memory is
/// exported to the copier. While other tests run, the process sometimes copies out its memory
/// itself. The request is then repeated. Returns the copier's pid.
fn hands_over_in_vain(
    world: &Testbed,
    worker: &mut Worker,
    meanwhile: impl Fn(Pid) -> Result<()>,
) -> Result<Pid> {
    for _ in 0..12 {
        let copier = wait_prepared(world)?;
        kill(copier, Signal::SIGSTOP)?;
        let mut asked = world.cli().command(&["offload", "worker"]).spawn()?;
        wait_exported(world, &mut asked)?;
        meanwhile(copier)?;
        if !asked.wait()?.success() {
            return Ok(copier);
        }
        // No contents depend on the copier now, so a failure to continue it is ignored.
        let _ = kill(copier, Signal::SIGCONT);
        assert!(worker.verify()?);
    }
    bail!("in 12 rounds the process exported nothing")
}

/// Restores a process whose copier was stopped during the offload. A stopped copier copies nothing,
/// so after the checkpoint the contents exist only in exported device memory. The process must
/// restore them with its own descriptors of this memory.
#[test]
fn exports_to_stopped_copier_are_restored() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    let copier = hands_over_in_vain(&world, &mut worker, |_| Ok(()))?;
    assert!(worker.verify()?);
    world.cli().wait_for("worker", "to hold its VRAM", |row| row.vram_bytes >= WORKER_MIB * MIB)?;
    kill(copier, Signal::SIGCONT)?;
    // The copier releases the exported memory, so that no contents are in memory twice.
    until("the copier to release the memory", || {
        let used = world.cli().gpu()?.vram_used_bytes;
        Ok((used < 2 * WORKER_MIB * MIB).then_some(()))
    })?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn exports_to_killed_copier_are_restored() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    hands_over_in_vain(&world, &mut worker, |copier| Ok(kill(copier, Signal::SIGKILL)?))?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn exports_survive_controller_death() -> Result<()> {
    let world = world()?;
    let mut worker = plain(&world)?;
    hands_over_in_vain(&world, &mut worker, |_| shoot_controller(&world))?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    Ok(())
}
