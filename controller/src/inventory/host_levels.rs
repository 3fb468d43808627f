//! Reads how much host memory is left for copies out (copies of VRAM to host memory) that are in
//! progress. It reads every pool that is charged for this memory: the cgroups and the node. A
//! separate thread reads the pools, with at most one request pending, because files of cgroups can
//! take milliseconds to read. Readings of NVML run on another thread, because they can take
//! seconds.

use std::sync::mpsc::{self, SyncSender};

use affinode_core::copy_watch::{CopyInProgress, Levels};

use super::memory::{self, MemoryRules};

/// Handle of the thread that reads the host memory that is left for copies out in progress.
#[derive(Debug)]
pub struct HostLevels {
    questions: SyncSender<Vec<CopyInProgress>>,
}

impl HostLevels {
    /// Starts the thread that reads the host memory. The thread calls `tell` with the result of
    /// each reading.
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
        Ok(HostLevels { questions })
    }

    /// Requests a reading of the host memory for these copies. Does nothing if a request is
    /// pending.
    pub fn ask(&self, copies: Vec<CopyInProgress>) {
        let _ = self.questions.try_send(copies);
    }
}

fn levels_of(rules: MemoryRules, copy: CopyInProgress) -> Levels {
    let pids: Vec<u32> = copy.processes.iter().map(|(_, pid)| *pid).collect();
    (copy.key, memory::levels(rules, &pids))
}
