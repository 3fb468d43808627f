//! Durations of a container's last wakes (restores because a CUDA call waited).

use std::collections::VecDeque;

use super::Millis;

/// Maximum number of wakes whose durations are stored.
const REMEMBERED: usize = 100;

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
