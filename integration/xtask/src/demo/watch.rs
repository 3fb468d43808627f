//! A live table with one row for each change of state, from `affinode events --follow`.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use affinode_e2e::{
    cli::{Cli, EventRow},
    testbed::{MIB, Testbed},
    wait::until,
};
use anyhow::{Context, Result, anyhow};

use crate::output;

/// A running `affinode events --follow`, whose events are printed as rows of a table.
pub struct Watch {
    child: Child,
    /// Sequence number of the last event that was printed.
    shown: Arc<AtomicU64>,
    reader: JoinHandle<Vec<EventRow>>,
}

impl Watch {
    /// Starts the command, and prints the head of the table.
    pub fn start(world: &Testbed, quiet: bool) -> Result<Self> {
        let mut command = world.cli().command(&["events", "--follow", "-o", "json"]);
        let mut child =
            command.stdout(Stdio::piped()).spawn().context("cannot run affinode events")?;
        let lines = BufReader::new(child.stdout.take().context("the process has no pipe")?).lines();
        let cli = world.cli().clone();
        if !quiet {
            output::out(&format!(
                "  {:>8}  {:<8} {:<12} {:>12}  ",
                "TIME", "CONTAINER", "STATE", "VRAM IN USE"
            ));
        }
        let shown = Arc::new(AtomicU64::new(0));
        let last = Arc::clone(&shown);
        let reader = std::thread::spawn(move || {
            let mut events: Vec<EventRow> = Vec::new();
            for line in lines.map_while(Result::ok) {
                let Ok(event) = serde_json::from_str::<EventRow>(&line) else {
                    continue;
                };
                let sequence = event.sequence;
                if event.kind == "state" {
                    let began_unix_ms = events.first().unwrap_or(&event).unix_ms;
                    if !quiet {
                        output::out(&row(&event, began_unix_ms, &cli));
                    }
                    events.push(event);
                }
                last.store(sequence, Ordering::Release);
            }
            events
        });
        Ok(Self { child, shown, reader })
    }

    /// Waits until every event so far was printed, and ends the command. Returns all events.
    pub fn finish(mut self, world: &Testbed) -> Result<Vec<EventRow>> {
        let last = world.cli().events()?.last().map_or(0, |event| event.sequence);
        until("the last rows of the table", || {
            Ok((self.shown.load(Ordering::Acquire) >= last).then_some(()))
        })?;
        self.child.kill()?;
        self.child.wait()?;
        self.reader.join().map_err(|_| anyhow!("the table's thread panicked"))
    }
}

fn row(event: &EventRow, began_unix_ms: i64, cli: &Cli) -> String {
    let seconds = (event.unix_ms - began_unix_ms) as f64 / 1000.0;
    let name = event.container.rsplit('/').next().unwrap_or_default();
    // VRAM in use is the sum over the containers, because the GPU's own figure is a sample that may
    // be older than the event.
    let used = cli.ps().ok().map(|node| node.containers.iter().map(|c| c.vram_bytes).sum::<u64>());
    let used = used.map_or_else(|| "-".into(), |bytes| format!("{} MiB", bytes / MIB));
    let state = event.to.to_uppercase();
    let note = match (event.to.as_str(), event.bytes / MIB, event.elapsed_ms) {
        ("Offloaded", mib, ms) if mib > 0 => format!("{mib} MiB offloaded in {ms} ms"),
        ("Active", mib, ms) if mib > 0 => format!("{mib} MiB restored in {ms} ms"),
        _ => event.reason.clone(),
    };
    format!("  {seconds:>7.2}s  {name:<9} {state:<12} {used:>12}  {note}")
}
