//! Reads from NVML which processes used a GPU recently. The counters of CUDA calls cannot show
//! this, because a kernel can run long after the call that launched it. A separate thread reads the
//! utilization, with at most one request pending. Decisions and proofs of free VRAM therefore do
//! not wait for this reading, even if the driver is slow.

use std::{
    sync::mpsc::{self, SyncSender},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use affinode_core::input::Work;

use super::nvml::NvmlDevices;
use crate::driver_library::DriverLibrary;

/// Minimum time between two readings of the GPU utilization. It is used if the configured sample
/// interval is shorter.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time between two readings of the GPU utilization. It is used if the configured sample
/// interval is longer.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// Handle of the thread that reads which processes used a GPU. It reads at most once per interval.
/// The interval is the sample interval, but at least `MIN_INTERVAL` and at most `MAX_INTERVAL`.
#[derive(Debug)]
pub struct ProcessUtilization {
    questions: SyncSender<()>,
    asked: Option<Instant>,
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
        Ok(ProcessUtilization { questions, asked: None })
    }

    /// Requests a reading from NVML if one interval has passed since the previous request. Requests
    /// none if another request is pending.
    pub fn poll(&mut self, sample_interval: Duration) {
        let interval = sample_interval.clamp(MIN_INTERVAL, MAX_INTERVAL);
        if self.asked.is_none_or(|at| at.elapsed() >= interval) {
            self.asked = Some(Instant::now());
            let _ = self.questions.try_send(());
        }
    }
}

/// Returns the time on the clock of NVML's samples, in microseconds since 1970.
fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
