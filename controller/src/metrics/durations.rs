//! Measures the durations of moves and waits from the state changes of containers.
//!
//! ```text
//!  Queued ──wait──> Restoring ──restore──> Active      wake latency, from the event
//!  Closing … Offloaded: duration of the offload, from the event
//! ```

use std::collections::HashMap;

use super::table::MetricsTable;
use crate::schema::Event;

/// Maximum number of containers whose queueing and restore are measured at the same time.
const MAX_RESTORING: usize = 10_000;

/// Measures moves: stores the time at which each queued or restoring container entered its state.
#[derive(Debug, Default)]
pub struct MoveDurations {
    since_ms: HashMap<String, i64>,
}

impl MoveDurations {
    /// Measures the move or wait that ended with this state change, and adds it to the metrics.
    pub fn event(&mut self, event: &Event, table: &MetricsTable) {
        let seconds = |ms: i64| {
            #[allow(clippy::cast_precision_loss)] // Durations.
            let seconds = ms.max(0) as f64 / 1000.0;
            seconds
        };
        let elapsed = seconds(i64::try_from(event.elapsed_ms).unwrap_or(i64::MAX));
        #[allow(clippy::cast_precision_loss)] // Sizes below 2^53.
        let bytes = event.bytes as f64;
        let entered = self.since_ms.remove(&event.key);
        let passed = entered.map(|since| seconds(event.unix_ms - since));
        match (event.from.as_str(), event.to.as_str()) {
            (_, "Offloaded") if event.bytes > 0 => {
                table.moves.offload_seconds.observe(elapsed);
                table.moves.offload_bytes.observe(bytes);
            }
            ("Queued", "Restoring") => {
                passed.into_iter().for_each(|wait| table.moves.queue_seconds.observe(wait));
            }
            ("Restoring", "Active") => {
                passed.into_iter().for_each(|took| table.moves.restore_seconds.observe(took));
                table.moves.restore_bytes.observe(bytes);
                // If an operator requested the restore, no call waited and the event has no
                // duration.
                if event.elapsed_ms > 0 {
                    table.moves.wake_seconds.observe(elapsed);
                }
            }
            _ => {}
        }
        if matches!(event.to.as_str(), "Queued" | "Restoring")
            && self.since_ms.len() < MAX_RESTORING
        {
            self.since_ms.insert(event.key.clone(), event.unix_ms);
        }
    }
}
