//! Reads again and again how much host memory is left while content is copied out (from VRAM to host
//! memory). It reads every pool of host memory that is charged for the copies: the cgroups and the node. A
//! separate thread does so, because files of cgroups can take milliseconds to read. At most one
//! request waits for this thread. NVML is read on another thread, because its readings can take
//! seconds.

use std::{
    sync::mpsc::{self, SyncSender},
    time::Duration,
};

use affinode_core::copy_watch::{CopyInProgress, LEVELS_INTERVAL_MS, Levels};
use tokio::time::Instant;

use super::memory::{self, MemoryRules};

/// Handle of the thread that reads how much host memory is left for the copies out in progress, and
/// the time of its next reading.
#[derive(Debug)]
pub struct HostLevels {
    questions: SyncSender<Vec<CopyInProgress>>,
    /// Time of the next reading. `None` if no copy out is in progress.
    due: Option<Instant>,
}

impl HostLevels {
    /// Starts the thread that reads how much host memory is left. The thread passes the result of
    /// each reading to `tell`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        rules: MemoryRules,
        tell: impl Fn(Vec<Levels>) + Send + 'static,
    ) -> std::io::Result<HostLevels> {
        let (questions, asked) = mpsc::sync_channel::<Vec<CopyInProgress>>(1);
        std::thread::Builder::new().name("host-levels".into()).spawn(move || {
            for copies in asked {
                tell(copies.into_iter().map(|copy| levels_of(rules, copy)).collect());
            }
        })?;
        Ok(HostLevels { questions, due: None })
    }

    /// Records that a copy out begins. If no reading is planned yet, a reading becomes due now.
    pub fn begin(&mut self) {
        self.due.get_or_insert_with(Instant::now);
    }

    /// Returns the time of the next reading, or `None` if no reading is needed.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Requests a reading of the host memory that is left for `copies`, the copies out in progress.
    /// Requests none if another request is pending. Plans the next reading after
    /// [`LEVELS_INTERVAL_MS`]. If `copies` is empty, no reading is requested or planned.
    pub fn read(&mut self, copies: Vec<CopyInProgress>) {
        let next = Instant::now() + Duration::from_millis(LEVELS_INTERVAL_MS);
        self.due = (!copies.is_empty()).then_some(next);
        if !copies.is_empty() {
            let _ = self.questions.try_send(copies);
        }
    }
}

fn levels_of(rules: MemoryRules, copy: CopyInProgress) -> Levels {
    let pids: Vec<u32> = copy.processes.iter().map(|(_, pid)| *pid).collect();
    (copy.key, memory::levels(rules, &pids))
}
