//! Stores the history in a file of spans, ordered by their start. A file that cannot be read is
//! renamed and a new file is created, because the controller must run even without its history.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition, TableError,
};

use super::{StateSpan, recorder::MAX_MS};

/// Database table of spans in JSON. The key is the span's start in milliseconds and the key of the
/// container.
const SPANS: TableDefinition<(u64, &str), &[u8]> = TableDefinition::new("spans-1");
/// Database table of the history's counters, by name.
const NUMBERS: TableDefinition<&str, u64> = TableDefinition::new("numbers-1");
/// Name of the counter of controller starts.
const STARTS: &str = "starts";
/// Name of the counter of controllers that ended without recording their end.
const UNEXPECTED_ENDS: &str = "unexpected-ends";
/// Name of the flag that is 1 from a controller's start until it records its end.
const RUNNING: &str = "running";
/// Memory for cached pages of the file, in bytes.
const CACHE_BYTES: usize = 4 << 20;
/// Maximum number of spans that one query returns.
const MAX_SPANS: usize = 200_000;
/// Number of writes between two checks of the file's size and the spans' age.
const CLEAN_EVERY: u64 = 20;

/// Numbers of starts and of unexpected ends of controllers on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerRuns {
    /// Number of starts, including the start of this controller.
    pub starts: u64,
    /// Number of unexpected ends: a crash, a SIGKILL, or the loss of the machine. The controller
    /// also ends if there are no containers, on a request, or by a signal that it handles. These
    /// ends do not count.
    pub unexpected_ends: u64,
}

/// Limits for the age and the size of the stored history.
#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    /// Maximum age of a stored span, in milliseconds.
    pub keep_ms: i64,
    /// Maximum size of the history's file, in bytes.
    pub max_bytes: u64,
}

/// Reason why the history cannot be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An operation on the folder or the file of the history failed.
    #[error("{what} {path}")]
    File {
        /// Text that names the failed operation.
        what: &'static str,
        /// Path of the folder or file.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The history thread cannot be started.
    #[error("cannot start the thread that writes the history")]
    Thread(#[source] io::Error),
    /// The history thread has not opened the file yet.
    #[error("the history is still being opened; try again, and check the disk of history.dir")]
    Opening,
    /// The history thread could not open the file.
    #[error(
        "there is no history on disk: check history.dir in the configuration, and see the \
         controller's log"
    )]
    NotOpen,
    /// The history thread has closed the file.
    #[error("the controller is shutting down; try again")]
    Closed,
    /// The content of the file cannot be read or written.
    #[error("a read or write of the database in the history's folder (setting history.dir) failed")]
    Database(#[source] Box<redb::Error>),
    /// A span cannot be encoded as JSON.
    #[error("cannot encode a record of the history")]
    Record(#[source] serde_json::Error),
}

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> StoreError {
        StoreError::Database(Box::new(error.into()))
    }
}

/// The open file of the history, and its limits.
#[derive(Debug)]
pub struct SpanStore {
    database: Database,
    limits: StoreLimits,
    writes: std::sync::atomic::AtomicU64,
}

impl SpanStore {
    /// Opens the history's file, or creates it.
    ///
    /// # Errors
    /// [`StoreError`]: another process has the file open, or the file cannot be created.
    pub fn open(path: &Path, limits: StoreLimits) -> Result<SpanStore, StoreError> {
        let file = |what| move |source| StoreError::File { what, path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(file("cannot create the folder of"))?;
        }
        let create = || Database::builder().set_cache_size(CACHE_BYTES).create(path);
        let database = match create() {
            Ok(database) => database,
            // Another controller or a report has the file open. This controller does not wait for
            // it.
            Err(error @ redb::DatabaseError::DatabaseAlreadyOpen) => return Err(error.into()),
            Err(error) => {
                let aside = path.with_extension("bad");
                tracing::warn!(
                    "history: {} cannot be read and is renamed to {}: {error}",
                    path.display(),
                    aside.display()
                );
                fs::rename(path, &aside).map_err(file("cannot rename"))?;
                create()?
            }
        };
        Ok(SpanStore { database, limits, writes: 0.into() })
    }

    /// Counts a start of a controller. Also counts an unexpected end if the previous controller did
    /// not record its end.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be written.
    pub fn count_start(&self) -> Result<ControllerRuns, StoreError> {
        let transaction = self.database.begin_write()?;
        let runs = {
            let mut numbers = transaction.open_table(NUMBERS)?;
            let number = |name| Ok::<_, StoreError>(numbers.get(name)?.map_or(0, |n| n.value()));
            let runs = ControllerRuns {
                starts: number(STARTS)? + 1,
                unexpected_ends: number(UNEXPECTED_ENDS)? + number(RUNNING)?,
            };
            numbers.insert(STARTS, runs.starts)?;
            numbers.insert(UNEXPECTED_ENDS, runs.unexpected_ends)?;
            numbers.insert(RUNNING, 1)?;
            runs
        };
        transaction.commit()?;
        Ok(runs)
    }

    /// Records that the controller ends as intended, by itself or on request.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be written.
    pub fn record_end(&self) -> Result<(), StoreError> {
        let transaction = self.database.begin_write()?;
        transaction.open_table(NUMBERS)?.insert(RUNNING, 0)?;
        transaction.commit()?;
        Ok(())
    }

    /// Writes spans to the file. A span replaces the stored span with the same container and start.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be written.
    pub fn write(&self, spans: &[StateSpan]) -> Result<(), StoreError> {
        let transaction = self.database.begin_write()?;
        {
            let mut table = transaction.open_table(SPANS)?;
            for span in spans {
                let bytes = serde_json::to_vec(span).map_err(StoreError::Record)?;
                table.insert((begin(span.from_ms), span.key.as_str()), bytes.as_slice())?;
            }
        }
        transaction.commit()?;
        let writes = self.writes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if writes.is_multiple_of(CLEAN_EVERY) {
            self.clean(spans.iter().map(|span| span.to_ms).max().unwrap_or(0))?;
        }
        Ok(())
    }

    /// Returns the spans that overlap a time range, the oldest first.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be read.
    pub fn spans(
        &self,
        since_ms: i64,
        until_ms: i64,
        key: Option<&str>,
    ) -> Result<Vec<StateSpan>, StoreError> {
        let transaction = self.database.begin_read()?;
        let table = match transaction.open_table(SPANS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        // No span is longer than MAX_MS, so a span with an earlier start cannot overlap the range.
        // A minute is added for safety.
        let (first, end) = (begin(since_ms - MAX_MS - 60_000), begin(until_ms));
        let mut spans = Vec::new();
        for entry in table.range((first, "")..(end, ""))? {
            let (name, bytes) = entry?;
            if key.is_some_and(|key| key != name.value().1) {
                continue;
            }
            // A record that is damaged or of another version is ignored.
            if let Ok(span) = serde_json::from_slice::<StateSpan>(bytes.value())
                && span.overlaps(since_ms, until_ms)
            {
                spans.push(span);
                if spans.len() == MAX_SPANS {
                    break;
                }
            }
        }
        Ok(spans)
    }

    /// Returns the number of bytes of the file that are in use.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be read.
    pub fn used_bytes(&self) -> Result<u64, StoreError> {
        let transaction = self.database.begin_write()?;
        let stats = transaction.stats()?;
        let bytes = stats.allocated_pages() * stats.page_size() as u64;
        transaction.abort()?;
        Ok(bytes)
    }

    /// Removes spans that are too old. If the file uses more than its maximum size, also removes
    /// the oldest spans, until about four fifths of the maximum size are in use.
    fn clean(&self, now_ms: i64) -> Result<(), StoreError> {
        let used = self.used_bytes()?;
        let most = self.limits.max_bytes;
        let transaction = self.database.begin_write()?;
        {
            let mut table = transaction.open_table(SPANS)?;
            let mut cut = begin(now_ms - self.limits.keep_ms);
            if used > most {
                let goal = most / 5 * 4;
                let surplus = table.len()?.saturating_mul(used - goal) / used;
                let last = table.iter()?.nth(usize::try_from(surplus).unwrap_or(usize::MAX));
                // If there is no entry after the surplus, all spans must be removed.
                cut = match last {
                    Some(entry) => cut.max(entry?.0.value().0 + 1),
                    None => u64::MAX,
                };
            }
            table.retain_in(..(cut, ""), |_, _| false)?;
        }
        transaction.commit()?;
        Ok(())
    }
}

fn begin(ms: i64) -> u64 {
    u64::try_from(ms).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: StoreLimits = StoreLimits { keep_ms: 1_000_000_000, max_bytes: 64 << 20 };

    fn span(key: &str, from_ms: i64, to_ms: i64) -> StateSpan {
        StateSpan {
            key: key.into(),
            from_ms,
            to_ms,
            reason: "x".repeat(400),
            ..StateSpan::default()
        }
    }

    #[test]
    fn spans_persist_across_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("h.redb");
        let store = SpanStore::open(&path, LIMITS).unwrap();
        assert_eq!(store.count_start().unwrap().starts, 1);
        store.write(&[span("a", 1_000, 2_000), span("b", 3_000, 4_000)]).unwrap();
        store.write(&[span("a", 1_000, 9_000)]).unwrap();
        drop(store);
        let store = SpanStore::open(&path, LIMITS).unwrap();
        assert_eq!(store.count_start().unwrap().starts, 2);
        let found = store.spans(5_000, 10_000, None).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].key.as_str(), found[0].to_ms), ("a", 9_000));
        assert_eq!(store.spans(0, 10_000, Some("b")).unwrap().len(), 1);
    }

    #[test]
    fn only_unrecorded_ends_are_unexpected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("h.redb");
        let run = |ends: bool| {
            let store = SpanStore::open(&path, LIMITS).unwrap();
            let runs = store.count_start().unwrap();
            if ends {
                store.record_end().unwrap();
            }
            (runs.starts, runs.unexpected_ends)
        };
        assert_eq!(run(true), (1, 0));
        assert_eq!(run(true), (2, 0), "the one before ended by itself");
        assert_eq!(run(false), (3, 0));
        assert_eq!(run(false), (4, 1), "the one before was killed");
        assert_eq!(run(true), (5, 2));
        assert_eq!(run(true), (6, 2));
    }

    #[test]
    fn old_and_surplus_spans_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let small = StoreLimits { keep_ms: 1_000_000_000_000, max_bytes: 1 << 20 };
        let store = SpanStore::open(&folder.path().join("h.redb"), small).unwrap();
        for round in 0..200_i64 {
            let spans: Vec<StateSpan> =
                (0..100).map(|n| span(&n.to_string(), round * 1_000, round * 1_000 + 1)).collect();
            store.write(&spans).unwrap();
        }
        // The test has written 20,000 records of 600 bytes, which is 12 MB.
        assert!(store.used_bytes().unwrap() < 4 << 20);
        let found = store.spans(0, i64::MAX, None).unwrap();
        assert!(found.iter().any(|span| span.from_ms == 199_000), "the newest stays");
        assert!(found.iter().all(|span| span.from_ms > 0), "the oldest went");

        let short = StoreLimits { keep_ms: 10_000, ..LIMITS };
        let store = SpanStore::open(&folder.path().join("s.redb"), short).unwrap();
        store.write(&[span("a", 1_000, 2_000), span("a", 100_000, 100_001)]).unwrap();
        assert_eq!(store.spans(0, i64::MAX, None).unwrap().len(), 1);
    }

    #[test]
    fn a_damaged_file_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("h.redb");
        fs::write(&path, b"this is no history".repeat(1000)).unwrap();
        let store = SpanStore::open(&path, LIMITS).unwrap();
        assert!(store.spans(0, i64::MAX, None).unwrap().is_empty());
        assert!(path.with_extension("bad").exists());
    }
}
