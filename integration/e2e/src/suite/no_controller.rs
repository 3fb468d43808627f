//! Test of a process that makes a call while the controller does not reply. The process must
//! restore itself.

use std::time::Instant;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};

use super::report::Rows;
use crate::{
    testbed::Testbed,
    worker::{USUAL, Worker},
};

/// VRAM that the process fills, in MiB.
const WORKER_MIB: u64 = 256;

/// Stops the controller, and requires that an offloaded process restores itself at its next call.
/// The controller is stopped, not killed, because the shims would immediately restart a killed
/// controller.
pub fn comes_back(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let id = "alone";
    let mut worker = Worker::start_as(world, Worker::spec(id, USUAL, WORKER_MIB))?;
    worker.wait_filled()?;
    world.cli().wait_for_state(id, "Offloaded")?;
    let controller = world.controller()?.context("no controller is running")?;
    kill(controller.pid, Signal::SIGSTOP)?;
    let called = Instant::now();
    let good = worker.verify();
    let waited_ms = called.elapsed().as_secs_f64() * 1e3;
    kill(controller.pid, Signal::SIGCONT)?;
    rows.count("came back by itself, contents as before", usize::from(good?), 1);
    rows.tell("after the call", waited_ms, "ms");
    // The controller continues, finds the process resident, and manages it again.
    world.cli().wait_for_state(id, "Offloaded")?;
    rows.count("known again, offloaded and restored", usize::from(worker.verify()?), 1);
    worker.running.kill(world)?;
    worker.running.delete(world)
}
