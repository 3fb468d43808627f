//! Tests of prewake: an incoming network connection causes a restore before the next CUDA call.

use affinode_e2e::{
    suite::connect,
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::Result;

use crate::offload::EAGER;

fn start(world: &Testbed, id: &str, wake_on: &str) -> Result<Worker> {
    let spec = Worker::spec(id, USUAL, 32).annotation("affinode.io/wake-on", wake_on);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn told(world: &Testbed, kind: &str) -> Result<usize> {
    let events = world.cli().events()?;
    Ok(events.iter().filter(|e| e.kind == kind && e.reason == "connection").count())
}

/// Connects a client to an offloaded container with the annotation for prewake. The container must
/// be restored before its first CUDA call. Another container, to which a client connected earlier,
/// must stay offloaded.
#[test]
fn connection_prewakes_only_its_container() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut listens = start(&world, "listens", "connection")?;
    let mut sleeps = start(&world, "sleeps", "call")?;
    for id in ["listens", "sleeps"] {
        world.cli().wait_for_state(id, "Offloaded")?;
    }
    // A connection before the controller's first check has no effect, so the test connects
    // repeatedly until the container is prewoken.
    until("the connection to prewake the container", || {
        connect(&world, "sleeps")?;
        connect(&world, "listens")?;
        let row = world.cli().known("listens")?;
        Ok((row.restores == 1 && row.reason == "connection").then_some(()))
    })?;
    assert!(listens.verify()?);
    until("an event about the call", || Ok((told(&world, "prewake")? == 1).then_some(())))?;
    let row = world.cli().known("sleeps")?;
    assert_eq!((row.state.as_str(), row.restores), ("Offloaded", 0), "{row:?}");
    assert!(sleeps.verify()?);
    Ok(())
}
