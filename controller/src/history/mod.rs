//! The history of the node's containers on disk. It records when each container was in which state.
//!
//! ```text
//!  ViewObserver ──event, observe──> SpanRecorder (pure) ──ended and growing spans──> writer thread ──> redb file
//!                                                         bounded queue, counts what it drops
//! ```
//!
//! A record (span) has the start and the end of a container's stay in one state, and the memory
//! that the container held in this time. Timeline and report are sums of records. The file has a
//! maximum size, and the oldest records are removed first. Recording never waits for the disk.

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
pub use store::{ControllerRuns, SpanStore, StoreError, StoreLimits};

use crate::schema;

/// Name of the history's file in the state folder.
pub const FILE: &str = "history.redb";
/// Maximum number of batches of spans that wait for the disk. Further batches are dropped and
/// counted.
const QUEUE: usize = 64;

/// Sending end of the queue to the thread that writes spans, and the handle of that thread.
type Writer = (mpsc::SyncSender<Vec<StateSpan>>, JoinHandle<()>);

/// History of the containers of this node, stored on disk.
#[derive(Debug)]
pub struct NodeHistory {
    store: std::sync::Arc<SpanStore>,
    tape: Mutex<SpanRecorder>,
    writer: Mutex<Option<Writer>>,
    dropped: AtomicU64,
    runs: ControllerRuns,
}

impl NodeHistory {
    /// Opens or creates the history's file in a folder, and counts this start of a controller.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be opened, or the writer thread cannot be started.
    pub fn open(folder: &Path, limits: StoreLimits) -> Result<NodeHistory, StoreError> {
        let store = std::sync::Arc::new(SpanStore::open(&folder.join(FILE), limits)?);
        let runs = store.count_start()?;
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
            runs,
        })
    }

    /// Returns the numbers of controller starts and of unexpected ends that the history has
    /// counted, including this start.
    #[must_use]
    pub fn runs(&self) -> ControllerRuns {
        self.runs
    }

    /// Returns the number of spans that were not written because the disk was too slow.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Records a container's change of state from an event.
    pub fn event(&self, event: &schema::Event) {
        self.tape().event(event);
    }

    /// Records the current state and memory of all containers of the node.
    pub fn observe(&self, node: &schema::Node, now_ms: i64) {
        let spans = {
            let mut tape = self.tape();
            tape.observe(node, now_ms);
            tape.due(now_ms)
        };
        self.write(spans);
    }

    /// Writes all pending spans, ends the writer thread, and records that the controller ends.
    /// Spans that are recorded after this call are dropped.
    pub fn close(&self) {
        let spans = self.tape().all();
        self.write(spans);
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((queue, thread)) = writer {
            drop(queue);
            let _ = thread.join();
        }
        if let Err(error) = self.store.record_end() {
            tracing::warn!("history: cannot write records: {}", crate::error_chain::chain(&error));
        }
    }

    /// Returns the spans that overlap a time range, the oldest first. If `key` is given, only the
    /// spans of this container are returned.
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
        // All batches that arrive within GATHER are written together.
        while let Ok(more) = batches.recv_timeout(GATHER) {
            batch.extend(more);
        }
        if let Err(error) = store.write(&batch) {
            tracing::warn!("history: cannot write records: {}", crate::error_chain::chain(&error));
        }
    }
}
