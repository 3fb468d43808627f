//! The file in which a container's programs read the state of their GPU memory.

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result};
use serde_json::Value;

use crate::offload::MANUAL;

/// The content of the file, as soon as it shows this state.
fn wait_for_state(world: &Testbed, worker: &Worker, state: &str) -> Result<Value> {
    until(&format!("the state {state} in the file"), || {
        let Ok(text) = worker.running.exec(world, &["/bin/cat", "/.affinode/run/state"]) else {
            return Ok(None);
        };
        let text = text.lines().next().context("the file is empty")?;
        let file: Value =
            serde_json::from_str(text).with_context(|| format!("the file has {text:?}"))?;
        Ok((file["state"] == state).then_some(file))
    })
}

#[test]
fn container_reads_its_own_state() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    assert!(worker.verify()?);
    let resident = wait_for_state(&world, &worker, "Idle")?;
    world.cli().move_out("worker")?;
    let offloaded = wait_for_state(&world, &worker, "Offloaded")?;
    assert_eq!(offloaded["reason"], "requested", "{offloaded}");
    assert_eq!(offloaded["waiters_before"], Value::Null);
    let since = |file: &Value| file["since_unix_ms"].as_i64().context("the state has no time");
    assert!(since(&resident)? > 1_600_000_000_000 && since(&offloaded)? >= since(&resident)?);
    assert!(worker.verify()?);
    wait_for_state(&world, &worker, "Idle")?;
    Ok(())
}
