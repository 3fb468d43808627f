//! Measures how long a CUDA call waits that comes during an offload, which it cancels. A call that
//! comes after an offload is measured for comparison.

use std::time::Instant;

use anyhow::{Result, anyhow};

use super::{BY_ORDER, engines::ENGINE, median, report::Rows};
use crate::{
    gpu::Gpu,
    testbed::Testbed,
    worker::{USUAL, Worker},
};

const NAME: &str = "called";
const ROUNDS: usize = 5;

/// Calls during and after offloads of one process, and adds rows with the waits.
///
/// # Errors
/// When the container does not start, or the controller does not reply.
pub fn calls(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let vram_mib = match world.gpu() {
        Gpu::Real => 24 << 10,
        Gpu::Simulated { .. } => 256,
    };
    let (name, value) = BY_ORDER;
    let spec =
        Worker::spec(NAME, USUAL, vram_mib).annotation(name, value).annotation(ENGINE, "auto");
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    worker.call("streamsync")?;
    let (cli, mut cancelled) = (world.cli(), 0);
    let (mut during_ms, mut offload_ms, mut after_ms) = (Vec::new(), Vec::new(), Vec::new());
    let mut timed_call = |waits_ms: &mut Vec<f64>| {
        let asked = Instant::now();
        worker.call("streamsync")?;
        waits_ms.push(asked.elapsed().as_secs_f64() * 1_000.0);
        anyhow::Ok(())
    };
    for _ in 0..ROUNDS {
        let before = cli.wait_resident(NAME)?.offloads;
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| cli.output(&["offload", NAME]));
            cli.wait_for_state(NAME, "Offloading")?;
            timed_call(&mut during_ms)?;
            asks.join().map_err(|_| anyhow!("the thread that asks has panicked"))?
        })?;
        cancelled += usize::from(cli.wait_resident(NAME)?.offloads == before);
    }
    for _ in 0..ROUNDS {
        offload_ms.push(cli.move_out(NAME)?.elapsed_ms as f64);
        timed_call(&mut after_ms)?;
        cli.wait_resident(NAME)?;
    }
    rows.tell("call during the offload, median", median(&during_ms), "ms");
    rows.tell(
        "call during the offload, longest",
        during_ms.iter().copied().fold(0.0, f64::max),
        "ms",
    );
    rows.tell("offloads that the call cancelled", cancelled as f64, "of 5");
    rows.tell("offload, median", median(&offload_ms), "ms");
    rows.tell("call after the offload, median", median(&after_ms), "ms");
    rows.count("contents as before", usize::from(worker.verify()?), 1);
    Ok(())
}
