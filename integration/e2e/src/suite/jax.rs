//! Tests of JAX. One test offloads a JAX program with each engine. Another test lists the CUDA
//! calls that JAX makes while it is idle.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{
    BY_ORDER,
    python::{Python, step},
    repeated_offload::{Flavour, STEPS},
    report::Rows,
};
use crate::worker::Worker;

const JAX: &[&str] = &["jax_worker.py"];
/// Fraction of the device's VRAM that JAX allocates at its start.
const SHARE: (&str, &str) = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2");
/// Restricts JAX to one GPU. With several GPUs, JAX enables peer access between them.
const ONE_GPU: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "0");
/// Description of JAX's training program, for the test that offloads a program with each engine.
pub const ENGINES: Flavour = Flavour { settings: &[SHARE, ONE_GPU], ..Flavour::large("jax", JAX) };
/// Time for which calls are recorded, in seconds. An idle JAX makes calls every five seconds.
const SECONDS: &str = "12";

/// One sample of the call trace, parsed from a line of `affinode calls -o json`.
#[derive(Deserialize)]
struct Batch {
    processes: Vec<Process>,
}

#[derive(Deserialize)]
struct Process {
    calls: u64,
    one_in: u32,
    dropped: u64,
    functions: Vec<Function>,
    recorded: Vec<Call>,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    calls: u64,
}

#[derive(Deserialize)]
struct Call {
    name: String,
    thread: u32,
}

/// The recorded calls of one CUDA function.
#[derive(Default)]
struct Seen {
    calls: u64,
    /// Number of samples of the call trace that contained calls of this function. There are five
    /// samples a second.
    moments: u64,
    threads: Vec<u32>,
}

/// Runs JAX's training, then leaves it idle. Prints the name of every CUDA function that it calls
/// while idle.
pub fn calls_while_idle(python: &Python, rows: &mut Rows) -> Result<()> {
    let world = python.world;
    let id = "jax-idle";
    let spec = python.spec(id, "root", JAX)?.annotation(BY_ORDER.0, BY_ORDER.1);
    let mut worker = Worker::start_as(world, spec.env(SHARE.0, SHARE.1))?;
    worker.expect("ready")?;
    step(&mut worker, STEPS)?;
    let text = world.cli().run(&["calls", id, "--once", SECONDS, "-o", "json"])?;
    tell(&text, rows)?;
    worker.running.kill(world)?;
    worker.running.delete(world)
}

fn tell(text: &str, rows: &mut Rows) -> Result<()> {
    let (mut all, mut dropped, mut one_in) = (0, 0, 0);
    let mut functions: BTreeMap<String, Seen> = BTreeMap::new();
    for line in text.lines() {
        let batch: Batch =
            serde_json::from_str(line).context("cannot parse a line of affinode calls")?;
        for process in batch.processes {
            all += process.calls;
            dropped += process.dropped;
            one_in = one_in.max(process.one_in);
            for function in process.functions {
                let seen = functions.entry(function.name).or_default();
                seen.calls += function.calls;
                seen.moments += 1;
            }
            for call in process.recorded {
                let threads = &mut functions.entry(call.name).or_default().threads;
                if !threads.contains(&call.thread) {
                    threads.push(call.thread);
                }
            }
        }
    }
    rows.tell(&format!("calls in {SECONDS} s"), all as f64, "");
    rows.tell("of them recorded: one in", f64::from(one_in), "");
    rows.tell("of them lost", dropped as f64, "");
    for (name, seen) in functions {
        rows.tell(&name, seen.calls as f64, "calls");
        rows.tell(&format!("{name}: number of moments"), seen.moments as f64, "");
        rows.tell(&format!("{name}: number of threads"), seen.threads.len() as f64, "");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_summed_by_name() {
        let line = |calls: u64| {
            format!(
                r#"{{"processes":[{{"calls":{calls},"one_in":1,"dropped":0,
                "functions":[{{"name":"cuStreamQuery","calls":{calls}}}],
                "recorded":[{{"name":"cuStreamQuery","thread":7}}]}}]}}"#
            )
            .replace('\n', "")
        };
        let mut rows = Rows::default();
        tell(&format!("{}\n{}\n", line(22), line(44)), &mut rows).unwrap();
        let figures: Vec<f64> = rows.values().collect();
        assert_eq!(figures, [66.0, 1.0, 0.0, 66.0, 2.0, 1.0]);
    }
}
