//! Hazards of profilers and of video decoding. Profilers and the video library call the driver
//! without its public functions. `clients/cupti.c` replaces CUPTI, the library that profilers use.
//! With this replacement, a process on the simulated GPU hangs or ends in the cases in which CUPTI
//! causes this on a real GPU.

use anyhow::{Context, Result, ensure};

use super::{
    Case, Found,
    manual_ops::{Held, intact, refused},
};
use crate::{
    container::{CLIENTS, Spec},
    testbed::Testbed,
    wait::until,
    worker::Worker,
};

/// Number of the system call `futex`. A program that hangs is in this call.
const FUTEX: u32 = 202;
/// Number of the system call `clock_nanosleep`. A program that sleeps is in this call.
const CLOCK_NANOSLEEP: u32 = 230;

pub fn cases() -> Vec<Case> {
    const WHY: &str = "the stand-in is of the simulated GPU: the GPU suite has a real profiler";
    vec![
        Case::new("profiler, begun while offloaded", begun_while_offloaded).simulated(WHY),
        Case::new("profiler, moved while it begins", moved_while_it_begins).simulated(WHY),
        Case::new("profiler, ended before the move", ended_before).simulated(WHY),
        Case::new("tools, injected by the environment", injected).simulated(WHY),
        Case::new("video session", video).simulated(WHY),
    ]
}

fn program(id: &str, engine: &str) -> Spec {
    Spec::gpu(id, &[&format!("{CLIENTS}/tools")]).annotation("affinode.io/engine", engine)
}

fn start(world: &Testbed, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec)?;
    worker.expect("ready")?;
    Ok(worker)
}

/// Waits until the program's first thread is executing this system call.
fn wait_inside(world: &Testbed, worker: &Worker, number: u32) -> Result<()> {
    let file = format!("/proc/{}/syscall", worker.running.pid(world)?);
    until(&format!("the program to be in system call {number}"), || {
        let call = std::fs::read_to_string(&file).with_context(|| file.clone())?;
        Ok(call.starts_with(&format!("{number} ")).then_some(()))
    })
}

/// Requires that a restore fails because a profiler was active during the checkpoint. Kills the
/// program, and returns a description of the outcome.
fn lost(world: &Testbed, bare: Held) -> Result<String> {
    let restored = bare.tool(world, &["restore"])?;
    ensure!(
        restored != [0],
        "the restore succeeded, although a tool was active during the checkpoint"
    );
    bare.kill(world)?;
    Ok(format!("begin hangs, restore returns {}: lost", restored.first().unwrap_or(&-1)))
}

fn begun_while_offloaded(world: &Testbed) -> Result<Found> {
    let mut bare = Held::bare(world, program("bare", "checkpoint"))?;
    bare.worker.expect("ready")?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    bare.worker.send("begin")?;
    wait_inside(world, &bare.worker, FUTEX)?;
    let without = lost(world, bare)?;

    let mut worker = start(world, program("begun", "checkpoint"))?;
    world.cli().move_out("begun")?;
    // The call waits until the process is restored, and then begins the profile.
    worker.call("begin")?;
    let with = refused(world, "begun", "tools")?;
    worker.call("end")?;
    intact(&mut worker)?;
    Ok(Found::Row { without, with: format!("comes back first; then {with}") })
}

fn moved_while_it_begins(world: &Testbed) -> Result<Found> {
    // 20 s are longer than the following steps take on a slow machine. No step waits for the end of
    // this call.
    const BEGIN: &str = "begin 20000";
    let mut bare = Held::bare(world, program("bare", "checkpoint"))?;
    bare.worker.expect("ready")?;
    bare.worker.send(BEGIN)?;
    wait_inside(world, &bare.worker, CLOCK_NANOSLEEP)?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    let without = lost(world, bare)?;

    let mut worker = start(world, program("slow", "checkpoint"))?;
    worker.send("begin 2000")?;
    wait_inside(world, &worker, CLOCK_NANOSLEEP)?;
    let with = refused(world, "slow", "tools")?;
    worker.expect("begin")?;
    worker.call("end")?;
    intact(&mut worker)?;
    Ok(Found::Row { without, with })
}

/// Offloads a process whose profile has ended but whose profiler thread still runs. A checkpoint
/// would kill the process, so its memory must only be copied out.
fn ended_before(world: &Testbed) -> Result<Found> {
    let mut bare = Held::bare(world, program("bare", "checkpoint"))?;
    bare.worker.expect("ready")?;
    bare.worker.call("begin")?;
    bare.worker.call("end")?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    let (_, without) = bare.end()?;

    let mut worker = start(world, program("ended", "full"))?;
    worker.call("begin")?;
    worker.call("end")?;
    for again in ["begin", "end"] {
        copied(world, "ended")?;
        worker.call(again)?;
        intact(&mut worker)?;
    }
    Ok(Found::Row { without, with: "copied, context stays; contents intact".into() })
}

/// Requires that an offload of the container only copies its memory out, and leaves its context on
/// the GPU.
fn copied(world: &Testbed, id: &str) -> Result<()> {
    // The controller reads the amount of copyable memory together with the counters, so this amount
    // is 0 at first.
    world.cli().wait_for(id, "to have swappable memory", |row| {
        row.processes.iter().any(|process| process.swappable_bytes > 0)
    })?;
    world.cli().move_out(id)?;
    let row = world.cli().known(id)?;
    let phase = &row.process()?.phase;
    ensure!(
        phase == "CopiedOut",
        "expected phase CopiedOut, in which the context stays on the GPU, got {phase}: {row:?}"
    );
    Ok(())
}

fn injected(world: &Testbed) -> Result<Found> {
    let spec = program("injected", "checkpoint").env("CUDA_INJECTION64_PATH", "/tool.so");
    let mut worker = start(world, spec)?;
    let with = refused(world, "injected", "tools")?;
    intact(&mut worker)?;
    Ok(Found::Row { without: "-".into(), with })
}

fn video(world: &Testbed) -> Result<Found> {
    let mut stays = start(world, program("video", "checkpoint"))?;
    stays.call("video")?;
    let with = refused(world, "video", "video")?;
    intact(&mut stays)?;
    let mut leaves = start(world, program("copied", "auto"))?;
    leaves.call("video")?;
    copied(world, "copied")?;
    intact(&mut leaves)?;
    Ok(Found::Row { without: "-".into(), with: format!("{with}; copied by the engine auto") })
}
