//! Records the stream of events that the dashboard reads, on a node with working containers. `cargo
//! xtask browser --recorded FILE` replays the recording later, on a machine with a browser.

use std::{
    io::{BufRead, BufReader, Read, Write, copy},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::{BY_ORDER, engines::ENGINE};
use crate::{
    gpu::Gpu,
    testbed::Testbed,
    worker::{USUAL, Worker},
};

/// Length of the recording in seconds.
const SECONDS: u64 = 45;
/// Maximum size of a recording in bytes.
const MAX_BYTES: u64 = 8 << 20;
/// Name of the container that is offloaded in the recording.
const OFFLOADED: &str = "notebook";
/// Name of the container that is resident and idle in the recording.
const WAITING: &str = "model-server";
const AT_WORK: &str = "training";

/// A piece of the recorded stream, and the time at which it arrived.
#[derive(Serialize)]
struct Part {
    ms: u64,
    text: String,
}

/// Starts three containers: one trains, one is offloaded, one is idle and stays resident. Writes
/// the dashboard's stream of events to `dashboard.jsonl` in `folder`. Also writes the timeline of
/// the training container and the node's report to this folder.
///
/// # Errors
/// When a container does not start or the controller does not reply.
pub fn record(world: &Testbed, folder: &Path) -> Result<Vec<PathBuf>> {
    let mib = |real| if matches!(world.gpu(), Gpu::Real) { real } else { real / 64 };
    let start = |id: &str, mib: u64, notes: &[(&str, &str)]| -> Result<Worker> {
        let spec = notes
            .iter()
            .fold(Worker::spec(id, USUAL, mib), |spec, (name, value)| spec.annotation(name, value));
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        Ok(worker)
    };
    let _offloaded = start(OFFLOADED, mib(24 << 10), &[(ENGINE, "full")])?;
    let _waiting = start(WAITING, mib(16 << 10), &[BY_ORDER])?;
    let mut at_work = start(AT_WORK, mib(8 << 10), &[BY_ORDER])?;
    world.cli().wait_for_state(OFFLOADED, "Offloaded")?;

    let (over, goes_on) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let trains = scope.spawn(move || -> Result<()> {
            // A step starts at fixed intervals. GPU work takes only part of an interval.
            while goes_on.recv_timeout(Duration::from_millis(40)) == Err(RecvTimeoutError::Timeout)
            {
                at_work.call("spin 60")?;
                at_work.call("sync")?;
            }
            Ok(())
        });
        let recorded = stream(world, &folder.join("dashboard.jsonl"));
        drop(over);
        trains.join().map_err(|_| anyhow::anyhow!("the thread that trains panicked"))??;
        recorded
    })?;

    let row = world
        .cli()
        .container(AT_WORK)?
        .context("the controller does not list the training container")?;
    let mut files = vec![folder.join("dashboard.jsonl")];
    let history = format!("/api/v1/history?key={}", row.key);
    for (what, path) in [("history", history.as_str()), ("report", "/api/v1/report")] {
        let file = folder.join(format!("dashboard-{what}.json"));
        copy(&mut get(world, path)?.take(MAX_BYTES), &mut std::fs::File::create(&file)?)?;
        files.push(file);
    }
    Ok(files)
}

/// Records the dashboard's stream of events for [`SECONDS`], with the arrival time of each event.
fn stream(world: &Testbed, to: &Path) -> Result<()> {
    let mut file =
        std::fs::File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
    let mut reply = get(world, "/api/v1/events?watch=node")?;
    let began = Instant::now();
    let mut written = 0;
    while began.elapsed().as_secs() < SECONDS {
        let mut text = String::new();
        while !text.ends_with("\n\n") {
            ensure!(
                reply.read_line(&mut text)? > 0,
                "the event stream ended before the recording was complete"
            );
        }
        let ms = began.elapsed().as_millis() as u64;
        let mut line = serde_json::to_vec(&Part { ms, text })?;
        line.push(b'\n');
        written += line.len() as u64;
        ensure!(written < MAX_BYTES, "the event stream exceeds {MAX_BYTES} bytes");
        file.write_all(&line)?;
    }
    Ok(())
}

/// Requests a path from the testbed's controller through its socket, and returns the body of the
/// response. The request uses HTTP 1.0, so the body is not chunked.
fn get(world: &Testbed, path: &str) -> Result<BufReader<UnixStream>> {
    let socket = world.cli().run_dir().join("http.sock");
    let mut stream = UnixStream::connect(&socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut reply = BufReader::new(stream);
    let mut line = String::new();
    reply.read_line(&mut line)?;
    ensure!(line.contains(" 200 "), "GET {path}: expected status 200, got {line}");
    while line != "\r\n" {
        line.clear();
        ensure!(reply.read_line(&mut line)? > 0, "GET {path}: the response has no body");
    }
    Ok(reply)
}
