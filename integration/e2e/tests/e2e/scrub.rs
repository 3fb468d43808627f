//! Tests of the scrub, in which the GPU clears device memory that an offload or restore has
//! released. The driver notices the end of the scrub only during the next allocation, which
//! therefore takes longer. This slow allocation must not be a part of a restore.

use affinode_e2e::{
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use affinode_sim_protocol::{Packet, Reply, Request};
use anyhow::{Context, Result, bail};

use crate::offload::MANUAL;

const WORKER_MIB: u64 = 64;
/// Size in bytes of the small allocation that absorbs the wait for the scrub. This allocation is
/// released as well.
const LITTLE_BYTES: u64 = 2 * MIB;

/// Returns the bytes of VRAM that were released, but whose scrub the driver has not noticed yet.
/// All GPUs are counted together.
fn unnoted_bytes(world: &Testbed) -> Result<u64> {
    let packet = Packet::connect(&world.dir().join("sim/gpu.sock"))?;
    packet.send(&Request::Snapshot, None)?;
    match packet.receive()?.context("the daemon sent no reply")?.0 {
        Reply::Snapshot(gpus) => Ok(gpus.iter().map(|gpu| gpu.unnoted_bytes).sum()),
        other => bail!("{other:?}"),
    }
}

/// Checks that a small allocation is made after an offload, so that the restore does not wait for
/// the scrub. The agent makes the allocation if the context stays. Otherwise the copier makes it.
#[test]
fn restore_does_not_wait_for_scrub() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ["copy", "full"] {
        let spec = Worker::spec(engine, USUAL, WORKER_MIB).annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        for _ in 0..2 {
            world.cli().move_out(engine)?;
            until("the agent to make a dummy allocation", || {
                Ok((unnoted_bytes(&world)? <= LITTLE_BYTES).then_some(()))
            })?;
            assert!(worker.verify()?, "{engine}: contents as before");
        }
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}
