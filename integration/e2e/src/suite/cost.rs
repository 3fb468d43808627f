//! Measures the overhead of Affinode's hooks and wakes. It compares a hooked CUDA call with the
//! driver's own call, and a wake with the driver's own restore.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{BY_ORDER, median, report::Rows};
use crate::{
    attack,
    container::{CLIENTS, Spec},
    containerd::STOCK,
    gpu::Gpu,
    testbed::Testbed,
    worker::{USUAL, Worker},
};

/// Number of measured wakes with Affinode, and of measured restores without it.
const WAKES: usize = 10;
/// Duration in seconds of the loop of CUDA calls. During most of it, the calls are traced.
const LOOP_SECONDS: &str = "6";
/// VRAM of a small process, in MiB. Little memory is copied fast, so that other costs are visible.
const SMALL_MIB: u64 = 64;

/// Measured cost of one function, parsed from a line of the program `call_cost`.
#[derive(Deserialize)]
struct CallCost {
    call: String,
    ns_median: f64,
}

/// Compares the duration of hooked driver calls with the duration of direct calls. The hooked calls
/// run in a container of Affinode's runtime. The direct calls run in containers of the stock
/// runtime, before and after the hooked calls.
pub fn calls(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let measure = |id: &str, runtime: Option<&str>| -> Result<Vec<CallCost>> {
        let spec = Spec::gpu(id, &[&format!("{CLIENTS}/call_cost")]);
        let text = match runtime {
            Some(runtime) => spec.runtime(runtime).run(world)?,
            None => spec.run(world)?,
        };
        text.lines()
            .map(|line| serde_json::from_str(line).context("cannot parse the output of call_cost"))
            .collect()
    };
    let mut direct = measure("direct", Some(STOCK))?;
    let hooked = measure("hooked", None)?;
    let again = measure("direct", Some(STOCK))?;
    for (first, second) in direct.iter_mut().zip(&again) {
        first.ns_median = first.ns_median.min(second.ns_median);
    }
    for (direct, hooked) in direct.iter().zip(&hooked) {
        let call = &direct.call;
        ensure!(
            *call == hooked.call,
            "the sides measured different calls: {call} and {}",
            hooked.call
        );
        rows.tell(&format!("{call}, direct"), direct.ns_median, "ns");
        let more = hooked.ns_median - direct.ns_median;
        let what = format!("{call}, hooked: more by");
        match world.gpu() {
            Gpu::Real => rows.want(&what, more, "ns", "at most 10 ns", more <= 10.0),
            // The duration of a call of the simulated driver depends on the machine's other work,
            // so no goal applies.
            Gpu::Simulated { .. } => rows.tell(&what, more, "ns"),
        }
    }
    Ok(())
}

/// Compares a loop of hooked calls with call tracing and without it.
pub fn watched_calls(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let measure = |id: &str| -> Result<f64> {
        let program = format!("{CLIENTS}/call_cost");
        let text = Spec::gpu(id, &[&program, "loop", LOOP_SECONDS]).run(world)?;
        let cost: CallCost =
            serde_json::from_str(&text).context("cannot parse the output of call_cost")?;
        Ok(cost.ns_median)
    };
    let before = measure("unwatched")?;
    let seen = world.dir().join("calls");
    let mut watcher = world.cli().command(&["calls"]).stdout(File::create(&seen)?).spawn()?;
    let watched = measure("watched");
    watcher.kill()?;
    watcher.wait()?;
    let (watched, after) = (watched?, measure("unwatched")?);
    let seen = std::fs::read_to_string(seen)?;
    ensure!(seen.contains("cuLaunchKernel"), "no call was traced: {seen}");
    let plain = before.min(after);
    rows.tell("20 launches, 20 queries, a synchronisation", plain / 1000.0, "us");
    let percent = 100.0 * (watched - plain) / plain;
    let what = "the same, its calls watched: more by";
    match world.gpu() {
        Gpu::Real => rows.want(what, percent, "%", "at most 2 %", percent <= 2.0),
        // Tracing and the simulated kernels use the same processors, so no goal applies.
        Gpu::Simulated { .. } => rows.tell(what, percent, "%"),
    }
    Ok(())
}

/// Compares the duration of a call that wakes the container with the driver's restore and unlock,
/// called from another process.
pub fn wakes(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let (driver, felt) = wake_ms(world)?;
    rows.tell("restore and unlock by the driver alone", driver, "ms");
    rows.tell("a call that wakes, as the caller feels it", felt, "ms");
    let more = felt - driver;
    rows.want("more by", more, "ms", "at most 10 ms", more <= 10.0);
    Ok(())
}

/// Returns two median durations in milliseconds: of the driver's restore and unlock, and of a call
/// that wakes the container.
///
/// # Errors
/// When a container or a cycle fails.
pub fn wake_ms(world: &Testbed) -> Result<(f64, f64)> {
    let driver = driver_ms(world)?;
    let mut worker = by_order(world, "wake")?;
    let felt = felt_ms(world, &mut worker)?;
    ensure!(worker.verify()?, "the contents have changed after the wakes");
    worker.running.kill(world)?;
    worker.running.delete(world)?;
    Ok((median(&driver), median(&felt)))
}

/// Measures the duration of a CUDA call that wakes its container. The first measurement is without
/// other load. During the second measurement, another container attacks the controller.
pub fn under_attack(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let mut worker = by_order(world, "victim")?;
    let quiet = felt_ms(world, &mut worker)?;
    let attacker = attack::start(world, "attacker")?;
    let attacked = felt_ms(world, &mut worker)?;
    attacker.running.kill(world)?;
    attacker.running.delete(world)?;
    ensure!(worker.verify()?, "the contents have changed after the attack");
    worker.running.kill(world)?;
    worker.running.delete(world)?;
    let (quiet, attacked) = (median(&quiet), median(&attacked));
    rows.tell("a call that wakes, alone", quiet, "ms");
    rows.tell("the same, beside an attacker", attacked, "ms");
    let more = attacked - quiet;
    match world.gpu() {
        Gpu::Real => rows.want("more by", more, "ms", "at most 10 ms", more <= 10.0),
        Gpu::Simulated { .. } => rows.tell("more by", more, "ms"),
    }
    Ok(())
}

/// Starts a container that is offloaded only on request.
fn by_order(world: &Testbed, id: &str) -> Result<Worker> {
    let (name, value) = BY_ORDER;
    let spec = Worker::spec(id, USUAL, SMALL_MIB).annotation(name, value);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Returns durations in milliseconds of calls that wake the container, measured by the calling
/// program.
fn felt_ms(world: &Testbed, worker: &mut Worker) -> Result<Vec<f64>> {
    let id = worker.running.id.clone();
    let mut felt = Vec::new();
    for _ in 0..WAKES {
        world.cli().move_out(&id)?;
        felt.push(worker.call("streamsync")?.elapsed_us as f64 / 1000.0);
    }
    Ok(felt)
}

/// Returns durations in milliseconds of the driver's restore plus unlock. They are measured with an
/// unmanaged process that has `SMALL_MIB` MiB of VRAM.
fn driver_ms(world: &Testbed) -> Result<Vec<f64>> {
    #[derive(Deserialize)]
    struct Step {
        command: String,
        result: i32,
        elapsed_us: f64,
    }
    let mut worker =
        Worker::start_as(world, Worker::spec("driver", USUAL, SMALL_MIB).runtime(STOCK))?;
    worker.wait_filled()?;
    let pid = worker.running.pid(world)?.to_string();
    let tool = world.artifacts().clients_dir().join("checkpoint");
    let mut samples = Vec::new();
    for _ in 0..WAKES {
        let steps = [&pid, "lock", "checkpoint", "restore", "unlock"];
        let output = world.host_gpu_command(&tool).args(steps).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut sum = 0.0;
        for line in text.lines() {
            let step: Step = serde_json::from_str(line)?;
            ensure!(step.result == 0, "a call of the driver failed: {line}");
            if matches!(step.command.as_str(), "restore" | "unlock") {
                sum += step.elapsed_us / 1000.0;
            }
        }
        samples.push(sum);
    }
    ensure!(
        worker.verify()?,
        "the contents have changed after checkpoints and restores by the driver alone"
    );
    worker.running.kill(world)?;
    worker.running.delete(world)?;
    Ok(samples)
}
