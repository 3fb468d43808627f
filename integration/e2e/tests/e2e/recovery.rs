//! Tests of the recovery after the end of the controller, of a container or of a shim.

use affinode_e2e::{
    gpu::Gpu,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};

use crate::{
    lifecycle::nothing_is_left,
    offload::{EAGER, wait_gpu_empty},
};

pub fn shoot_controller(world: &Testbed) -> Result<()> {
    let controller = world.controller()?.context("no controller is running")?;
    kill(controller.pid, Signal::SIGKILL)?;
    until("another controller", || {
        let now = world.controller()?;
        Ok(now.filter(|now| now.pid != controller.pid))
    })?;
    // The next controller must reply, and must know the state that the killed controller knew.
    until("the new controller to reply", || Ok(world.cli().ps_now().ok())).map(|_| ())
}

#[test]
fn restarted_controller_wakes_offloaded() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    shoot_controller(&world)?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    wait_gpu_empty(&world)?;
    assert!(worker.verify()?);
    world.cli().wait_for_state("worker", "Offloaded")?;
    Ok(())
}

#[test]
fn controller_restarts_while_a_call_waits() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    let controller = world.controller()?.context("no controller is running")?;
    kill(controller.pid, Signal::SIGSTOP)?;
    worker.send("verify")?;
    kill(controller.pid, Signal::SIGKILL)?;
    assert_eq!(worker.expect("verify")?.ok, Some(true));
    Ok(())
}

/// Wakes two processes without a controller. Each process must restore itself, one at a time, and
/// only if enough VRAM is free. The second process must wait, and must not be lost.
#[test]
fn without_controller_restore_needs_free_vram() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: 512 * MIB };
    let world = TestbedConfig::default().gpu(gpu).config(EAGER).world()?;
    let mut workers = Vec::new();
    for id in ["alpha", "beta"] {
        workers.push(Worker::start(&world, id, 320)?);
        world.cli().wait_for_state(id, "Offloaded")?;
    }
    let controller = world.controller()?.context("no controller is running")?;
    kill(controller.pid, Signal::SIGSTOP)?;
    for worker in &mut workers {
        worker.send("verify")?;
    }
    let first = until("one of the containers to be restored", || {
        for (index, worker) in workers.iter_mut().enumerate() {
            if worker.has_answer()? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    })?;
    assert!(
        !workers[1 - first].has_answer()?,
        "both containers were restored although VRAM suffices for one"
    );
    kill(controller.pid, Signal::SIGCONT)?;
    for worker in &mut workers {
        assert_eq!(worker.expect("verify")?.ok, Some(true));
    }
    Ok(())
}

#[test]
fn active_containers_do_not_notice_its_death() -> Result<()> {
    let world = TestbedConfig::default().config(crate::offload::MANUAL).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    shoot_controller(&world)?;
    assert!(worker.verify()?);
    until("the worker to be listed again", || {
        let row = world.cli().container("worker")?;
        Ok(row.filter(|row| !row.processes.is_empty()))
    })?;
    world.cli().move_out("worker")?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn container_killed_while_offloaded_is_removed() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    worker.running.kill(&world)?;
    worker.running.delete(&world)?;
    until("the controller to remove it from its list", || {
        Ok(world.cli().container("worker")?.is_none().then_some(()))
    })?;
    wait_gpu_empty(&world)?;
    let folders = std::fs::read_dir(world.cli().run_dir().join("containers"))?;
    assert_eq!(folders.count(), 0, "folders of containers");
    nothing_is_left(&world)
}

/// Sends a signal to a process in which a thread waits for a restore. The signal must end the
/// process as without Affinode.
#[test]
fn a_waiting_caller_obeys_signals() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    let controller = world.controller()?.context("no controller is running")?;
    kill(controller.pid, Signal::SIGSTOP)?;
    worker.send("verify")?;
    let worker_pid = nix::unistd::Pid::from_raw(worker.running.pid(&world)?);
    kill(worker_pid, Signal::SIGKILL)?;
    worker.running.wait_stopped(&world)?;
    kill(controller.pid, Signal::SIGCONT)?;
    worker.running.delete(&world)?;
    nothing_is_left(&world)
}
