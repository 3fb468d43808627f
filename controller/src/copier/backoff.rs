//! GPUs whose copier could not serve: the more often in a row, the later the next one is started. What
//! killed one may be over in a moment; what a driver refuses it mostly refuses for long.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// After the first.
const FIRST: Duration = Duration::from_secs(5);
/// However many there were.
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// All of them, by GPU.
#[derive(Debug, Default)]
pub struct RestartBackoff(HashMap<String, CopierFailure>);

#[derive(Debug)]
struct CopierFailure {
    until: Instant,
    pause: Duration,
}

impl RestartBackoff {
    /// One could not serve: how long none is started now.
    pub fn note(&mut self, uuid: &str, now: Instant) -> Duration {
        let before = self.0.get(uuid).map_or(Duration::ZERO, |failure| failure.pause);
        let pause = (before * 2).clamp(FIRST, MAX_BACKOFF);
        self.0.insert(uuid.to_owned(), CopierFailure { until: now + pause, pause });
        pause
    }

    /// One serves.
    pub fn forget(&mut self, uuid: &str) {
        self.0.remove(uuid);
    }

    /// Whether one may be started.
    pub fn allow(&self, uuid: &str, now: Instant) -> bool {
        self.0.get(uuid).is_none_or(|failure| now >= failure.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_in_a_row_is_followed_by_a_longer_pause_until_one_serves() {
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
