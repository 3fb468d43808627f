//! The history of the node's containers on disk. It records when each container was in which state.
//!
//! ```text
//!  ViewObserver ──event, observe──> SpanRecorder (pure) ──ended and growing spans──> history thread ──> redb file
//!                                                         bounded queue, counts what it drops
//! ```
//!
//! ```text
//!  Opening ──file is open──> Open ──close, all spans are written──> Closed
//!     └────file cannot be opened──> Failed
//! ```
//!
//! A record (span) has the start and the end of a container's stay in one state, and the memory
//! that the container held in this time. Timeline and report are sums of records. The file has a
//! maximum size, and the oldest records are removed first. Recording never waits for the disk: only
//! the history thread opens, writes and closes the file, and a stalled disk blocks only this thread.

mod recorder;
pub mod report;
mod span;
mod store;

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use recorder::SpanRecorder;
pub use report::{UsageReport, UsageRow};
pub use span::StateSpan;
pub use store::{ControllerRuns, SpanStore, StoreError, StoreLimits};
use tokio::sync::watch;

use crate::{error_chain, schema};

/// Name of the history's file in the state folder.
pub const FILE: &str = "history.redb";
/// Maximum number of batches of spans that wait for the disk. Further batches are dropped and
/// counted.
const QUEUE: usize = 64;
/// Maximum time that a request for the history waits until the file is open. It is short, because
/// the file is open within milliseconds unless the disk stalls.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Sending end of the queue to the history thread, and the handle of that thread.
type Writer = (mpsc::SyncSender<Vec<StateSpan>>, JoinHandle<()>);

/// State of the history's file, which the history thread publishes.
#[derive(Clone, Debug)]
enum StoreState {
    Opening,
    Open(Arc<SpanStore>),
    Failed,
    Closed,
}

/// History of the containers of this node, stored on disk.
#[derive(Debug)]
pub struct NodeHistory {
    store: watch::Receiver<StoreState>,
    tape: Mutex<SpanRecorder>,
    writer: Mutex<Option<Writer>>,
    dropped: AtomicU64,
}

impl NodeHistory {
    /// Starts the history thread, and does not wait for it. The thread opens the file with `open`,
    /// and counts this start of a controller. It passes the counted runs to `counted`, or only this
    /// start if the file cannot be opened.
    ///
    /// # Errors
    /// [`StoreError::Thread`]: the history thread cannot be started.
    pub fn start(
        open: impl FnOnce() -> Result<SpanStore, StoreError> + Send + 'static,
        counted: impl FnOnce(ControllerRuns) + Send + 'static,
    ) -> Result<NodeHistory, StoreError> {
        let (publish, store) = watch::channel(StoreState::Opening);
        let (queue, batches) = mpsc::sync_channel::<Vec<StateSpan>>(QUEUE);
        let work = move || match open_and_count(open) {
            Ok((opened, runs)) => {
                counted(runs);
                publish.send_replace(StoreState::Open(Arc::clone(&opened)));
                write_all(&opened, &batches);
                // The last user of the file closes it, which waits for the disk. From here on, this
                // thread is the last user, or a read that is still in progress.
                publish.send_replace(StoreState::Closed);
            }
            Err(error) => {
                tracing::error!("history: cannot be recorded: {}", error_chain::chain(&error));
                counted(ControllerRuns { starts: 1, unexpected_ends: 0 });
                publish.send_replace(StoreState::Failed);
            }
        };
        let thread = std::thread::Builder::new().name("history".into()).spawn(work);
        let thread = thread.map_err(StoreError::Thread)?;
        Ok(NodeHistory {
            store,
            tape: Mutex::default(),
            writer: Mutex::new(Some((queue, thread))),
            dropped: AtomicU64::new(0),
        })
    }

    /// Waits until the file is open or cannot be opened, but at most [`OPEN_TIMEOUT`].
    pub async fn opened(&self) {
        let mut store = self.store.clone();
        let opened = store.wait_for(|state| !matches!(state, StoreState::Opening));
        let _ = tokio::time::timeout(OPEN_TIMEOUT, opened).await;
    }

    /// Returns the number of spans that were not written because the disk was too slow.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Records a container's change of state from an event.
    pub fn event(&self, event: &schema::Event) {
        if !self.has_failed() {
            self.tape().event(event);
        }
    }

    /// Records the current state and memory of all containers of the node.
    pub fn observe(&self, node: &schema::Node, now_ms: i64) {
        if self.has_failed() {
            return;
        }
        let spans = {
            let mut tape = self.tape();
            tape.observe(node, now_ms);
            tape.due(now_ms)
        };
        self.write(spans);
    }

    /// Writes all pending spans, records that the controller ends, and ends the history thread.
    /// Waits for the disk. Spans that are recorded after this call are dropped.
    pub fn close(&self) {
        let spans = self.tape().all();
        self.write(spans);
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((queue, thread)) = writer {
            drop(queue);
            let _ = thread.join();
        }
    }

    /// Returns the spans that overlap a time range, the oldest first. If `key` is given, only the
    /// spans of this container are returned.
    ///
    /// # Errors
    /// The file is not open, or cannot be read.
    pub fn spans(
        &self,
        since_ms: i64,
        until_ms: i64,
        key: Option<&str>,
    ) -> Result<Vec<StateSpan>, StoreError> {
        let mut spans = self.store()?.spans(since_ms, until_ms, key)?;
        // A growing span is newer than its written version, and replaces it.
        for span in self.tape().all() {
            if !span.overlaps(since_ms, until_ms) || key.is_some_and(|key| key != span.key) {
                continue;
            }
            match spans
                .iter_mut()
                .find(|known| known.key == span.key && known.from_ms == span.from_ms)
            {
                Some(known) => *known = span,
                None => spans.push(span),
            }
        }
        Ok(spans)
    }

    /// Sums up the use of the GPUs in a time range.
    ///
    /// # Errors
    /// The file is not open, or cannot be read.
    pub fn report(&self, since_ms: i64, until_ms: i64) -> Result<UsageReport, StoreError> {
        let spans = self.spans(since_ms, until_ms, None)?;
        Ok(UsageReport::sum(&spans, since_ms, until_ms))
    }

    fn write(&self, spans: Vec<StateSpan>) {
        if spans.is_empty() {
            return;
        }
        let count = spans.len() as u64;
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = writer.as_ref().is_some_and(|(queue, _)| queue.try_send(spans).is_ok());
        if !taken {
            self.dropped.fetch_add(count, Ordering::Relaxed);
        }
    }

    fn store(&self) -> Result<Arc<SpanStore>, StoreError> {
        match &*self.store.borrow() {
            StoreState::Open(store) => Ok(Arc::clone(store)),
            StoreState::Opening => Err(StoreError::Opening),
            StoreState::Failed => Err(StoreError::NotOpen),
            StoreState::Closed => Err(StoreError::Closed),
        }
    }

    fn has_failed(&self) -> bool {
        matches!(&*self.store.borrow(), StoreState::Failed)
    }

    fn tape(&self) -> std::sync::MutexGuard<'_, SpanRecorder> {
        self.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_and_count(
    open: impl FnOnce() -> Result<SpanStore, StoreError>,
) -> Result<(Arc<SpanStore>, ControllerRuns), StoreError> {
    let store = open()?;
    let runs = store.count_start()?;
    Ok((Arc::new(store), runs))
}

/// Writes the spans that arrive in the queue. When the queue is closed, records that the controller
/// ends.
fn write_all(store: &SpanStore, batches: &mpsc::Receiver<Vec<StateSpan>>) {
    const GATHER: Duration = Duration::from_millis(500);
    while let Ok(mut batch) = batches.recv() {
        // All batches that arrive within GATHER are written together.
        while let Ok(more) = batches.recv_timeout(GATHER) {
            batch.extend(more);
        }
        if let Err(error) = store.write(&batch) {
            tracing::warn!("history: cannot write records: {}", error_chain::chain(&error));
        }
    }
    if let Err(error) = store.record_end() {
        tracing::warn!("history: cannot write records: {}", error_chain::chain(&error));
    }
}

#[cfg(test)]
mod tests;
