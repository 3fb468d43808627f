//! Repeats the readings of the host memory that is available to the copies out in progress.

use std::time::Duration;

use affinode_core::copy_watch::{CopyInProgress, LEVELS_INTERVAL_MS};
use tokio::time::Instant;

use crate::inventory::host_levels::HostLevels;

/// The reader of host memory, and the time of its next reading.
#[derive(Debug)]
pub(super) struct LevelPolling {
    reader: HostLevels,
    /// `None`: no copy out is in progress.
    due: Option<Instant>,
}

impl LevelPolling {
    pub(super) fn new(reader: HostLevels) -> LevelPolling {
        LevelPolling { reader, due: None }
    }

    /// A copy out begins, so the next reading is due now at the latest.
    pub(super) fn begin(&mut self) {
        self.due.get_or_insert_with(Instant::now);
    }

    /// Time of the next reading. `None`: no reading is needed.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Reads the levels for the copies out in progress. The readings are repeated at short intervals
    /// until no copy out is in progress.
    pub(super) fn read(&mut self, copies: Vec<CopyInProgress>) {
        let next = Instant::now() + Duration::from_millis(LEVELS_INTERVAL_MS);
        self.due = (!copies.is_empty()).then_some(next);
        if !copies.is_empty() {
            self.reader.ask(copies);
        }
    }
}
