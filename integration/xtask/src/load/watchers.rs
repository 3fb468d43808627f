//! Watchers that read the node's event streams, as a browser with the dashboard does.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// Maximum time until a watcher must have received a change.
const GUARD: Duration = Duration::from_secs(10);

/// A reader of one event stream. It records each line with its arrival time.
pub struct Watcher {
    lines: Receiver<(Instant, String)>,
    stream: UnixStream,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Opens this many event streams, and waits until each has begun.
pub fn open(socket: &Path, path: &str, count: usize) -> Result<Vec<Watcher>> {
    (0..count)
        .map(|_| {
            let mut stream = UnixStream::connect(socket)?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
            let (sender, lines) = mpsc::channel();
            let reader = BufReader::new(stream.try_clone()?);
            std::thread::spawn(move || {
                for line in reader.lines().map_while(Result::ok) {
                    if sender.send((Instant::now(), line)).is_err() {
                        return;
                    }
                }
            });
            let watcher = Watcher { lines, stream };
            watcher.wait_for("retry: ")?;
            Ok(watcher)
        })
        .collect()
}

impl Watcher {
    /// Waits for the next line that contains this text. Returns the time at which it arrived.
    fn wait_for(&self, text: &str) -> Result<Instant> {
        loop {
            let (when, line) = self.lines.recv_timeout(GUARD).with_context(|| text.to_owned())?;
            if line.contains(text) {
                return Ok(when);
            }
        }
    }
}

/// Pins `changes` containers one after the other. Returns, for each pin and each watcher, the time
/// in milliseconds until the watcher has received the change.
pub fn time_changes(
    socket: &Path,
    watchers: &[Watcher],
    keys: &[String],
    changes: usize,
) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for key in keys.iter().take(changes) {
        let asked = Instant::now();
        post(socket, &format!("/api/v1/containers/{key}/pin"))?;
        for watcher in watchers {
            let shown = loop {
                let (when, line) =
                    watcher.lines.recv_timeout(GUARD).context("the watcher received no change")?;
                if line.starts_with("data: {\"node\":") && line.contains(key) && when > asked {
                    break when;
                }
            };
            times.push((shown - asked).as_secs_f64() * 1000.0);
        }
    }
    Ok(times)
}

fn post(socket: &Path, path: &str) -> Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{path}: expected status 200, got {answer}");
    Ok(())
}
