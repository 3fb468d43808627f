//! Test of the state file, in which a container's programs can read the state of their GPU memory.

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result};
use serde_json::Value;

use crate::offload::MANUAL;

/// Waits until the state file in the container shows this state, and returns its content.
fn wait_for_state(world: &Testbed, worker: &Worker, state: &str) -> Result<Value> {
    until(&format!("the state {state} in the file"), || {
        let Ok(text) = worker.running.exec(world, &["/bin/cat", "/.affinode/run/state"]) else {
            return Ok(None);
        };
        let text = text.lines().next().context("the state file is empty")?;
        let file: Value = serde_json::from_str(text)
            .with_context(|| format!("the state file is not valid JSON: {text:?}"))?;
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

/// The documented startup file for IPython, which reads the state file.
const FOR_IPYTHON: &str = include_str!("../../../../config/jupyterhub/affinode.py");

#[test]
fn python_program_shows_its_container_state() -> Result<()> {
    if !std::path::Path::new("/usr/bin/python3").is_file() {
        affinode_test_notes::skip("python3", "no python3 on this machine, so none in the image");
        return Ok(());
    }
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    let shown = |worker: &Worker, text: &str| {
        until(&format!("the text {text}"), || {
            let said = worker.running.exec(&world, &["/usr/bin/python3", "-c", FOR_IPYTHON])?;
            Ok(said.contains(text).then_some(()))
        })
    };
    shown(&worker, "GPU memory: on the GPU, idle, for ")?;
    world.cli().move_out("worker")?;
    shown(&worker, "GPU memory: in host memory; the next CUDA call restores it, for ")?;
    assert!(worker.verify()?);
    shown(&worker, "GPU memory: on the GPU, ")
}
