//! Limits how often the GPU utilization of processes is read.

use std::time::{Duration, Instant};

use crate::inventory::process_utilization::ProcessUtilization;

/// Minimum time between two readings of the utilization. The usual time is the sample interval.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time between two readings of the utilization, if the sample interval is long.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// Reads the GPU utilization of processes, not more often than allowed.
#[derive(Debug)]
pub(super) struct UtilizationPolling {
    reader: ProcessUtilization,
    asked: Option<Instant>,
}

impl UtilizationPolling {
    pub(super) fn new(reader: ProcessUtilization) -> UtilizationPolling {
        UtilizationPolling { reader, asked: None }
    }

    /// Starts a reading of the utilization if the last reading was long enough ago.
    pub(super) fn poll(&mut self, sample_interval: Duration) {
        let interval = sample_interval.clamp(MIN_INTERVAL, MAX_INTERVAL);
        if self.asked.is_none_or(|at| at.elapsed() >= interval) {
            self.asked = Some(Instant::now());
            self.reader.ask();
        }
    }
}
