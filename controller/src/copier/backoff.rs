//! Backoff after a copier that could not serve: each further failure of a GPU doubles the pause
//! before the next start. What killed one copier may be over in a moment; what the driver refuses
//! once it mostly refuses for long.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// Pause after the first failure.
const FIRST: Duration = Duration::from_secs(5);
/// Longest pause, after any number of failures.
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// Failures by UUID of the GPU.
#[derive(Debug, Default)]
pub struct RestartBackoff(HashMap<String, CopierFailure>);

#[derive(Debug)]
struct CopierFailure {
    until: Instant,
    pause: Duration,
}

impl RestartBackoff {
    /// Records a failed start; returns the pause before the next one.
    pub fn note(&mut self, uuid: &str, now: Instant) -> Duration {
        let before = self.0.get(uuid).map_or(Duration::ZERO, |failure| failure.pause);
        let pause = (before * 2).clamp(FIRST, MAX_BACKOFF);
        self.0.insert(uuid.to_owned(), CopierFailure { until: now + pause, pause });
        pause
    }

    /// Clears the failures of a GPU whose copier serves.
    pub fn forget(&mut self, uuid: &str) {
        self.0.remove(uuid);
    }

    /// Whether a copier may be started on a GPU.
    pub fn allow(&self, uuid: &str, now: Instant) -> bool {
        self.0.get(uuid).is_none_or(|failure| now >= failure.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_until_a_copier_serves() {
        let (mut failures, start) = (RestartBackoff::default(), Instant::now());
        let mut now = start;
        let mut pauses = Vec::new();
        assert!(failures.allow("a", now));
        for _ in 0..8 {
            let pause = failures.note("a", now);
            assert!(!failures.allow("a", now + pause - Duration::from_nanos(1)));
            assert!(failures.allow("b", now), "another GPU's");
            now += pause;
            assert!(failures.allow("a", now));
            pauses.push(pause.as_secs());
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300]);
        failures.forget("a");
        assert_eq!(failures.note("a", now), FIRST);
    }
}
