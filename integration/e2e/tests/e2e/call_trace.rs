//! Tests of the call trace, which records the CUDA calls of processes.

use std::{fs::File, path::PathBuf, process::Child};

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    worker::Worker,
};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{offload::MANUAL, recovery::shoot_controller};

#[derive(Debug, Deserialize)]
struct Batch {
    processes: Vec<Process>,
}

#[derive(Debug, Deserialize)]
struct Process {
    container: String,
    calls: u64,
    one_in: u32,
    functions: Vec<Function>,
    recorded: Vec<Recorded>,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    calls: u64,
    total_ns: u64,
}

#[derive(Debug, Deserialize)]
struct Recorded {
    name: String,
}

/// The command `affinode calls`, running in the background. It writes to a file, because it would
/// block on a pipe that the test does not read yet.
struct Watch {
    child: Child,
    output: PathBuf,
}

fn watch(world: &Testbed, arguments: &[&str]) -> Result<Watch> {
    let output = world.dir().join("calls.json");
    let mut command = world.cli().command(&["calls", "-o", "json"]);
    let child = command.args(arguments).stdout(File::create(&output)?).spawn()?;
    Ok(Watch { child, output })
}

/// Makes calls with the worker until `affinode calls` ends. Returns the processes and functions
/// that the call trace recorded.
fn seen(mut watch: Watch, worker: &mut Worker) -> Result<Vec<Process>> {
    let status = loop {
        worker.call("streamsync")?;
        if let Some(status) = watch.child.try_wait()? {
            break status;
        }
    };
    ensure!(status.success(), "affinode calls: {status}");
    let text = std::fs::read_to_string(&watch.output)?;
    let batches: Result<Vec<Batch>, _> = text.lines().map(serde_json::from_str).collect();
    Ok(batches?.into_iter().flat_map(|batch| batch.processes).collect())
}

#[test]
fn call_trace_names_functions_of_one_container() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut busy = Worker::start(&world, "busy", 32)?;
    let mut other = Worker::start(&world, "other", 32)?;
    let processes = seen(watch(&world, &["busy", "--once", "2"])?, &mut busy)?;
    other.call("streamsync")?;
    assert!(!processes.is_empty());
    for process in &processes {
        assert!(process.container.ends_with("busy") && process.one_in > 0, "{process:?}");
        assert!(process.calls > 0, "{process:?}");
    }
    let functions = || processes.iter().flat_map(|p| &p.functions);
    let sync = functions().find(|f| f.name.starts_with("cuStreamSynchronize"));
    let sync = sync.with_context(|| format!("no recorded call matches: {processes:?}"))?;
    assert!(sync.calls > 0 && sync.total_ns > 0, "{sync:?}");
    let filtered = watch(&world, &["busy", "--once", "2", "--filter", "Memcpy"])?;
    let filtered = seen(filtered, &mut busy)?;
    let wrong: Vec<_> =
        filtered.iter().flat_map(|p| &p.recorded).filter(|r| !r.name.contains("Memcpy")).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    Ok(())
}

#[test]
fn call_trace_survives_offload_and_restart() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "worker", 32)?;
    let mut everything = watch(&world, &[])?;
    world.cli().move_out("worker")?;
    assert!(worker.verify()?, "watched, moved, back");
    everything.child.kill()?;
    everything.child.wait()?;
    shoot_controller(&world)?;
    world.cli().wait_for_state("worker", "Idle")?;
    let processes = seen(watch(&world, &["worker", "--once", "2"])?, &mut worker)?;
    assert!(processes.iter().any(|p| !p.recorded.is_empty()), "{processes:?}");
    Ok(())
}

#[test]
fn unknown_container_is_an_error_with_advice() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let _worker = Worker::start(&world, "worker", 32)?;
    world.cli().known("worker")?;
    let output = world.cli().output(&["calls", "missing", "--once"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("affinode ps"), "{said}");
    Ok(())
}
