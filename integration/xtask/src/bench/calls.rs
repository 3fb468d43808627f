//! Measures how much longer a hooked driver call takes than a direct call.
//!
//! This module runs the preload library's own benchmark. In the benchmark, a test library replaces
//! libcuda. The test library's function returns immediately, so only the hook is measured. No
//! container is needed.

use std::{
    io::{Read, Write},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::{Artifacts, target_dir, workspace_dir};
use affinode_proto::{
    paths::AGENT_SOCKET_ENV,
    wire::message::{ControllerMessage, FRAME_BYTES},
};
use anyhow::{Context, Result};
use serde::Deserialize;

use super::{
    Figure,
    stats::{median, noise},
};
use crate::sh;

/// Arguments of the benchmark: millions of calls per round, and number of rounds.
const CALLS: [&str; 2] = ["2", "21"];

#[derive(Deserialize)]
struct Cost {
    ns_per_call_median: f64,
}

/// Measures the time of a call with one thread and with eight threads.
pub fn measure(artifacts: &Artifacts) -> Result<Vec<Figure>> {
    let folder = target_dir().join("affinode/bench");
    std::fs::create_dir_all(&folder)?;
    let sources = workspace_dir().join("preload/tests/programs");
    let program = folder.join("bench_call");
    let gcc = || Command::new("gcc");
    sh::run(
        gcc()
            .args(["-O2", "-pthread", "-o"])
            .arg(&program)
            .arg(sources.join("bench_call.c"))
            .arg("-ldl"),
    )?;
    let driver = folder.join("libcuda.so.1");
    sh::run(
        gcc().args(["-O2", "-shared", "-fPIC", "-o"]).arg(&driver).arg(sources.join("stub_cuda.c")),
    )?;
    let library = artifacts.lib_dir().join("libaffinode_preload.so");
    let mut figures = Vec::new();
    for (threads, name, goal, limit_ns) in [
        ("1", "hooked call, 1 thread", "at most 10 ns more", 10.0),
        ("8", "hooked call, 8 threads", "at most 15 ns more", 15.0),
    ] {
        let run = |library| ns_per_call(&program, &folder, threads, library);
        let (without, with, noise) = in_turn(|| run(None), || run(Some((&library, None))))?;
        figures.push(Figure {
            name,
            unit: "ns",
            without,
            with,
            noise,
            goal,
            met: with - without <= limit_ns,
            method: format!(
                "a driver function that returns at once, {} million calls a round, median of {} rounds, mean over \
                 threads; median of {STARTS} starts of each side in turn",
                CALLS[0], CALLS[1]
            ),
        });
    }
    let socket = watch(&folder)?;
    let run = |socket| ns_per_call(&program, &folder, "1", Some((&library, socket)));
    let (without, with, noise) = in_turn(|| run(None), || run(Some(&socket)))?;
    figures.push(Figure {
        name: "watched call beside a hooked one",
        unit: "ns",
        without,
        with,
        noise,
        goal: "at most 2 ns more",
        met: with - without <= 2.0,
        method: "as for a hooked call, while a sample of the calls is recorded, as `affinode calls` requests it".into(),
    });
    Ok(figures)
}

/// Number of times that the benchmark is started with the library, and number of times without it.
/// Several starts are measured because the speed differs between starts.
const STARTS: usize = 6;

/// Runs the benchmark without and with the library in turn, `STARTS` times each. Returns the median
/// of each side, and the noise of the side without the library.
fn in_turn(
    without: impl Fn() -> Result<f64>,
    with: impl Fn() -> Result<f64>,
) -> Result<(f64, f64, f64)> {
    let (mut stock, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        stock.push(without()?);
        ours.push(with()?);
    }
    Ok((median(&stock), median(&ours), noise(&stock)))
}

/// Starts a fake controller, which does nothing but request that the library records a sample of
/// the calls. Returns the path of the controller's socket.
fn watch(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("agent.sock");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    std::thread::spawn(move || -> std::io::Result<()> {
        loop {
            let (mut agent, _) = listener.accept()?;
            agent.read_exact(&mut [0; FRAME_BYTES])?;
            let engine = affinode_proto::wire::Engine::Checkpoint;
            let welcome = ControllerMessage::Welcome {
                process: 1,
                wait_for_room_ms: 0,
                engine,
                vram_limit_bytes: 0,
            };
            // A real controller requests about this sampling rate from a process that makes as many
            // calls as the benchmark. The read position is set high enough that the ring never
            // fills.
            let watch = ControllerMessage::SampleCalls { one_in: 1_000_000, read: 1 << 60 };
            let _ = agent.write_all(&[welcome.encode(), watch.encode()].concat());
            // Reads until the process ends.
            let _ = agent.read(&mut [0; 1]);
        }
    });
    Ok(path)
}

fn ns_per_call(
    program: &Path,
    driver: &Path,
    threads: &str,
    library: Option<(&Path, Option<&Path>)>,
) -> Result<f64> {
    let mut command = Command::new(program);
    command.arg(threads).args(CALLS).env("LD_LIBRARY_PATH", driver);
    if let Some((library, socket)) = library {
        command.env("LD_PRELOAD", library);
        command.envs(socket.map(|socket| (AGENT_SOCKET_ENV, socket)));
    }
    let text = sh::read(&mut command)?;
    let cost: Cost = serde_json::from_str(&text)
        .with_context(|| format!("cannot parse the output of bench_call: {text}"))?;
    Ok(cost.ns_per_call_median)
}
