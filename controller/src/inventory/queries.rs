//! The queries that the thread of the inventory has not answered yet. A call of NVML can block for
//! any time, for example while the driver resets a GPU. The actor therefore sees how long the query
//! in progress takes. The age of a waiting query says nothing, because many queries that are each
//! answered soon can wait for each other. The list does not grow without limit: a container has at
//! most one query for a proof, because only the last one is still current.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::InventoryQuery;

/// The queries in the order of their arrival, and the query in progress.
#[derive(Debug, Default)]
pub(super) struct QueryQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<InventoryQuery>,
    /// Start of the query that the thread executes now. `None`: it executes none.
    in_progress: Option<Instant>,
    /// Whether [`QueryQueue::overdue`] has returned the delay of the query in progress.
    is_reported: bool,
    is_closed: bool,
}

impl QueryQueue {
    /// Adds a query. It replaces an older proof for the same container.
    pub(super) fn push(&self, query: InventoryQuery) {
        let mut state = self.lock();
        if let InventoryQuery::Prove { key, .. } = &query {
            state.waiting.retain(
                |other| !matches!(other, InventoryQuery::Prove { key: of, .. } if of == key),
            );
        }
        state.waiting.push_back(query);
        self.changed.notify_one();
    }

    /// Waits for the next query, which then is in progress. `None`: the queue is closed. `clock`
    /// returns the time of its start.
    pub(super) fn next(&self, clock: impl Fn() -> Instant) -> Option<InventoryQuery> {
        let is_idle = |state: &mut QueueState| state.waiting.is_empty() && !state.is_closed;
        let waited = self.changed.wait_while(self.lock(), is_idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        let query = state.waiting.pop_front().filter(|_| !state.is_closed)?;
        state.in_progress = Some(clock());
        state.is_reported = false;
        Some(query)
    }

    /// Records that the query in progress is answered.
    pub(super) fn answered(&self) {
        self.lock().in_progress = None;
    }

    /// Returns how long the query in progress has taken until `now`, if this is at least `limit`.
    /// Returns it once for each query.
    pub(super) fn overdue(&self, limit: Duration, now: Instant) -> Option<Duration> {
        let mut state = self.lock();
        let taken = now.saturating_duration_since(state.in_progress?);
        let is_new = taken >= limit && !state.is_reported;
        state.is_reported |= is_new;
        is_new.then_some(taken)
    }

    /// Makes the thread end after the query in progress.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use affinode_core::Key;

    use super::*;

    fn proof(container: u32, number: u64) -> InventoryQuery {
        let key = Key::parse(&format!("{container:032x}")).unwrap();
        InventoryQuery::Prove { key, number, with_processes: false }
    }

    #[test]
    fn newer_proof_replaces_an_older_one() {
        let queue = QueryQueue::default();
        queue.push(proof(1, 0));
        queue.push(InventoryQuery::Gpus);
        (1..1_000).for_each(|number| queue.push(proof(1, number)));
        queue.push(proof(2, 1_000));
        let left: Vec<String> =
            (0..3).map(|_| format!("{:?}", queue.next(Instant::now).unwrap())).collect();
        assert_eq!(
            left,
            [InventoryQuery::Gpus, proof(1, 999), proof(2, 1_000)]
                .map(|query| format!("{query:?}"))
        );
        queue.close();
        assert!(queue.next(Instant::now).is_none());
    }

    #[test]
    fn blocked_query_is_overdue_once() {
        let queue = QueryQueue::default();
        let (start, limit) = (Instant::now(), Duration::from_secs(5));
        let later = |seconds: u64| start + Duration::from_secs(seconds);
        queue.push(InventoryQuery::Gpus);
        queue.push(InventoryQuery::Gpus);
        assert_eq!(queue.overdue(limit, later(60)), None, "no call is in progress");
        queue.next(|| start);
        assert_eq!(queue.overdue(limit, later(4)), None);
        assert_eq!(queue.overdue(limit, later(7)), Some(Duration::from_secs(7)));
        assert_eq!(queue.overdue(limit, later(9)), None, "it is the same call");
        queue.answered();
        assert_eq!(queue.overdue(limit, later(9)), None);
        queue.next(|| later(9));
        assert_eq!(queue.overdue(limit, later(15)), Some(Duration::from_secs(6)), "the next call");
    }

    /// 200 queries that each take 50 ms are a long queue of a healthy NVML.
    #[test]
    fn a_long_queue_is_not_overdue() {
        let queue = QueryQueue::default();
        let (start, limit) = (Instant::now(), Duration::from_secs(5));
        (0..200).for_each(|_| queue.push(InventoryQuery::Gpus));
        for number in 0..200 {
            let began = start + Duration::from_millis(50 * number);
            queue.next(|| began).unwrap();
            let now = began + Duration::from_millis(50);
            assert_eq!(queue.overdue(limit, now), None, "query {number}");
            queue.answered();
        }
    }
}
