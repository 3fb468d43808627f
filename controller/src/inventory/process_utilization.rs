//! Which processes had work running on a GPU just now, by NVML: what counters of calls do not
//! show. A thread of its own asks, with one question on its way at most: where the driver
//! answers late, or not at all, neither decisions nor proofs of free memory wait for it.

use std::{
    sync::mpsc::{self, SyncSender},
    time::{SystemTime, UNIX_EPOCH},
};

use super::nvml::NvmlDevices;
use crate::core::input::Work;

/// The thread that asks.
#[derive(Debug)]
pub struct ProcessUtilization {
    questions: SyncSender<()>,
}

impl ProcessUtilization {
    /// Starts the thread. `tell` is called with each answer.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        library: String,
        tell: impl Fn(Vec<Work>) + Send + 'static,
    ) -> std::io::Result<ProcessUtilization> {
        let (questions, asked) = mpsc::sync_channel(1);
        std::thread::Builder::new().name("witness".into()).spawn(move || {
            let mut nvml = NvmlDevices::new(library);
            for () in asked {
                // Where nobody can say, nothing is told, and what was told is forgotten soon.
                if let Ok(work) = nvml.read_work(unix_us()) {
                    tell(work);
                }
            }
        })?;
        Ok(ProcessUtilization { questions })
    }

    /// Asks, unless an answer is being waited for.
    pub fn ask(&self) {
        let _ = self.questions.try_send(());
    }
}

/// The clock of NVML's samples.
fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
