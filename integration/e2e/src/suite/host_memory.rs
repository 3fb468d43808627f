//! Torch containers that work in bursts and together need more VRAM than the GPU has. Their
//! offloads together need more host memory than the node has. No container may be killed, and all
//! results must be correct. The configuration is the default.
//!
//! This part is for a machine with 140 GiB of VRAM and about 128 GiB of host memory.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{
    Report, median,
    python::{Python, ask_within},
    report::Rows,
};
use crate::{
    gpu::Gpu,
    memory_cgroup::meminfo_bytes,
    release::Release,
    testbed::{Testbed, TestbedConfig},
    worker::Worker,
};

const PROGRAM: [&str; 2] = ["torch_worker.py", "inference"];
const ENGINES: [&str; 3] = ["auto", "full", "checkpoint"];
/// Groups of containers: the number of containers, and the GiB of VRAM of each container.
const CROWDS: [(usize, u64); 2] = [(6, 28), (8, 24)];
/// Number of rounds. In each round a container pauses and then works in a burst.
const ROUNDS: usize = 3;
const PAUSE: Duration = Duration::from_secs(5);
/// Maximum time that a container waits for free VRAM.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// Runs each group of containers with each engine. Each run has a name, such as
/// `6 of 28 GiB, auto`. If `wanted` is not empty, only runs whose names contain one of its words
/// are started.
///
/// # Errors
/// When no testbed can be created.
pub fn oversubscribed(release: &Release, gpu: Gpu, wanted: &[&str]) -> Result<Report> {
    let recipe = || TestbedConfig::default().release(release).gpu(gpu.clone()).default_engine();
    let mut report = Report::new(&recipe().world()?, wanted);
    for engine in ENGINES {
        for (containers, gib) in CROWDS {
            let part = format!("{containers} of {gib} GiB, {engine}");
            if !report.wants(&part) {
                continue;
            }
            let world = recipe().world()?;
            match Python::find(&world) {
                Ok(python) => report.part(&world, &part, |_, rows| {
                    let annotations = &[("affinode.io/engine", engine)];
                    run(&python, &Load { containers, gib, annotations }, rows)
                }),
                Err(why) => report.skip(&part, &format!("{why:#}")),
            }
            world.keep_logs();
        }
    }
    Ok(report)
}

/// A group of containers that work in bursts.
pub(super) struct Load<'a> {
    pub containers: usize,
    /// VRAM that each container fills, in GiB.
    pub gib: u64,
    /// Annotations of the containers besides `affinode.io/on-oom`.
    pub annotations: &'a [(&'a str, &'a str)],
}

/// Runs the containers of `load` at the same time, and adds rows with their results.
///
/// # Errors
/// When a container fails. The rows are complete nevertheless.
pub(super) fn run(python: &Python, load: &Load, rows: &mut Rows) -> Result<()> {
    let is_over = AtomicBool::new(false);
    let began = Instant::now();
    let (ended, least_available) = thread::scope(|scope| {
        let watch = scope.spawn(|| least_available_bytes(&is_over));
        let busy: Vec<_> =
            (0..load.containers).map(|n| scope.spawn(move || bursts(python, load, n))).collect();
        let ended: Vec<_> = busy.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Ordering::Release);
        (ended, watch.join())
    });
    keep_events(python.world)?;
    let (mut waits, mut same, mut offloads, mut whys) = (Vec::new(), 0, 0, Vec::new());
    for outcome in ended {
        match outcome {
            Ok(Ok(found)) => {
                same += usize::from(found.is_same);
                offloads += found.offloads;
                waits.extend(found.waits_ms);
            }
            Ok(Err(why)) => whys.push(format!("{why:#}")),
            Err(_) => whys.push("its thread panicked".into()),
        }
    }
    let containers = load.containers;
    rows.count("containers that lived to the end", containers - whys.len(), containers);
    rows.count("containers whose sums are as before", same, containers);
    rows.tell("wait for a turn, median", median(&waits), "ms");
    rows.tell("wait for a turn, longest", waits.iter().copied().fold(0.0, f64::max), "ms");
    let least = least_available.unwrap_or(0);
    rows.tell("host memory available, least", least as f64 / f64::from(1 << 30), "GiB");
    rows.tell("offloads", offloads as f64, "times");
    rows.tell("took", began.elapsed().as_secs_f64(), "s");
    if !whys.is_empty() {
        bail!("{}", whys.join("; "));
    }
    Ok(())
}

/// Results of one container: whether its contents were the same after each burst, the time that
/// each burst waited for the container's restore, and the number of its offloads.
struct BurstsFound {
    is_same: bool,
    waits_ms: Vec<f64>,
    offloads: u64,
}

fn bursts(python: &Python, load: &Load, number: usize) -> Result<BurstsFound> {
    let (world, id) = (python.world, format!("load-{number}"));
    let mut spec = python
        .spec(&id, "root", &PROGRAM)?
        .annotation("affinode.io/on-oom", "wait")
        .annotation("affinode.io/on-oom-timeout", "5m");
    for (name, value) in load.annotations {
        spec = spec.annotation(name, value);
    }
    let mut worker = Worker::start_as(world, spec)?;
    if let Some(why) = python.greet(&mut worker, &PROGRAM)? {
        bail!("{id}: the program cannot run here: {why}");
    }
    let mut ask = |command: &str| {
        ask_within(&mut worker, command, MAX_WAIT)
            .with_context(|| format!("container {id}: the command {command} failed"))
    };
    ask(&format!("hold {}", load.gib))?;
    let before = ask("check")?.digest()?;
    let (mut is_same, mut waits_ms) = (true, Vec::new());
    for _ in 0..ROUNDS {
        // The pause imitates a person who reads the last result.
        thread::sleep(PAUSE);
        let asked = Instant::now();
        ask("sync")?;
        waits_ms.push(asked.elapsed().as_secs_f64() * 1_000.0);
        is_same &= ask("check")?.digest()? == before;
    }
    let offloads = world.cli().known(&id)?.offloads;
    worker.running.kill(world)?;
    worker.running.delete(world)?;
    Ok(BurstsFound { is_same, waits_ms, offloads })
}

/// Writes the events of the run to the testbed's logs, which show what each wait was for.
fn keep_events(world: &Testbed) -> Result<()> {
    let events = world.cli().run(&["events", "-o", "json"])?;
    let path = world.dir().join("events.log");
    std::fs::write(&path, events).with_context(|| format!("cannot write {}", path.display()))
}

fn least_available_bytes(is_over: &AtomicBool) -> u64 {
    let mut least = u64::MAX;
    while !is_over.load(Ordering::Acquire) {
        least = least.min(meminfo_bytes("MemAvailable:").unwrap_or(u64::MAX));
        thread::sleep(Duration::from_millis(50));
    }
    least
}
