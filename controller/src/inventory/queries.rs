//! The queries that the thread of the inventory has not answered yet. A call of NVML can block for
//! any time, for example while the driver resets a GPU. The actor therefore sees how long the
//! oldest query has waited, and the list does not grow without limit: a container has at most one
//! query for a proof, because only the last one is still current.

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
    waiting: VecDeque<(Instant, InventoryQuery)>,
    /// Arrival of the query that the thread executes now. `None`: it executes none.
    in_progress: Option<Instant>,
    /// Arrival of the query for which [`QueryQueue::overdue`] has returned the delay.
    reported: Option<Instant>,
    is_closed: bool,
}

impl QueryQueue {
    /// Adds a query. It replaces an older proof for the same container.
    pub(super) fn push(&self, query: InventoryQuery) {
        let mut state = self.lock();
        if let InventoryQuery::Prove { key, .. } = &query {
            state.waiting.retain(
                |(_, other)| !matches!(other, InventoryQuery::Prove { key: of, .. } if of == key),
            );
        }
        state.waiting.push_back((Instant::now(), query));
        self.changed.notify_one();
    }

    /// Waits for the next query, which then is in progress. `None`: the queue is closed.
    pub(super) fn next(&self) -> Option<InventoryQuery> {
        let is_idle = |state: &mut QueueState| state.waiting.is_empty() && !state.is_closed;
        let waited = self.changed.wait_while(self.lock(), is_idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        let (arrived, query) = state.waiting.pop_front().filter(|_| !state.is_closed)?;
        state.in_progress = Some(arrived);
        Some(query)
    }

    /// Records that the query in progress is answered.
    pub(super) fn answered(&self) {
        self.lock().in_progress = None;
    }

    /// Returns how long the oldest query has waited, if this is at least `limit`. Returns it once
    /// for each query.
    pub(super) fn overdue(&self, limit: Duration) -> Option<Duration> {
        let mut state = self.lock();
        let first = || state.waiting.front().map(|(arrived, _)| *arrived);
        let oldest = state.in_progress.or_else(first)?;
        let waited = Some(oldest.elapsed()).filter(|waited| *waited >= limit)?;
        (state.reported.replace(oldest) != Some(oldest)).then_some(waited)
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
        let left: Vec<String> = (0..3).map(|_| format!("{:?}", queue.next().unwrap())).collect();
        assert_eq!(
            left,
            [InventoryQuery::Gpus, proof(1, 999), proof(2, 1_000)]
                .map(|query| format!("{query:?}"))
        );
        queue.close();
        assert!(queue.next().is_none());
    }

    #[test]
    fn oldest_query_is_overdue_once() {
        let queue = QueryQueue::default();
        assert_eq!(queue.overdue(Duration::ZERO), None);
        queue.push(InventoryQuery::Gpus);
        queue.push(InventoryQuery::Gpus);
        assert_eq!(queue.overdue(Duration::from_secs(3_600)), None);
        assert!(queue.overdue(Duration::ZERO).is_some());
        queue.next();
        assert_eq!(queue.overdue(Duration::ZERO), None, "it is the same query");
        queue.answered();
        assert!(queue.overdue(Duration::ZERO).is_some(), "the next query is overdue too");
        queue.next();
        queue.answered();
        assert_eq!(queue.overdue(Duration::ZERO), None);
    }
}
