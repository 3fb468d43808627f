//! Counts and durations of a container's offloads and restores.

use std::collections::VecDeque;

use super::super::Millis;

/// Maximum number of wakes whose durations are stored.
const REMEMBERED: usize = 100;

/// Counts and durations of a container's offloads and restores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// When the shim announced the container.
    pub announced_at: Millis,
    /// When the container was last restored. `None`: it was never restored.
    pub restored_at: Option<Millis>,
    /// Number of completed offloads.
    pub offloads: u64,
    /// Number of completed restores.
    pub restores: u64,
    /// Duration of the last offload, in milliseconds.
    pub last_offload_ms: Millis,
    /// Duration of the last wake (a restore because a CUDA call waited), from the first waiting
    /// call to its release, in milliseconds.
    pub last_wake_ms: Millis,
    /// Durations of the last wakes.
    pub wakes: Wakes,
    /// Duration of the last restore, in milliseconds from the grant of its VRAM.
    pub last_restore_ms: Millis,
}

impl Figures {
    /// Creates the figures of a container that was announced at `now`.
    #[must_use]
    pub fn new(now: Millis) -> Figures {
        Figures { announced_at: now, ..Figures::default() }
    }

    /// Records a completed offload that took `took_ms` milliseconds.
    pub fn offloaded(&mut self, took_ms: Millis) {
        self.offloads += 1;
        self.last_offload_ms = took_ms;
    }

    /// Records a completed restore. `waited_ms`: time since the first waiting CUDA call, 0 if none
    /// waited. `restore_ms`: time since VRAM was granted.
    pub fn restored(&mut self, now: Millis, waited_ms: Millis, restore_ms: Millis) {
        self.restores += 1;
        self.restored_at = Some(now);
        self.last_wake_ms = waited_ms.max(restore_ms);
        self.wakes.add(self.last_wake_ms);
        self.last_restore_ms = restore_ms;
    }
}

/// Durations of the last wakes in milliseconds, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wakes(VecDeque<Millis>);

impl Wakes {
    /// Adds the duration of a wake. Drops the oldest duration if there are more than `REMEMBERED`.
    pub fn add(&mut self, took_ms: Millis) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(took_ms);
    }

    /// The 99th percentile of the stored durations, in milliseconds. 0: there was no wake.
    #[must_use]
    pub fn p99_ms(&self) -> Millis {
        let mut sorted: Vec<Millis> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        let rank = (sorted.len() * 99).div_ceil(100);
        rank.checked_sub(1).and_then(|index| sorted.get(index)).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p99_ignores_one_outlier_and_old_wakes() {
        let mut wakes = Wakes::default();
        assert_eq!(wakes.p99_ms(), 0);
        wakes.add(9_000);
        assert_eq!(wakes.p99_ms(), 9_000);
        (1..100).for_each(|ms| wakes.add(ms));
        assert_eq!(wakes.p99_ms(), 99);
        (0..REMEMBERED).for_each(|_| wakes.add(5));
        assert_eq!(wakes.p99_ms(), 5);
    }
}
