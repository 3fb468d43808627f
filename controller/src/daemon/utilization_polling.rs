//! Limits how often the GPU utilization of processes is read.

use std::time::{Duration, Instant};

use crate::inventory::process_utilization::ProcessUtilization;

/// Minimum time between two readings of the GPU utilization. It is used if the configured sample
/// interval is shorter.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time between two readings of the GPU utilization. It is used if the configured sample
/// interval is longer.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// Reads the GPU utilization of processes at most once per interval. The interval is the sample
/// interval, but at least `MIN_INTERVAL` and at most `MAX_INTERVAL`.
#[derive(Debug)]
pub(super) struct UtilizationPolling {
    reader: ProcessUtilization,
    asked: Option<Instant>,
}

impl UtilizationPolling {
    pub(super) fn new(reader: ProcessUtilization) -> UtilizationPolling {
        UtilizationPolling { reader, asked: None }
    }

    /// Starts a reading of the utilization if one interval has passed since the previous reading
    /// started.
    pub(super) fn poll(&mut self, sample_interval: Duration) {
        let interval = sample_interval.clamp(MIN_INTERVAL, MAX_INTERVAL);
        if self.asked.is_none_or(|at| at.elapsed() >= interval) {
            self.asked = Some(Instant::now());
            self.reader.ask();
        }
    }
}
