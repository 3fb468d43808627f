//! Reads from NVML which processes used a GPU recently. The counters of CUDA calls cannot show
//! this, because a kernel can run long after the call that launched it. A separate thread reads the
//! utilization, with at most one request pending. Decisions and proofs of free VRAM therefore do
//! not wait for this reading, even if the driver is slow.

use std::{
    sync::mpsc::{self, SyncSender},
    time::{SystemTime, UNIX_EPOCH},
};

use affinode_core::input::Work;

use super::nvml::NvmlDevices;
use crate::driver_library::DriverLibrary;

/// Handle of the thread that reads which processes used a GPU.
#[derive(Debug)]
pub struct ProcessUtilization {
    questions: SyncSender<()>,
}

impl ProcessUtilization {
    /// Starts the thread that reads which processes used a GPU. The thread calls `tell` with the
    /// result of each successful reading.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        library: DriverLibrary,
        tell: impl Fn(Vec<Work>) + Send + 'static,
    ) -> std::io::Result<ProcessUtilization> {
        let (questions, asked) = mpsc::sync_channel(1);
        std::thread::Builder::new().name("witness".into()).spawn(move || {
            let mut nvml = NvmlDevices::new(library);
            for () in asked {
                // A failed reading is not reported. The result of the last successful reading
                // expires soon.
                if let Ok(work) = nvml.read_work(unix_us()) {
                    tell(work);
                }
            }
        })?;
        Ok(ProcessUtilization { questions })
    }

    /// Requests a reading from NVML. Does nothing if a request is pending.
    pub fn ask(&self) {
        let _ = self.questions.try_send(());
    }
}

/// Returns the time on the clock of NVML's samples, in microseconds since 1970.
fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
