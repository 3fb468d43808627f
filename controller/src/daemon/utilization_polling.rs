//! Limits how often the utilization of processes is read.

use std::time::{Duration, Instant};

use crate::inventory::process_utilization::ProcessUtilization;

/// Minimum time between two readings. The usual time is the sample interval.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time between two readings, for a long sample interval.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// The reader of the processes' utilization, and the time of its last reading.
#[derive(Debug)]
pub(super) struct UtilizationPolling {
    reader: ProcessUtilization,
    asked: Option<Instant>,
}

impl UtilizationPolling {
    pub(super) fn new(reader: ProcessUtilization) -> UtilizationPolling {
        UtilizationPolling { reader, asked: None }
    }

    /// Starts a reading if the last one was long enough ago.
    pub(super) fn poll(&mut self, sample_interval: Duration) {
        let interval = sample_interval.clamp(MIN_INTERVAL, MAX_INTERVAL);
        if self.asked.is_none_or(|at| at.elapsed() >= interval) {
            self.asked = Some(Instant::now());
            self.reader.ask();
        }
    }
}
