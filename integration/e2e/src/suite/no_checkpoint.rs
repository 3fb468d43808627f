//! Test with a program that ends when the driver's checkpoint functions are called in its process.
//! The default engine must not call them.

use anyhow::Result;

use super::{BY_ORDER, report::Rows};
use crate::{
    container::{CLIENTS, Spec},
    gpu::Gpu,
    testbed::Testbed,
    wait::until,
    worker::Worker,
};

/// Number of the driver's functions that the program overwrites with traps.
const TRAPPED: i32 = 4;

/// Requires that the program survives offloads by the engine `auto`. Then requires that an offload
/// by the engine `checkpoint` ends the program, which proves that the program notices a checkpoint
/// call.
pub fn default_makes_no_call(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let (mib, rounds) = match world.gpu() {
        Gpu::Real => ("1024", 5),
        Gpu::Simulated { .. } => ("64", 2),
    };
    let start = |engine: &str| -> Result<Worker> {
        let (name, value) = BY_ORDER;
        let spec =
            Spec::gpu(&format!("trap-{engine}"), &[&format!("{CLIENTS}/no_checkpoint"), mib])
                .annotation(name, value)
                .annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(world, spec)?;
        let ready = worker.expect("ready")?;
        anyhow::ensure!(ready.value == Some(TRAPPED), "functions not overwritten: {ready:?}");
        Ok(worker)
    };
    let mut worker = start("auto")?;
    let mut intact = 0;
    for _ in 0..rounds {
        world.cli().move_out("trap-auto")?;
        intact += usize::from(worker.verify()?);
    }
    rows.count("auto: offloads and restores without a call of the checkpoint", intact, rounds);
    worker.running.kill(world)?;
    worker.running.delete(world)?;
    let worker = start("checkpoint")?;
    // The offload is refused while the first call is in progress, and fails when the process ends.
    let ended = until("the trapped program to end", || {
        let _ = world.cli().run(&["offload", "trap-checkpoint"]);
        let status = worker.running.status(world)?;
        Ok((status.as_deref() != Some("RUNNING")).then_some(1))
    })?;
    rows.count("checkpoint: programs that such a call ended", ended, 1);
    worker.running.delete(world)
}
