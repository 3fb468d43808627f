//! Limits how often the GPUs are read. One reading is in progress at a time, and another follows it
//! if a change happened meanwhile. A change is therefore visible after at most two readings, even
//! if a container causes many changes.

use std::time::{Duration, Instant};

/// Records whether a reading of the GPUs is in progress, and whether another must follow it.
#[derive(Debug, Default)]
pub struct GpuPolling {
    asked: bool,
    again: bool,
    /// Time of the last tick that requested a reading of the GPUs.
    read: Option<Instant>,
}

impl GpuPolling {
    /// Returns whether this tick must request a reading of the GPUs. This is the case if the last
    /// tick that requested one was at least `interval` ago, or if there was none.
    pub fn is_due(&mut self, interval: Duration) -> bool {
        let is_due = self.read.is_none_or(|read| read.elapsed() >= interval);
        if is_due {
            self.read = Some(Instant::now());
        }
        is_due
    }

    /// Requests a reading of the GPUs. Returns `true` if the caller must start it now, and `false`
    /// if it must wait for the reading in progress.
    pub fn wanted(&mut self) -> bool {
        self.again = self.asked;
        !std::mem::replace(&mut self.asked, true)
    }

    /// Records that a reading is complete. Returns `true` if the caller must start the next reading
    /// now.
    pub fn came(&mut self) -> bool {
        self.asked = std::mem::take(&mut self.again);
        self.asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_requests_make_two_readings() {
        let mut readings = GpuPolling::default();
        assert_eq!((0..1_000).filter(|_| readings.wanted()).count(), 1);
        assert!(readings.came(), "something changed meanwhile");
        assert!(!readings.came());
        assert!(readings.wanted());
        assert!(!readings.came(), "nothing changed meanwhile");
    }
}
