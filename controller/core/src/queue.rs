//! The queue of containers that wait for VRAM. Containers of the same priority are served in order
//! of arrival. Waiting raises the priority by one for each [`AGING_MS`], so no container waits
//! forever.

use std::{
    cmp::Reverse,
    collections::{HashMap, VecDeque},
};

use foldhash::fast::FixedState;

use super::{Key, Millis};

/// Waiting time that raises the priority by one, in milliseconds.
pub const AGING_MS: Millis = 10_000;

/// Place of a waiter in the stored order: priority (highest first), start of the wait, arrival
/// number. No two places are equal. Waiting raises the priority of a waiter. It may therefore be
/// served before a waiter with an earlier place.
type Place = (Reverse<i32>, Millis, u64);

#[derive(Clone, Debug)]
struct Waiter {
    key: Key,
    place: Place,
}

impl Waiter {
    /// Sort key for the order of service: the highest priority including the waiting time is first,
    /// then the longest wait.
    fn turn(&self, now: Millis) -> (Reverse<i64>, Millis) {
        let (Reverse(priority), since, _) = self.place;
        let aged = i64::try_from(now.saturating_sub(since) / AGING_MS).unwrap_or(i64::MAX);
        (Reverse(i64::from(priority).saturating_add(aged)), since)
    }
}

/// The queue of the containers that wait for VRAM. It contains each container at most once.
#[derive(Debug, Default)]
pub struct Queue {
    /// The waiters, ordered by `place`.
    waiters: VecDeque<Waiter>,
    places: HashMap<Key, Place, FixedState>,
    arrivals: u64,
}

impl Queue {
    /// Adds a container. A container that already waits keeps its place.
    pub fn enter(&mut self, key: &Key, priority: i32, now: Millis) {
        if !self.contains(key) {
            self.arrivals += 1;
            let place = (Reverse(priority), now, self.arrivals);
            let at = self.waiters.partition_point(|waiter| waiter.place < place);
            self.waiters.insert(at, Waiter { key: key.clone(), place });
            self.places.insert(key.clone(), place);
        }
    }

    /// Removes a container. Does nothing if it does not wait.
    pub fn leave(&mut self, key: &Key) {
        if let Some(at) = self.find(key) {
            self.waiters.remove(at);
            self.places.remove(key);
        }
    }

    /// Whether the container waits.
    #[must_use]
    pub fn contains(&self, key: &Key) -> bool {
        self.places.contains_key(key)
    }

    /// When the container began to wait. `None`: it does not wait.
    #[must_use]
    pub fn waits_since(&self, key: &Key) -> Option<Millis> {
        self.places.get(key).map(|(_, since, _)| *since)
    }

    fn find(&self, key: &Key) -> Option<usize> {
        let place = self.places.get(key)?;
        self.waiters.binary_search_by_key(place, |waiter| waiter.place).ok()
    }

    /// The waiting containers, in no order that callers may rely on.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.waiters.iter().map(|waiter| &waiter.key)
    }

    /// Number of waiting containers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether no container waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// The waiting containers in the order of service, beginning with the next.
    #[must_use]
    pub fn in_order(&self, now: Millis) -> Vec<Key> {
        let mut order = Vec::new();
        self.order_into(now, &mut order);
        order
    }

    /// Appends the waiting containers to `order` in the order of service, beginning with the next.
    pub fn order_into(&self, now: Millis, order: &mut Vec<Key>) {
        if self.are_alike() {
            return order.extend(self.waiters.iter().map(|w| w.key.clone()));
        }
        let mut sorted: Vec<&Waiter> = self.waiters.iter().collect();
        // The sort is stable: waiters with equal sort keys keep the order of arrival.
        sorted.sort_by_cached_key(|w| w.turn(now));
        order.extend(sorted.into_iter().map(|w| w.key.clone()));
    }

    /// Whether all waiters have the same priority. Then waiting does not change their order.
    fn are_alike(&self) -> bool {
        self.waiters.front().map(|w| w.place.0) == self.waiters.back().map(|w| w.place.0)
    }

    /// Number of containers that are served before this container. `None`: it does not wait.
    #[must_use]
    pub fn position(&self, key: &Key, now: Millis) -> Option<usize> {
        let at = self.find(key)?;
        if self.are_alike() {
            return Some(at);
        }
        let own = self.waiters[at].turn(now);
        let before = |(n, other): &(usize, &Waiter)| (other.turn(now), *n) < (own, at);
        Some(self.waiters.iter().enumerate().filter(before).count())
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
        /// Containers of any priority arrive at any time, and are served one at a time. The number
        /// of later arrivals that can pass a waiter must be limited. A higher priority is worth a
        /// certain waiting time. A container may pass a container that arrived earlier only if the
        /// difference of their arrivals is at most this time.
        #[test]
        fn queue_with_any_arrivals_starves_none(
            steps in proptest::collection::vec((0_i32..10, 0_u64..20_000, any::<bool>()), 1..200),
        ) {
            let (mut queue, mut now, mut came) = (Queue::default(), 0, Vec::new());
            for (n, (priority, pause_ms, serves)) in steps.into_iter().enumerate() {
                now += pause_ms;
                queue.enter(&key(n), priority, now);
                came.push((priority, now));
                if !serves {
                    continue;
                }
                let order = queue.in_order(now);
                let number = |key: &Key| usize::from_str_radix(key.as_str(), 16).unwrap();
                let (served_priority, served_came) = came[number(&order[0])];
                for waiter in &order[1..] {
                    let (priority, since) = came[number(waiter)];
                    let worth_ms = AGING_MS as i64 * i64::from(served_priority - priority + 1);
                    prop_assert!(served_came as i64 <= since as i64 + worth_ms);
                }
                for (place, waiter) in order.iter().enumerate() {
                    prop_assert_eq!(queue.position(waiter, now), Some(place));
                }
                queue.leave(&order[0]);
            }
        }
    }
}
