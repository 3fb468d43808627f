//! Who waits for VRAM: first come first served within a priority; waiting raises
//! the priority by one for each [`AGING_MS`], so nobody waits forever.

use super::{Key, Millis};

/// How long a waiter waits for one step of priority, in milliseconds.
pub const AGING_MS: Millis = 10_000;

#[derive(Clone, Debug)]
struct Waiter {
    key: Key,
    priority: i32,
    since: Millis,
}

/// The containers that wait, each at most once.
#[derive(Debug, Default)]
pub struct Queue {
    waiters: Vec<Waiter>,
}

impl Queue {
    /// Adds a container; one that waits already keeps its place.
    pub fn enter(&mut self, key: &Key, priority: i32, now: Millis) {
        if !self.contains(key) {
            self.waiters.push(Waiter { key: key.clone(), priority, since: now });
        }
    }

    /// Takes a container out, waiting or not.
    pub fn leave(&mut self, key: &Key) {
        self.waiters.retain(|waiter| waiter.key != *key);
    }

    /// Whether it waits.
    #[must_use]
    pub fn contains(&self, key: &Key) -> bool {
        self.waiters.iter().any(|waiter| waiter.key == *key)
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Everybody who waits, whose turn it is first.
    #[must_use]
    pub fn in_order(&self, now: Millis) -> Vec<Key> {
        let mut sorted: Vec<&Waiter> = self.waiters.iter().collect();
        let rank = |w: &Waiter| {
            let aged = i64::try_from(now.saturating_sub(w.since) / AGING_MS).unwrap_or(i64::MAX);
            i64::from(w.priority).saturating_add(aged)
        };
        // Stable: equal rank and time keep the order of arrival.
        sorted.sort_by(|a, b| rank(b).cmp(&rank(a)).then(a.since.cmp(&b.since)));
        sorted.into_iter().map(|w| w.key.clone()).collect()
    }

    /// Place in the queue, 0 for the next; `None` when it does not wait.
    #[must_use]
    pub fn position(&self, key: &Key, now: Millis) -> Option<usize> {
        self.in_order(now).iter().position(|other| other == key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: usize) -> Key {
        Key::parse(&format!("{n:032x}")).unwrap()
    }

    #[test]
    fn first_come_first_served_within_a_priority() {
        let mut queue = Queue::default();
        queue.enter(&key(1), 0, 10);
        queue.enter(&key(2), 0, 20);
        queue.enter(&key(3), 1, 30);
        queue.enter(&key(1), 0, 40);
        assert_eq!(queue.in_order(50), [key(3), key(1), key(2)]);
        queue.leave(&key(3));
        assert_eq!(queue.position(&key(2), 50), Some(1));
    }

    proptest! {
        /// A waiter of the lowest priority is first after a bounded time, whoever else comes.
        #[test]
        fn nobody_starves(others in proptest::collection::vec((0_i32..10, 0_u64..200_000), 0..50)) {
            let mut queue = Queue::default();
            queue.enter(&key(0), 0, 0);
            for (n, (priority, since)) in others.iter().enumerate() {
                // Newcomers keep coming; whoever was served has left.
                queue.enter(&key(n + 1), *priority, 110_000 + since);
            }
            prop_assert_eq!(queue.in_order(310_000)[0].clone(), key(0));
        }
    }
}
