//! Device memory that a move gives back: the driver takes note of it at the next request for memory,
//! which is not to be that of a return.

use affinode_e2e::{
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use affinode_sim_protocol::{Packet, Reply, Request};
use anyhow::{Context, Result, bail};

use crate::offload::MANUAL;

const WORKER_MIB: u64 = 64;
/// The dummy allocation is released as well.
const LITTLE_BYTES: u64 = 2 * MIB;

/// What the driver has still to take note of, on all GPUs.
fn unnoted_bytes(world: &Testbed) -> Result<u64> {
    let packet = Packet::connect(&world.dir().join("sim/gpu.sock"))?;
    packet.send(&Request::Snapshot, None)?;
    match packet.receive()?.context("an answer")?.0 {
        Reply::Snapshot(gpus) => Ok(gpus.iter().map(|gpu| gpu.unnoted_bytes).sum()),
        other => bail!("{other:?}"),
    }
}

/// By the agent where the context stays, by the copier where it does not.
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
