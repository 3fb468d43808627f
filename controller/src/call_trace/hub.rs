//! Passes batches of traced CUDA calls from the sampler to watchers. Each request renews the
//! watcher's subscription, which otherwise expires.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use affinode_core::Key;
use tokio::{sync::Notify, time::Instant};

use super::CallTraceBatch;

/// Number of batches that are kept for watchers. They cover ten seconds.
const KEPT: usize = 50;
/// Maximum time that a watcher's request waits for a batch.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// Time for which a watcher's subscription lasts after the time limit of its latest request.
const WATCHER_TTL: Duration = Duration::from_secs(2);

/// Containers that a watcher observes: one container, or all containers (`None`).
pub type Scope = Option<Key>;

/// Stores the latest batches, and the scopes (containers) that are watched now.
#[derive(Debug, Default)]
pub struct CallTraceHub {
    inner: Mutex<CallTraceHubState>,
    added: Notify,
    asked: Notify,
}

#[derive(Debug, Default)]
struct CallTraceHubState {
    batches: VecDeque<Arc<CallTraceBatch>>,
    last: u64,
    /// For each watched scope, the time at which its subscription expires.
    watched: HashMap<Scope, Instant>,
}

impl CallTraceHub {
    /// Returns the batches of a scope with numbers higher than `sequence`. If there are none, waits
    /// at most `wait` for the next batch. If `sequence` is `None` or higher than the number of the
    /// latest batch, returns only batches that arrive later.
    pub async fn after(
        &self,
        scope: &Scope,
        sequence: Option<u64>,
        wait: Duration,
    ) -> Vec<Arc<CallTraceBatch>> {
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        let after = {
            let mut inner = self.lock();
            let until = inner.watched.entry(scope.clone()).or_insert(deadline);
            *until = (*until).max(deadline + WATCHER_TTL);
            sequence.unwrap_or(inner.last).min(inner.last)
        };
        self.asked.notify_one();
        loop {
            let added = self.added.notified();
            tokio::pin!(added);
            // The wait is registered before the check, so that a batch between check and wait is
            // noticed.
            added.as_mut().enable();
            let found: Vec<Arc<CallTraceBatch>> = {
                let inner = self.lock();
                inner.batches.iter().filter(|batch| batch.sequence > after).cloned().collect()
            };
            if !found.is_empty() || tokio::time::timeout_at(deadline, added).await.is_err() {
                return found.into_iter().map(|batch| narrowed(batch, scope)).collect();
            }
        }
    }

    /// Returns the scopes that are watched now. The list is empty if there is no watcher.
    pub(crate) fn watched(&self) -> Vec<Scope> {
        let now = Instant::now();
        let mut inner = self.lock();
        inner.watched.retain(|_, until| *until > now);
        inner.watched.keys().cloned().collect()
    }

    /// Waits until a watcher sends the next request.
    pub(super) async fn asked(&self) {
        self.asked.notified().await;
    }

    /// Adds a batch from the sampler and sets its number.
    pub(crate) fn add(&self, batch: CallTraceBatch) {
        {
            let mut inner = self.lock();
            inner.last += 1;
            let sequence = inner.last;
            if inner.batches.len() == KEPT {
                inner.batches.pop_front();
            }
            inner.batches.push_back(Arc::new(CallTraceBatch { sequence, ..batch }));
        }
        self.added.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, CallTraceHubState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn narrowed(batch: Arc<CallTraceBatch>, scope: &Scope) -> Arc<CallTraceBatch> {
    match scope {
        None => batch,
        Some(key) => Arc::new(batch.of(key.as_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call_trace::ProcessCalls;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(digit: char) -> Key {
        Key::parse(&digit.to_string().repeat(32)).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_subscribes_until_its_ttl() {
        let hub = CallTraceHub::default();
        assert!(hub.watched().is_empty());
        assert!(hub.after(&Some(key('a')), None, SECOND).await.is_empty());
        hub.asked().await;
        assert_eq!(hub.watched(), [Some(key('a'))]);
        tokio::time::advance(WATCHER_TTL + SECOND).await;
        assert!(hub.watched().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_gets_new_batches_of_its_scope() {
        let hub = CallTraceHub::default();
        let process = |digit| ProcessCalls { key: key(digit).to_string(), ..Default::default() };
        let batch = || CallTraceBatch {
            processes: vec![process('a'), process('b')],
            ..CallTraceBatch::default()
        };
        hub.add(batch());
        assert!(hub.after(&None, None, SECOND).await.is_empty(), "it was before");
        hub.add(batch());
        let new = hub.after(&Some(key('b')), Some(1), SECOND).await;
        assert_eq!((new.len(), new[0].sequence, new[0].processes.len()), (1, 2, 1));
        assert!(hub.after(&None, Some(99), SECOND).await.is_empty(), "another controller's");
        for _ in 0..2 * KEPT {
            hub.add(batch());
        }
        assert_eq!(hub.after(&None, Some(0), SECOND).await.len(), KEPT);
    }
}
