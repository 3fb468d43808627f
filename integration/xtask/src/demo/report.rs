//! The result of the demo, which is printed as one JSON object or as a few lines.

use std::{process::Command, time::Duration};

use affinode_e2e::{
    cli::EventRow,
    testbed::{MIB, Testbed},
};
use anyhow::{Context, Result};
use serde::Serialize;

use super::scenario::Seen;
use crate::{output, sh};

/// The report of the demo. Sizes are in bytes, times in milliseconds.
#[derive(Serialize)]
pub struct Report {
    gpu: String,
    gpu_name: String,
    containerd: String,
    runc: String,
    vram_total_bytes: u64,
    vram_wanted_bytes: u64,
    vram_freed_bytes: u64,
    offload_ms: u64,
    wake_ms: u64,
    /// Whether every byte of both containers was unchanged.
    pub contents_verified: bool,
    elapsed_ms: u128,
    transitions: Vec<Transition>,
}

#[derive(Serialize)]
struct Transition {
    unix_ms: i64,
    container: String,
    from: String,
    to: String,
    reason: String,
    bytes: u64,
    elapsed_ms: u64,
}

impl Report {
    /// Builds the report from the data that the demo recorded.
    ///
    /// # Errors
    /// When no event reports an offload that moved memory, or no event reports such a wake. The
    /// duration of the move is then unknown.
    pub fn new(world: &Testbed, seen: &Seen, elapsed: Duration) -> Result<Self> {
        let runc = sh::read(Command::new("runc").arg("--version")).unwrap_or_default();
        Ok(Self {
            gpu: world.gpu().as_str().into(),
            gpu_name: seen.gpu.name.clone(),
            containerd: world.containerd().release().version.clone(),
            runc: runc.split_whitespace().nth(2).unwrap_or("unknown").into(),
            vram_total_bytes: seen.gpu.vram_total_bytes,
            vram_wanted_bytes: 2 * seen.each_bytes,
            vram_freed_bytes: seen.freed_bytes,
            offload_ms: first_move_ms(&seen.events, "Offloaded")?,
            wake_ms: first_move_ms(&seen.events, "Active")?,
            contents_verified: seen.verified,
            elapsed_ms: elapsed.as_millis(),
            transitions: seen
                .events
                .iter()
                .map(|event| Transition {
                    unix_ms: event.unix_ms,
                    container: event.container.clone(),
                    from: event.from.clone(),
                    to: event.to.clone(),
                    reason: event.reason.clone(),
                    bytes: event.bytes,
                    elapsed_ms: event.elapsed_ms,
                })
                .collect(),
        })
    }

    pub fn print(&self, json: bool) -> Result<()> {
        if json {
            output::out(&serde_json::to_string_pretty(self)?);
            return Ok(());
        }
        let verdict = if self.contents_verified { "identical" } else { "DIFFERENT" };
        output::out("");
        output::out(&format!("  GPU              {} ({})", self.gpu_name, self.gpu));
        output::out(&format!("  containerd, runc {}, {}", self.containerd, self.runc));
        output::out(&format!(
            "  VRAM             {} MiB, wanted {} MiB",
            self.vram_total_bytes / MIB,
            self.vram_wanted_bytes / MIB
        ));
        output::out(&format!(
            "  freed            {} MiB in {} ms",
            self.vram_freed_bytes / MIB,
            self.offload_ms
        ));
        output::out(&format!("  wake             {} ms", self.wake_ms));
        output::out(&format!("  contents         {verdict} after the restore, in both containers"));
        output::out(&format!("  took             {:.1} s", self.elapsed_ms as f64 / 1000.0));
        Ok(())
    }
}

/// Returns the duration, in milliseconds, of the first move that ended in the state `to` and moved
/// memory.
fn first_move_ms(events: &[EventRow], to: &str) -> Result<u64> {
    let moved = |event: &&EventRow| event.to == to && event.bytes > 0;
    let event = events.iter().find(moved);
    event
        .map(|event| event.elapsed_ms)
        .with_context(|| format!("the controller recorded no move to the state {to}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn move_without_bytes_has_no_time() -> Result<()> {
        let event = |to: &str, bytes, elapsed_ms| EventRow {
            to: to.into(),
            bytes,
            elapsed_ms,
            ..EventRow::default()
        };
        let events = [event("Active", 0, 3), event("Offloaded", 8, 5), event("Offloaded", 8, 7)];
        assert_eq!(first_move_ms(&events, "Offloaded")?, 5);
        assert!(first_move_ms(&events, "Active").is_err());
        Ok(())
    }
}
