//! How long the last wakes of a container took.

use std::collections::VecDeque;

use super::Millis;

/// Wakes that are remembered.
const REMEMBERED: usize = 100;

/// The last wakes, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wakes(VecDeque<Millis>);

impl Wakes {
    /// One took so long.
    pub fn add(&mut self, took_ms: Millis) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(took_ms);
    }

    /// 99 of 100 took no longer; 0 when there was none.
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
    fn one_slow_wake_of_a_hundred_is_left_out_and_old_ones_are_forgotten() {
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
