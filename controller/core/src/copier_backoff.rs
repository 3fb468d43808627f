//! Pauses between failed starts of a copier (Affinode's process on a GPU that copies memory for
//! other processes). Each further failure on a GPU doubles the pause, because a driver that refused
//! a copier usually refuses it again.

use std::collections::BTreeMap;

use super::Millis;

/// Pause after the first failed start of a copier.
const FIRST_MS: Millis = 5_000;
/// Maximum pause between two starts of a copier on the same GPU.
const MAX_BACKOFF_MS: Millis = 300_000;

/// The last failed start of a copier on each GPU, and the pause after it. Key: UUID of the GPU.
#[derive(Debug, Default)]
pub(super) struct RestartBackoff(BTreeMap<String, CopierFailure>);

#[derive(Debug)]
struct CopierFailure {
    until: Millis,
    pause_ms: Millis,
}

impl RestartBackoff {
    /// Records a failed start of a copier. Returns the pause before the next start, in
    /// milliseconds.
    pub(super) fn note(&mut self, uuid: &str, now: Millis) -> Millis {
        let before = self.0.get(uuid).map_or(0, |failure| failure.pause_ms);
        let pause_ms = (before * 2).clamp(FIRST_MS, MAX_BACKOFF_MS);
        self.0.insert(uuid.to_owned(), CopierFailure { until: now + pause_ms, pause_ms });
        pause_ms
    }

    /// Clears the recorded failures of a GPU when its copier is ready.
    pub(super) fn forget(&mut self, uuid: &str) {
        self.0.remove(uuid);
    }

    /// Whether a copier may be started on a GPU now.
    pub(super) fn allow(&self, uuid: &str, now: Millis) -> bool {
        self.0.get(uuid).is_none_or(|failure| now >= failure.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_until_a_copier_serves() {
        let (mut failures, mut now) = (RestartBackoff::default(), 0);
        let mut pauses = Vec::new();
        assert!(failures.allow("a", now));
        for _ in 0..8 {
            let pause_ms = failures.note("a", now);
            assert!(!failures.allow("a", now + pause_ms - 1));
            assert!(failures.allow("b", now), "a copier of another GPU may start");
            now += pause_ms;
            assert!(failures.allow("a", now));
            pauses.push(pause_ms / 1_000);
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300]);
        failures.forget("a");
        assert_eq!(failures.note("a", now), FIRST_MS);
    }
}
