//! Test with containers that together need more VRAM than the GPU has. Three containers work in
//! bursts, but VRAM suffices for only one of them. A fourth container allocates most of this VRAM,
//! and its allocations must wait.

use std::thread;

use anyhow::{Context, Result, bail, ensure};

use super::report::Rows;
use crate::{
    container::Spec,
    gpu::Gpu,
    hazards,
    testbed::{MIB, Testbed},
    wait::until,
    worker::{USUAL, Worker},
};

/// Names of the containers that work in bursts.
const WORKERS: [&str; 3] = ["burst-a", "burst-b", "burst-c"];
const BURSTS: usize = 2;
/// Number of kernels that a container runs in a burst, before a pause.
const KERNELS: usize = 4;
const PAUSE: &str = "sleep 2000";
/// Size of the fourth container's first allocation, in MiB. The container allocates its other
/// memory in several pieces.
const FIRST_MIB: u64 = 16;
const PIECES: u64 = 12;

/// Amounts of VRAM in the scenario. An unmanaged program allocates all other VRAM of the device.
struct Sizes {
    room_mib: u64,
    /// VRAM that a worker uses, in MiB.
    works_on_mib: u64,
    /// VRAM that a worker allocates in addition and does not use, in MiB.
    holds_more_mib: u64,
    piece_mib: u64,
}

impl Sizes {
    fn of(world: &Testbed) -> Sizes {
        match world.gpu() {
            // A context takes some 530 MiB on a real GPU.
            Gpu::Real => {
                Sizes { room_mib: 8192, works_on_mib: 1024, holds_more_mib: 3328, piece_mib: 528 }
            }
            Gpu::Simulated { .. } => {
                Sizes { room_mib: 512, works_on_mib: 16, holds_more_mib: 232, piece_mib: 28 }
            }
        }
    }
}

/// Runs all parts of the scenario.
pub fn oversubscribed(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let sizes = Sizes::of(world);
    let _ballast = ballast(world, sizes.room_mib)?;
    let mut workers = Vec::new();
    for id in WORKERS {
        let mut worker = Worker::start_as(world, waiting(id, sizes.works_on_mib))?;
        worker.wait_filled()?;
        worker.call(&format!("alloc {}", sizes.holds_more_mib))?;
        workers.push(worker);
    }
    let served = bursts(&mut workers, || Ok(()))?;
    rows.count("bursts without a failure", served, WORKERS.len() * BURSTS);
    // The container that was served last may never have been offloaded, so its number of restores
    // may be 0.
    let mut returns = 0;
    for id in WORKERS {
        let row = world
            .cli()
            .container(id)?
            .with_context(|| format!("the controller does not list {id}"))?;
        returns += row.restores;
    }
    let least = WORKERS.len() as u64 - 1;
    let goal = format!("at least {least}");
    rows.want("returns of the three", returns as f64, "", &goal, returns >= least);

    // The fourth container allocates while the three workers run their bursts.
    let mut newcomer = Worker::start_as(world, waiting("newcomer", FIRST_MIB))?;
    let mut pieces = 0;
    let served = bursts(&mut workers, || {
        newcomer.wait_filled()?;
        for _ in 0..PIECES {
            newcomer.call(&format!("alloc {}", sizes.piece_mib))?;
            newcomer.call("touch")?;
            pieces += 1;
        }
        ensure!(newcomer.verify()?, "the newcomer's memory has changed");
        Ok(())
    })?;
    let whole = world.cli().ps()?.gpus.first().map_or(0, |gpu| gpu.vram_total_bytes);
    let share = (FIRST_MIB + PIECES * sizes.piece_mib) as f64 / sizes.room_mib as f64;
    rows.tell("device", whole as f64 / MIB as f64, "MiB");
    rows.tell("of it for all of them", sizes.room_mib as f64, "MiB");
    rows.tell("of that the newcomer takes", share * 100.0, "%");
    rows.count("its allocations that were made", pieces, PIECES as usize);
    rows.count("bursts beside it without a failure", served, WORKERS.len() * BURSTS);
    let waited = world.cli().events()?;
    let waited = waited.iter().filter(|event| event.reason == "allocation-waits").count();
    rows.want("allocations that waited", waited as f64, "", "at least one", waited > 0);
    Ok(())
}

/// Describes a container whose allocations wait if VRAM does not suffice (`on_oom = "wait"`).
fn waiting(id: &str, mib: u64) -> Spec {
    Worker::spec(id, USUAL, mib)
        .annotation("affinode.io/on-oom", "wait")
        .annotation("affinode.io/on-oom-timeout", "5m")
}

/// Starts an unmanaged program that allocates all VRAM except for `room_mib`.
pub(super) fn ballast(world: &Testbed, room_mib: u64) -> Result<Worker> {
    let ballast = hazards::ballast(world, room_mib * MIB)?;
    until("NVML to show the ballast", || {
        // A controller that has just started has not read the GPU yet.
        let Ok(node) = world.cli().ps_now() else { return Ok(Some(())) };
        let gpus = node.gpus;
        let free = |gpu: &crate::cli::GpuRow| gpu.vram_total_bytes - gpu.vram_used_bytes;
        Ok(gpus.first().filter(|gpu| free(gpu) / MIB <= room_mib).map(|_| ()))
    })?;
    Ok(ballast)
}

/// Runs the bursts of all workers in parallel, and calls `beside` at the same time. Returns the
/// number of successful bursts.
fn bursts(workers: &mut [Worker], beside: impl FnOnce() -> Result<()>) -> Result<usize> {
    thread::scope(|scope| {
        let busy: Vec<_> = workers.iter_mut().map(|w| scope.spawn(|| work(w))).collect();
        let done = beside();
        let mut served = 0;
        for thread in busy {
            match thread.join() {
                Ok(bursts) => served += bursts?,
                Err(_) => bail!("a thread of the scene panicked"),
            }
        }
        done.map(|()| served)
    })
}

fn work(worker: &mut Worker) -> Result<usize> {
    for _ in 0..BURSTS {
        for _ in 0..KERNELS {
            worker.call("touch")?;
            worker.call("sync")?;
        }
        ensure!(worker.verify()?, "memory of {} has changed", worker.running.id);
        worker.call(PAUSE)?;
    }
    Ok(BURSTS)
}
