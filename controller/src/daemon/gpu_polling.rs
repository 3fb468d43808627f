//! Limits the readings of the GPUs: one in progress, and another after it if a change happened
//! meanwhile. A change is therefore visible after at most two readings, even if a container causes
//! many changes.

use std::time::{Duration, Instant};

/// Whether a reading is in progress, and whether another one must follow.
#[derive(Debug, Default)]
pub struct GpuPolling {
    asked: bool,
    again: bool,
    /// Time of the last tick that requested a reading.
    read: Option<Instant>,
}

impl GpuPolling {
    /// Whether a tick must request a reading, because the last tick that did so was at least one
    /// interval ago.
    pub fn is_due(&mut self, interval: Duration) -> bool {
        let is_due = self.read.is_none_or(|read| read.elapsed() >= interval);
        if is_due {
            self.read = Some(Instant::now());
        }
        is_due
    }

    /// Requests a reading. `true`: the caller must start the reading now.
    pub fn wanted(&mut self) -> bool {
        self.again = self.asked;
        !std::mem::replace(&mut self.asked, true)
    }

    /// Records that a reading is complete. `true`: the caller must start the next reading now.
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
