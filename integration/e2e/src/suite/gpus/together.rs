//! Wakes two containers on two GPUs at the same time. Each container must be restored as fast as if
//! it were woken alone. It may be slower only if both share a link, a memory controller or the
//! controller's threads.

use std::{thread, time::Duration};

use anyhow::{Context, Result};

use super::super::{
    BY_ORDER, Rows, Testbed,
    engines::{ENGINE, SCRUBBED_AFTER},
    median, wait_held,
};
use crate::{
    gpu::Gpu,
    testbed::MIB,
    worker::{USUAL, Worker},
};

pub const PART: &str = "gpus, woken together";

const ROUNDS: usize = 5;

/// Memory of a container: the size of each allocation, and the number of allocations.
struct Load {
    each_mib: u64,
    count: u64,
}

/// Wakes each container alone, then both at the same time, and compares the times.
///
/// # Errors
/// When a container does not start, or a call fails.
pub fn wakes(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let load = match world.gpu() {
        Gpu::Real => Load { each_mib: 4096, count: 6 },
        Gpu::Simulated { .. } => Load { each_mib: 16, count: 2 },
    };
    for engine in ["auto", "full"] {
        let mut workers = Vec::new();
        for gpu in 0..2 {
            workers.push(start(world, engine, gpu, &load)?);
        }
        let gib = (load.each_mib * load.count) as f64 / 1024.0;
        let size = format!("{engine}, {gib:.1} GiB each");
        let mut alone = Vec::new();
        for gpu in 0..2 {
            let mut took_ms = Vec::new();
            for _ in 0..ROUNDS {
                offload(world, &workers)?;
                took_ms.push(wake(&mut workers[gpu])?);
                // The other container is restored, too, so that each round begins in the same
                // state.
                wake(&mut workers[1 - gpu])?;
            }
            rows.tell(&format!("{size}: wake alone, GPU {gpu}"), median(&took_ms), "ms");
            alone.push(median(&took_ms));
        }
        let mut together = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            offload(world, &workers)?;
            for (gpu, took_ms) in wake_all(&mut workers)?.into_iter().enumerate() {
                together[gpu].push(took_ms);
            }
        }
        for (gpu, took_ms) in together.iter().enumerate() {
            let ms = median(took_ms);
            rows.tell(&format!("{size}: wake at the same time, GPU {gpu}"), ms, "ms");
            let times = ms / alone[gpu].max(0.001);
            rows.tell(&format!("{size}: against alone, GPU {gpu}"), times, "times");
        }
        let bytes = load.each_mib * load.count * MIB;
        let mut good = 0;
        for worker in &mut workers {
            good += usize::from(worker.check(bytes)?);
        }
        rows.count(&format!("{size}: contents as before"), good, 2);
        for worker in workers {
            worker.running.kill(world)?;
            worker.running.delete(world)?;
        }
    }
    Ok(())
}

fn start(world: &Testbed, engine: &str, gpu: usize, load: &Load) -> Result<Worker> {
    let id = format!("together-{engine}-{gpu}");
    let spec = Worker::spec(&id, USUAL, load.each_mib).annotation(BY_ORDER.0, BY_ORDER.1);
    let spec = spec.annotation(ENGINE, engine).env("CUDA_VISIBLE_DEVICES", &gpu.to_string());
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    for _ in 1..load.count {
        worker.call(&format!("alloc {}", load.each_mib))?;
    }
    Ok(worker)
}

/// Offloads all containers. Waits until their GPUs have scrubbed (cleared) the released memory.
fn offload(world: &Testbed, workers: &[Worker]) -> Result<()> {
    wait_held(world)?;
    for worker in workers {
        world.cli().move_out(&worker.running.id)?;
    }
    wait_held(world)?;
    thread::sleep(match world.gpu() {
        Gpu::Real => SCRUBBED_AFTER,
        Gpu::Simulated { .. } => Duration::ZERO,
    });
    Ok(())
}

/// Makes a call that wakes the container. Returns the time that the call waits, in milliseconds.
fn wake(worker: &mut Worker) -> Result<f64> {
    Ok(worker.call("streamsync")?.elapsed_us as f64 / 1000.0)
}

/// Makes a call in all containers at the same time. Returns the time that each call waits, in
/// milliseconds.
fn wake_all(workers: &mut [Worker]) -> Result<Vec<f64>> {
    thread::scope(|scope| {
        let calls: Vec<_> =
            workers.iter_mut().map(|worker| scope.spawn(move || wake(worker))).collect();
        calls
            .into_iter()
            .map(|call| call.join().ok().context("a thread that waits for a call panicked")?)
            .collect()
    })
}
