//! Stores the controller's latest events for all readers.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use affinode_proto::api::control::Event;
use tokio::sync::Notify;

/// Number of events that are kept. Older events are removed.
const KEPT: usize = 10_000;
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
    last: u64,
}

impl EventLog {
    /// Adds an event, and sets the event's number and time.
    pub fn add(&self, event: Event, unix_ms: i64) {
        {
            let mut inner = self.lock();
            inner.last += 1;
            let sequence = inner.last;
            if inner.events.len() == KEPT {
                inner.events.pop_front();
            }
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
