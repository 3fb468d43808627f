//! Stores the controller's latest events for all readers.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use affinode_proto::api::control::Event;
use tokio::sync::Notify;

/// Number of events that are kept. Older events are removed.
const KEPT: usize = 10_000;
/// Number of events of one container that are kept. A container that causes many events therefore
/// does not remove the events of others.
const KEPT_OF_CONTAINER: usize = 1_000;
/// Maximum number of events in one response.
const BATCH: usize = 1_000;

/// Ring of the latest events. Each reader states the number of the last event that it has read.
#[derive(Debug, Default)]
pub struct EventLog {
    inner: Mutex<EventLogState>,
    added: Notify,
}

#[derive(Debug, Default)]
struct EventLogState {
    events: VecDeque<Event>,
    /// Number of events in the ring, by the key of their container.
    of_containers: HashMap<String, usize>,
    last: u64,
}

impl EventLogState {
    /// Makes room for an event of this container. The event of the node itself has no key.
    fn make_room(&mut self, key: &str) {
        let has_share = |n: &usize| *n >= KEPT_OF_CONTAINER && !key.is_empty();
        let removed = if self.of_containers.get(key).is_some_and(has_share) {
            let oldest = self.events.iter().position(|event| event.key == key);
            oldest.and_then(|oldest| self.events.remove(oldest))
        } else if self.events.len() == KEPT {
            self.events.pop_front()
        } else {
            None
        };
        let Some(removed) = removed else { return };
        if let Some(left) = self.of_containers.get_mut(&removed.key) {
            *left -= 1;
            if *left == 0 {
                self.of_containers.remove(&removed.key);
            }
        }
    }
}

impl EventLog {
    /// Adds an event, and sets the event's number and time.
    pub fn add(&self, event: Event, unix_ms: i64) {
        {
            let mut inner = self.lock();
            inner.last += 1;
            let sequence = inner.last;
            inner.make_room(&event.key);
            *inner.of_containers.entry(event.key.clone()).or_default() += 1;
            inner.events.push_back(Event { sequence, unix_ms, ..event });
        }
        self.added.notify_waiters();
    }

    /// Returns the events whose number is above `sequence`. If there are none, waits up to `wait`
    /// for the first. If `sequence` is above the newest number, it comes from an earlier
    /// controller, and events are returned from the oldest on.
    pub async fn after(&self, sequence: u64, wait: Duration) -> Vec<Event> {
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let added = self.added.notified();
            tokio::pin!(added);
            // The reader registers before it checks for events, so that it misses no event in
            // between.
            added.as_mut().enable();
            let found = self.now(sequence);
            if !found.is_empty() || tokio::time::timeout_at(deadline, added).await.is_err() {
                return found;
            }
        }
    }

    /// Returns the number of the newest event, or 0 if there was no event yet.
    pub fn last(&self) -> u64 {
        self.lock().last
    }

    /// Returns events like [`EventLog::after`], but does not wait if there are none.
    pub fn now(&self, sequence: u64) -> Vec<Event> {
        let inner = self.lock();
        let after = if sequence > inner.last { 0 } else { sequence };
        inner.events.iter().filter(|event| event.sequence > after).take(BATCH).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, EventLogState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_reader_gets_new_events_of_the_ring() {
        let log = EventLog::default();
        for _ in 0..KEPT + 5 {
            log.add(Event::default(), 1);
        }
        let first = log.after(0, Duration::ZERO).await;
        assert_eq!((first.len(), first[0].sequence), (BATCH, 6));
        let last = KEPT as u64 + 5;
        assert!(log.after(last, Duration::ZERO).await.is_empty());
        assert_eq!(log.after(last + 1000, Duration::ZERO).await[0].sequence, 6);
    }

    #[test]
    fn loud_container_leaves_events_of_others() {
        let log = EventLog::default();
        let event = |key: &str| Event { key: key.into(), ..Event::default() };
        log.add(event("quiet"), 1);
        (0..KEPT).for_each(|_| log.add(event("loud"), 1));
        let events: Vec<Event> = log.lock().events.iter().cloned().collect();
        assert_eq!((events.len(), events[0].key.as_str()), (1 + KEPT_OF_CONTAINER, "quiet"));
        assert_eq!(events.last().map(|event| event.sequence), Some(KEPT as u64 + 1));
        // The events of many containers still fill the ring, and the counts stay right.
        (0..2 * KEPT).for_each(|n| log.add(event(&(n % 20).to_string()), 1));
        let inner = log.lock();
        assert_eq!((inner.events.len(), inner.of_containers.len()), (KEPT, 20));
        assert_eq!(inner.of_containers.values().sum::<usize>(), KEPT);
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken() {
        let log = std::sync::Arc::new(EventLog::default());
        let reader = tokio::spawn({
            let log = std::sync::Arc::clone(&log);
            async move { log.after(0, Duration::from_secs(60)).await }
        });
        tokio::task::yield_now().await;
        log.add(Event::default(), 1);
        assert_eq!(reader.await.unwrap().len(), 1);
    }
}
