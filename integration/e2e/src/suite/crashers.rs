//! Makes five CUDA calls that crash a process while its GPU state is checkpointed. Each call runs
//! with the library loaded and without it.

use std::process::Stdio;

use anyhow::Result;

use super::{BY_ORDER, cycle::EMPTY_BYTES, report::Rows, vram_used};
use crate::{
    container::{CLIENTS, Spec},
    testbed::Testbed,
    worker::Worker,
};

const CALLS: [&str; 5] = ["ctx-sync", "stream-sync", "stream-query", "event-query", "event-sync"];
/// Number of rounds. Each round makes the five calls once, so there are thirty calls in total.
const ROUNDS: usize = 6;
/// Exit status of a shell whose program was ended by SIGSEGV.
const SEGMENTATION_FAULT: i32 = 128 + 11;

/// Requires that the calls return if the library is loaded, and that they end the program
/// otherwise.
pub fn with_and_without(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let mut returned = 0;
    let mut died = 0;
    for call in CALLS {
        let good = returns(world, call)?;
        rows.count(&format!("{call} while offloaded, with the library"), good, ROUNDS);
        returned += good;
        died += usize::from(kills(world, call)?);
    }
    rows.count("returned with the library, contents verified", returned, CALLS.len() * ROUNDS);
    rows.count("programs that died without it", died, CALLS.len());
    Ok(())
}

fn spec(call: &str) -> Spec {
    Spec::gpu(call, &[&format!("{CLIENTS}/crashers"), call])
}

fn returns(world: &Testbed, call: &str) -> Result<usize> {
    let (name, value) = BY_ORDER;
    let mut worker = Worker::start_as(world, spec(call).annotation(name, value))?;
    worker.expect("ready")?;
    let mut good = 0;
    for _ in 0..ROUNDS {
        world.cli().move_out(call)?;
        vram_used(world, |used| used <= EMPTY_BYTES)?;
        let answer = worker.ask("go")?;
        good += usize::from(answer.result == 0 && answer.ok == Some(true));
    }
    worker.running.kill(world)?;
    worker.running.delete(world)?;
    Ok(good)
}

/// Whether a CUDA call ends a program that runs without Affinode. Before the call, another program
/// checkpoints the calling program by the driver's calls.
fn kills(world: &Testbed, call: &str) -> Result<bool> {
    let (spec, pipes) = spec(call).annotation("affinode.io/inject", "false").piped(world)?;
    let mut container = spec.command(world, &["--rm"])?.stderr(Stdio::null()).spawn()?;
    let mut worker = Worker::attach(&spec, &pipes)?;
    worker.expect("ready")?;
    let pid = worker.running.pid(world)?.to_string();
    let tool = world.artifacts().clients_dir().join("checkpoint");
    let output = world.host_gpu_command(&tool).args([&pid, "lock", "checkpoint"]).output()?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    worker.send("go")?;
    Ok(container.wait()?.code() == Some(SEGMENTATION_FAULT))
}
