//! Hazards in which an event occurs during an offload or restore.

use std::{
    io::{BufRead, BufReader, Read},
    process::Stdio,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};

use super::{
    Case, Found,
    host::next_controller,
    manual_ops::{CHECKPOINTED, Held, LOCKED, Offload, ballast, intact, kind, offload_once, usual},
};
use crate::{
    chaos::container::{ChaosContainer, Verdict, Way},
    cli::EventRow,
    testbed::{MIB, Testbed},
    wait::{WAIT_TIMEOUT, until},
    worker::Worker,
};

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("restore while VRAM is short", short),
        Case::new("kernel running at the lock", running_kernel),
        Case::new("exit while offloaded", exit),
        Case::new("kill -9 of the caller in mid-checkpoint", caller_dies),
        Case::new("fork in mid-checkpoint", fork),
        Case::new("CUDA process starts in mid-checkpoint", starts),
        Case::new("CUDA process dies in mid-checkpoint", dies),
        Case::new("exec into a container that is offloaded", exec),
        Case::new("three processes of a container", together),
    ]
}

fn short(world: &Testbed) -> Result<Found> {
    const LEFT: u64 = 16 * MIB;
    let mut bare = Held::bare(world, usual("bare", 64))?;
    bare.worker.wait_filled()?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    let taker = ballast(world, LEFT)?;
    let mut returned = bare.tool(world, &["restore"])?;
    taker.running.kill(world)?;
    taker.running.delete(world)?;
    until("the VRAM to be free again", || {
        let gpu = world.cli().gpu()?;
        Ok((gpu.vram_total_bytes - gpu.vram_used_bytes > 128 * MIB).then_some(()))
    })?;
    returned.extend(bare.tool(world, &["restore"])?);
    let fate = match returned[..] {
        [0, _] => "restored without free VRAM",
        [_, 0] => "restored when VRAM is free",
        _ => "lost, although VRAM is free again",
    };
    let without = format!("restore returns {returned:?}: {fate}");
    bare.kill(world)?;

    let mut worker = Worker::start(world, "short", 64)?;
    world.cli().move_out("short")?;
    let taker = ballast(world, LEFT)?;
    worker.send("verify")?;
    let row = world.cli().wait_for_state("short", "Queued")?;
    until("the reason waiting-for-vram", || {
        let row = world.cli().container("short")?;
        Ok(row.filter(|row| row.reason == "waiting-for-vram"))
    })?;
    ensure!(!worker.has_answer()?, "the process continued without free VRAM: {row:?}");
    taker.running.kill(world)?;
    ensure!(worker.expect("verify")?.ok == Some(true), "the memory of the process has changed");
    Ok(Found::Row { without, with: "waits in the queue; contents intact".into() })
}

fn running_kernel(world: &Testbed) -> Result<Found> {
    let mut bare = Held::bare(world, usual("bare", 16))?;
    bare.worker.wait_filled()?;
    bare.worker.call("spin 2000")?;
    let returned = bare.tool(world, &["lock=300"])?;
    let without = format!("lock returns {}", returned.first().unwrap_or(&-1));
    bare.kill(world)?;

    let mut worker = Worker::start(world, "kernel", 16)?;
    world.cli().wait_resident("kernel")?;
    worker.call("spin 8000")?;
    let said = offload_once(world, "kernel")?;
    ensure!(!said.done && said.reason == "busy", "expected a refusal for busy, got {said:?}");
    intact(&mut worker)?;
    world.cli().move_out("kernel")?;
    intact(&mut worker)?;
    Ok(Found::Row { without, with: "refused: busy; moves later; contents intact".into() })
}

/// Hazard: an offloaded process calls `exit`. At that time the CUDA driver has already shut down,
/// another thread waits in a CUDA call, and an exit handler is still running. The process must end
/// with exit status 0, and the controller must report neither a lost process nor an error.
fn exit(world: &Testbed) -> Result<Found> {
    let mut bare = Held::bare(world, kind("bare", "exit"))?;
    bare.worker.expect("ready")?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    bare.worker.send("go")?;
    let (_, without) = bare.end()?;

    let mut held = Held::start(world, kind("exit", "exit"))?;
    held.worker.expect("ready")?;
    world.cli().move_out("exit")?;
    held.worker.send("go")?;
    let (status, with) = held.end()?;
    ensure!(status == Some(0), "expected exit status 0: {with}");
    // The driver in this process has shut down, so it refuses a restore. The controller must report
    // neither a lost process nor an error.
    let told = |event: &EventRow| {
        let is_error = event.kind == "refused" && event.reason == "driver-error";
        event.to == "Lost" || (is_error && event.container == "default/exit")
    };
    let found = world.cli().events()?.into_iter().find(told);
    ensure!(found.is_none(), "expected no event about a lost process or an error, got {found:?}");
    Ok(Found::Row { without, with })
}

fn caller_dies(world: &Testbed) -> Result<Found> {
    let mut bare = Held::bare(world, usual("bare", 64))?;
    bare.worker.wait_filled()?;
    strike_in_checkpoint(world, &bare)?;
    let back = bare.tool(world, &["restore", "unlock"])?;
    let contents = if bare.verifies()? { "contents intact" } else { "contents wrong" };
    let without =
        format!("the driver finishes by itself; restore, unlock return {back:?}; {contents}");
    bare.kill(world)?;

    let mut worker = Worker::start(world, "caller", 64)?;
    let asked = Offload::begin(world, "caller")?;
    next_controller(world)?;
    asked.end()?;
    intact(&mut worker)?;
    Ok(Found::Row { without, with: "the next controller goes on; contents intact".into() })
}

/// Starts a program that checkpoints another process, and kills the program while the driver
/// executes the checkpoint. The kill came at the right moment if two conditions hold: the program
/// has printed no result, and the other process is checkpointed afterwards. Otherwise the function
/// tries again.
fn strike_in_checkpoint(world: &Testbed, bare: &Held) -> Result<()> {
    const TRIES: usize = 50;
    let pid = bare.worker.running.pid(world)?.to_string();
    let program = world.artifacts().clients_dir().join("checkpoint");
    for _ in 0..TRIES {
        ensure!(bare.tool(world, &["lock"])? == [0], "the tool cannot lock the process");
        let mut caller = world.host_gpu_command(&program);
        caller.args([&pid, "announce", "checkpoint"]).stdout(Stdio::piped());
        let mut caller = caller.spawn()?;
        let mut said =
            BufReader::new(caller.stdout.take().context("the process has no output pipe")?);
        // The program makes the checkpoint call right after it prints this line.
        said.read_line(&mut String::new())?;
        std::thread::yield_now();
        caller.kill()?;
        caller.wait()?;
        let mut answer = String::new();
        said.read_to_string(&mut answer)?;
        // `state` blocks until the driver has finished the checkpoint.
        match (bare.state(world)?, answer.is_empty()) {
            (CHECKPOINTED, true) => return Ok(()),
            (CHECKPOINTED, false) => {
                let back = bare.tool(world, &["restore", "unlock"])?;
                ensure!(back == [0, 0], "the kill came too late, and the restore failed: {back:?}");
            }
            (LOCKED, _) => {
                ensure!(bare.tool(world, &["unlock"])? == [0], "the tool cannot unlock the process")
            }
            (state, _) => bail!("after the kill of the caller the process is in state {state}"),
        }
    }
    bail!("in {TRIES} tries no caller died in the middle of a checkpoint")
}

fn fork(world: &Testbed) -> Result<Found> {
    let mut bare = Held::bare(world, usual("bare", 32))?;
    bare.worker.wait_filled()?;
    let usual =
        bare.worker.call("fork")?.child_result.context("the reply has no result of the child")?;
    bare.kill(world)?;

    let mut worker = Worker::start(world, "fork", 32)?;
    let asked = Offload::begin(world, "fork")?;
    let answer = worker.call("fork")?;
    ensure!(
        answer.child_result == Some(usual),
        "expected {usual} as without Affinode, got {answer:?}"
    );
    asked.end()?;
    intact(&mut worker)?;
    let without = format!("the child's call returns {usual}");
    Ok(Found::Row { without, with: "the child's call returns the same; contents intact".into() })
}

fn starts(world: &Testbed) -> Result<Found> {
    let mut actor = ChaosContainer::start(world, "starts", 1, 16, Way::DRIVER)?;
    let asked = Offload::begin(world, "starts")?;
    actor.exec(world)?;
    well(&actor.settle_guest(world, Instant::now() + WAIT_TIMEOUT))?;
    asked.end()?;
    all_intact(&mut actor)?;
    Ok(Found::Row { without: "-".into(), with: "both run; contents intact".into() })
}

fn dies(world: &Testbed) -> Result<Found> {
    let mut actor = ChaosContainer::start(world, "dies", 2, 16, Way::DRIVER)?;
    let asked = Offload::begin(world, "dies")?;
    actor.processes[1].doomed = true;
    kill(actor.processes[1].pid, Signal::SIGKILL)?;
    asked.end()?;
    all_intact(&mut actor)?;
    Ok(Found::Row { without: "-".into(), with: "the other one runs; contents intact".into() })
}

fn exec(world: &Testbed) -> Result<Found> {
    let mut actor = ChaosContainer::start(world, "exec", 1, 16, Way::DRIVER)?;
    world.cli().move_out("exec")?;
    actor.exec(world)?;
    well(&actor.settle_guest(world, Instant::now() + WAIT_TIMEOUT))?;
    all_intact(&mut actor)?;
    Ok(Found::Row { without: "-".into(), with: "both run; contents intact".into() })
}

fn together(world: &Testbed) -> Result<Found> {
    let mut actor = ChaosContainer::start(world, "together", 3, 16, Way::DRIVER)?;
    world.cli().move_out("together")?;
    let row = world.cli().wait_for_state("together", "Offloaded")?;
    ensure!(
        row.processes.iter().all(|p| p.phase == "Checkpointed"),
        "not all processes are offloaded: {row:?}"
    );
    actor.processes[0].ask("touch")?;
    well(&actor.processes[0].settle(Instant::now() + WAIT_TIMEOUT))?;
    let row = world.cli().wait_resident("together")?;
    ensure!(
        row.processes.iter().all(|p| p.phase == "Open"),
        "not all processes are restored: {row:?}"
    );
    all_intact(&mut actor)?;
    Ok(Found::Row { without: "-".into(), with: "move as one; contents intact".into() })
}

/// Requires that the memory of every process is intact, except processes that a fault was meant to
/// end.
pub fn all_intact(actor: &mut ChaosContainer) -> Result<()> {
    for process in actor.processes.iter_mut().filter(|process| !process.doomed) {
        process.ask("verify")?;
        well(&process.settle(Instant::now() + WAIT_TIMEOUT))?;
    }
    Ok(())
}

fn well(verdict: &Verdict) -> Result<()> {
    ensure!(*verdict == Verdict::Well, "expected intact memory, got {verdict:?}");
    Ok(())
}
