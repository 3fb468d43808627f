//! Reads the available host memory again and again while content is copied out (from VRAM to host
//! memory).

use std::time::Duration;

use affinode_core::copy_watch::{CopyInProgress, LEVELS_INTERVAL_MS};
use tokio::time::Instant;

use crate::inventory::host_levels::HostLevels;

/// Reads the available host memory at intervals while copies out are in progress.
#[derive(Debug)]
pub(super) struct LevelPolling {
    reader: HostLevels,
    /// Time of the next reading. `None` if no copy out is in progress.
    due: Option<Instant>,
}

impl LevelPolling {
    pub(super) fn new(reader: HostLevels) -> LevelPolling {
        LevelPolling { reader, due: None }
    }

    /// Records that a copy out begins. If no reading is planned yet, a reading becomes due now.
    pub(super) fn begin(&mut self) {
        self.due.get_or_insert_with(Instant::now);
    }

    /// Returns the time of the next reading, or `None` if no reading is needed.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Requests a reading of the host memory that is left for `copies`, the copies out in progress.
    /// Plans the next reading after [`LEVELS_INTERVAL_MS`]. If `copies` is empty, no reading is
    /// requested or planned.
    pub(super) fn read(&mut self, copies: Vec<CopyInProgress>) {
        let next = Instant::now() + Duration::from_millis(LEVELS_INTERVAL_MS);
        self.due = (!copies.is_empty()).then_some(next);
        if !copies.is_empty() {
            self.reader.ask(copies);
        }
    }
}
