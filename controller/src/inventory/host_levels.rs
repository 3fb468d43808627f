//! Reads how much host memory is left while content is copied out (from VRAM to host memory). It
//! reads every pool of host memory that is charged for the copies: the cgroups and the node. A
//! separate thread does so, because files of cgroups can take milliseconds to read. At most one
//! request waits for this thread. NVML is read on another thread, because its readings can take
//! seconds.

use std::sync::mpsc::{self, SyncSender};

use affinode_core::copy_watch::{CopyInProgress, Levels};

use super::memory::{self, MemoryRules};

/// Handle of the thread that reads how much host memory is left for the copies out in progress.
#[derive(Debug)]
pub struct HostLevels {
    questions: SyncSender<Vec<CopyInProgress>>,
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
        Ok(HostLevels { questions })
    }

    /// Requests a reading of the host memory that is left for these copies out. Does nothing if
    /// another request is pending.
    pub fn ask(&self, copies: Vec<CopyInProgress>) {
        let _ = self.questions.try_send(copies);
    }
}

fn levels_of(rules: MemoryRules, copy: CopyInProgress) -> Levels {
    let pids: Vec<u32> = copy.processes.iter().map(|(_, pid)| *pid).collect();
    (copy.key, memory::levels(rules, &pids))
}
