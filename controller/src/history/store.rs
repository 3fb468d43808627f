//! The file: spans by their begin. A file that cannot be understood is set aside and a
//! new one begun; a history is worth less than a running controller.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition, TableError,
};

use super::{StateSpan, recorder::MAX_MS};

/// (begin in milliseconds, key) to a span in JSON.
const SPANS: TableDefinition<(u64, &str), &[u8]> = TableDefinition::new("spans-1");
/// Numbers by name.
const NUMBERS: TableDefinition<&str, u64> = TableDefinition::new("numbers-1");
/// Memory for pages of the file.
const CACHE_BYTES: usize = 4 << 20;
/// The most spans of one answer.
const MAX_SPANS: usize = 200_000;
/// Writes between two looks at size and age.
const CLEAN_EVERY: u64 = 20;

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    /// Nothing older.
    pub keep_ms: i64,
    /// Nothing more.
    pub max_bytes: u64,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder or the file.
    #[error("{what} {path}")]
    File {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The writer cannot be started.
    #[error("cannot start the writer of the history")]
    Thread(#[source] io::Error),
    /// The file's contents.
    #[error("the history cannot be read or written")]
    Database(#[source] Box<redb::Error>),
    /// A record.
    #[error("a record of the history cannot be written")]
    Record(#[source] serde_json::Error),
}

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> StoreError {
        StoreError::Database(Box::new(error.into()))
    }
}

/// The file.
#[derive(Debug)]
pub struct SpanStore {
    database: Database,
    limits: StoreLimits,
    writes: std::sync::atomic::AtomicU64,
}

impl SpanStore {
    /// Opens or begins it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(path: &Path, limits: StoreLimits) -> Result<SpanStore, StoreError> {
        let file = |what| move |source| StoreError::File { what, path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(file("cannot make the folder of"))?;
        }
        let create = || Database::builder().set_cache_size(CACHE_BYTES).create(path);
        let database = match create() {
            Ok(database) => database,
            // Another controller or a report has it: wait for no one.
            Err(error @ redb::DatabaseError::DatabaseAlreadyOpen) => return Err(error.into()),
            Err(error) => {
                let aside = path.with_extension("bad");
                tracing::warn!("{} is set aside as {}: {error}", path.display(), aside.display());
                fs::rename(path, &aside).map_err(file("cannot set aside"))?;
                create()?
            }
        };
        Ok(SpanStore { database, limits, writes: 0.into() })
    }

    /// Counts one more start of a controller: how many there were.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn count_start(&self) -> Result<u64, StoreError> {
        let transaction = self.database.begin_write()?;
        let starts = {
            let mut numbers = transaction.open_table(NUMBERS)?;
            let starts = numbers.get("starts")?.map_or(0, |known| known.value()) + 1;
            numbers.insert("starts", starts)?;
            starts
        };
        transaction.commit()?;
        Ok(starts)
    }

    /// Writes spans; one of the same container and begin replaces the one before.
    ///
    /// # Errors
    /// [`StoreError`].
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

    /// Spans that overlap a time, oldest first.
    ///
    /// # Errors
    /// [`StoreError`].
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
        // No span is longer, so none that began earlier reaches into the time.
        let (first, end) = (begin(since_ms - MAX_MS - 60_000), begin(until_ms));
        let mut spans = Vec::new();
        for entry in table.range((first, "")..(end, ""))? {
            let (name, bytes) = entry?;
            if key.is_some_and(|key| key != name.value().1) {
                continue;
            }
            // A record that another version wrote, or that is damaged, is left out.
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

    /// Bytes in use in the file.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn used_bytes(&self) -> Result<u64, StoreError> {
        let transaction = self.database.begin_write()?;
        let stats = transaction.stats()?;
        let bytes = stats.allocated_pages() * stats.page_size() as u64;
        transaction.abort()?;
        Ok(bytes)
    }

    /// What is too old goes, and of the oldest as much as brings it below the limit.
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
                // None: all of it is surplus.
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
    fn what_was_written_is_there_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("h.redb");
        let store = SpanStore::open(&path, LIMITS).unwrap();
        assert_eq!(store.count_start().unwrap(), 1);
        store.write(&[span("a", 1_000, 2_000), span("b", 3_000, 4_000)]).unwrap();
        store.write(&[span("a", 1_000, 9_000)]).unwrap();
        drop(store);
        let store = SpanStore::open(&path, LIMITS).unwrap();
        assert_eq!(store.count_start().unwrap(), 2);
        let found = store.spans(5_000, 10_000, None).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].key.as_str(), found[0].to_ms), ("a", 9_000));
        assert_eq!(store.spans(0, 10_000, Some("b")).unwrap().len(), 1);
    }

    #[test]
    fn the_oldest_goes_when_it_is_too_much_or_too_old() {
        let folder = tempfile::tempdir().unwrap();
        let small = StoreLimits { keep_ms: 1_000_000_000_000, max_bytes: 1 << 20 };
        let store = SpanStore::open(&folder.path().join("h.redb"), small).unwrap();
        for round in 0..200_i64 {
            let spans: Vec<StateSpan> =
                (0..100).map(|n| span(&n.to_string(), round * 1_000, round * 1_000 + 1)).collect();
            store.write(&spans).unwrap();
        }
        // 20,000 records of 600 bytes would be 12 MB.
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
