//! Tests of local memory (the stacks and spilled registers of the GPU's threads, which are a part
//! of a context). It is offloaded together with the memory that the library copies.

use affinode_e2e::{
    testbed::{MIB, TestbedConfig},
    worker::{USUAL, Worker},
};
use anyhow::Result;

use crate::offload::MANUAL;

const WORKER_MIB: u64 = 64;
/// Local memory of each GPU thread, in bytes. It is twice as much as in a new context.
const STACK_BYTES: i32 = 2048;
/// Size in MiB of a context of the simulated GPU without local memory. With the default stack
/// limit, a context takes twice as much.
const CONTEXT_MIB: u64 = 8;

/// Offloads and restores a program that has set a stack limit. After each restore, the limit must
/// be as the program set it. VRAM for local memory must count as needed for the restore.
#[test]
fn local_memory_leaves_with_the_copy() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ["auto", "copy"] {
        let spec = Worker::spec(engine, USUAL, WORKER_MIB).annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        worker.call(&format!("stack {STACK_BYTES}"))?;
        let resident = (WORKER_MIB + 3 * CONTEXT_MIB) * MIB;
        world.cli().wait_for(engine, "to hold its VRAM", |row| row.vram_bytes == resident)?;
        for round in 0..2 {
            world.cli().move_out(engine)?;
            let offloaded = world.cli().known(engine)?;
            let sizes = (offloaded.vram_bytes, offloaded.offloaded_bytes);
            let expected = (CONTEXT_MIB * MIB, resident - CONTEXT_MIB * MIB);
            assert_eq!(sizes, expected, "{engine}, {round}: {offloaded:?}");
            assert_eq!(worker.call("limit")?.value, Some(STACK_BYTES), "{engine}, {round}");
            assert!(worker.verify()?, "{engine}, {round}");
            world.cli().wait_for(engine, "to hold all of its VRAM again", |row| {
                row.vram_bytes == resident
            })?;
        }
        worker.running.kill(&world)?;
    }
    Ok(())
}
