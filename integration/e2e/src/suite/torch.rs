//! Tests of a training loop of torch. The loop's container becomes idle, is offloaded, and is
//! restored. The loop's weights must be the same as without an offload. The module also measures
//! the cost of a training step.

use anyhow::Result;

use super::{
    BY_ORDER,
    cycle::{EMPTY_BYTES, mib},
    engines::KEPT,
    median,
    python::{Answer, Python, ask, step},
    repeated_offload::{Flavour, STEPS},
    report::Rows,
    vram_used,
};
use crate::{containerd::STOCK, testbed::MIB, worker::Worker};

/// Command line of the torch program.
const TORCH: &[&str] = &["torch_worker.py"];
/// The training loop, offloaded with each engine.
pub const ENGINES: Flavour = Flavour::large("torch", TORCH);
/// The inference loop. Each pass allocates its own memory, and changes no other memory.
pub const INFERENCE: Flavour =
    Flavour { engines: &[KEPT], ..Flavour::large("inference", &["torch_worker.py", "inference"]) };
/// The training loop with torch's allocator that maps memory itself (expandable segments).
pub const SEGMENTS: Flavour = Flavour {
    settings: &[("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")],
    rounds: 3,
    ..Flavour::large("segments", TORCH)
};
/// The training loop with CUDA's stream-ordered allocator.
pub const POOLS: Flavour = Flavour {
    settings: &[("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")],
    engines: &["checkpoint", "full"],
    rounds: 2,
    ..Flavour::large("pools", TORCH)
};

/// Trains, waits until the container is idle and offloaded, and continues to train. Also runs the
/// same steps without an offload, and compares the results.
pub fn cycle(python: &Python, who: &str, rows: &mut Rows) -> Result<()> {
    let world = python.world;
    let mut digests = Vec::new();
    for offloaded in [false, true] {
        let id = format!("torch-{who}-{offloaded}");
        let spec = python.spec(&id, who, TORCH)?;
        let spec = if offloaded { spec } else { spec.annotation("affinode.io/offload", "off") };
        let mut worker = Worker::start_as(world, spec)?;
        worker.expect("ready")?;
        step(&mut worker, STEPS)?;
        if offloaded {
            let full = vram_used(world, |used| used >= 256 * MIB)?;
            rows.tell("device in use, trained", mib(full), "MiB");
            let row = world.cli().wait_for_state(&id, "Offloaded")?;
            rows.tell("moved out in", row.last_offload_ms as f64, "ms");
            let empty = vram_used(world, |used| used < full / 2)?;
            let good = empty <= EMPTY_BYTES;
            rows.want("device in use, offloaded", mib(empty), "MiB", "a few MiB", good);
        }
        digests.push(step(&mut worker, STEPS)?.digest()?);
        if offloaded {
            let row = world.cli().known(&id)?;
            rows.tell("came back in", row.last_wake_ms as f64, "ms");
            world.cli().wait_for_state(&id, "Offloaded")?;
            rows.count("ends by itself while offloaded", usize::from(worker.ends(world)?), 1);
        } else {
            worker.running.kill(world)?;
        }
        worker.running.delete(world)?;
    }
    let same = usize::from(digests[0] == digests[1]);
    rows.count("weights after training as without the cycle", same, 1);
    Ok(())
}

/// Measures a training step alternately under Affinode's runtime and under the stock runtime, and
/// compares the times.
pub fn step_cost(python: &Python, rows: &mut Rows) -> Result<()> {
    let world = python.world;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        for (id, samples) in [("step-stock", &mut without), ("step-ours", &mut with)] {
            let mut spec = python.spec(id, "root", TORCH)?.annotation(BY_ORDER.0, BY_ORDER.1);
            if id == "step-stock" {
                spec = spec.runtime(STOCK);
            }
            let mut worker = Worker::start_as(world, spec)?;
            worker.expect("ready")?;
            samples.push(ask(&mut worker, "bench")?);
            worker.running.kill(world)?;
            worker.running.delete(world)?;
        }
    }
    // The median step differs by 15 % between starts, with any runtime. The fastest step over many
    // starts differs by less than 1 %.
    let median_of = |steps: &[Answer]| median(&steps.iter().map(|s| s.step_ms).collect::<Vec<_>>());
    rows.tell("median with the stock runtime", median_of(&without), "ms");
    rows.tell("median with the library", median_of(&with), "ms");
    let best = |steps: &[Answer]| steps.iter().map(|s| s.best_ms).fold(f64::INFINITY, f64::min);
    let (without, with) = (best(&without), best(&with));
    rows.tell("the fastest step with the stock runtime", without, "ms");
    rows.tell("the fastest step with the library", with, "ms");
    let more = (with / without - 1.0) * 100.0;
    rows.want("more by", more, "%", "within 1%", more <= 1.0);
    // An offload and restore show that the container was managed, and had not only loaded the
    // library.
    let spec = python.spec("step-moved", "root", TORCH)?.annotation(BY_ORDER.0, BY_ORDER.1);
    let mut worker = Worker::start_as(world, spec)?;
    worker.expect("ready")?;
    world.cli().move_out("step-moved")?;
    step(&mut worker, 1)?;
    worker.running.kill(world)?;
    worker.running.delete(world)
}
