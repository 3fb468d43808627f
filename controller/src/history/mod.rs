//! What was, on disk: spans of time that each container spent in a state.
//!
//! ```text
//!  observer ──spans──> [`tape`] (pure) ──finished and growing spans──> writer thread ──> redb file
//!                                                                       bounded queue, counts what it drops
//! ```
//!
//! One record says from when to when a container was in a state, and what it held
//! meanwhile. Timeline and report are sums over these. The file has a fixed most size;
//! the oldest goes first. Whoever feeds it never waits for the disk.

mod recorder;
pub mod report;
mod span;
mod store;

use std::{
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use recorder::SpanRecorder;
pub use report::{UsageReport, UsageRow};
pub use span::StateSpan;
pub use store::{SpanStore, StoreError, StoreLimits};

use crate::schema;

/// Name of the file in the state folder.
pub const FILE: &str = "history.redb";
/// Batches that may wait for the disk.
const QUEUE: usize = 64;

/// The thread that writes, and the way to it.
type Writer = (mpsc::SyncSender<Vec<StateSpan>>, JoinHandle<()>);

/// The history of this node.
#[derive(Debug)]
pub struct NodeHistory {
    store: std::sync::Arc<SpanStore>,
    tape: Mutex<SpanRecorder>,
    writer: Mutex<Option<Writer>>,
    dropped: AtomicU64,
    starts: u64,
}

impl NodeHistory {
    /// Opens the file in a folder, or begins a new one; counts this start.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(folder: &Path, limits: StoreLimits) -> Result<NodeHistory, StoreError> {
        let store = std::sync::Arc::new(SpanStore::open(&folder.join(FILE), limits)?);
        let starts = store.count_start()?;
        let (queue, batches) = mpsc::sync_channel::<Vec<StateSpan>>(QUEUE);
        let writing = std::sync::Arc::clone(&store);
        let thread = std::thread::Builder::new()
            .name("history".into())
            .spawn(move || write_all(&writing, &batches))
            .map_err(StoreError::Thread)?;
        Ok(NodeHistory {
            store,
            tape: Mutex::default(),
            writer: Mutex::new(Some((queue, thread))),
            dropped: AtomicU64::new(0),
            starts,
        })
    }

    /// Times that a controller opened this history, this one included.
    #[must_use]
    pub fn starts(&self) -> u64 {
        self.starts
    }

    /// Spans that were not written because the disk was too slow.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Takes a change of state.
    pub fn event(&self, event: &schema::Event) {
        self.tape().event(event);
    }

    /// Takes a look at the node.
    pub fn observe(&self, node: &schema::Node, now_ms: i64) {
        let spans = {
            let mut tape = self.tape();
            tape.observe(node, now_ms);
            tape.due(now_ms)
        };
        self.write(spans);
    }

    /// Writes what is known and ends the writer. Later spans are dropped.
    pub fn close(&self) {
        let spans = self.tape().all();
        self.write(spans);
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((queue, thread)) = writer {
            drop(queue);
            let _ = thread.join();
        }
    }

    /// Spans that overlap a time, oldest first; those of one container, or all.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn spans(
        &self,
        since_ms: i64,
        until_ms: i64,
        key: Option<&str>,
    ) -> Result<Vec<StateSpan>, StoreError> {
        let mut spans = self.store.spans(since_ms, until_ms, key)?;
        // What is not written yet replaces what was written of the same spans.
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

    /// What GPUs were used for in a time.
    ///
    /// # Errors
    /// The file cannot be read.
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

    fn tape(&self) -> std::sync::MutexGuard<'_, SpanRecorder> {
        self.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn write_all(store: &SpanStore, batches: &mpsc::Receiver<Vec<StateSpan>>) {
    const GATHER: Duration = Duration::from_millis(500);
    while let Ok(mut batch) = batches.recv() {
        // One write for all that comes within a moment.
        while let Ok(more) = batches.recv_timeout(GATHER) {
            batch.extend(more);
        }
        if let Err(error) = store.write(&batch) {
            tracing::warn!("the history is not written: {}", crate::error_chain::chain(&error));
        }
    }
}
