//! The threads that write the disk file of one process. Each process has its own, so a disk that
//! does not respond delays no other process, and no allocation of memory.

use std::{
    io,
    os::fd::BorrowedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use affinode_proto::wire::host_pool::{DiskTag, FromHostPool, MAX_PENDING};

use crate::{
    client::Client,
    disk_file::{DiskFile, Piece, StoreError},
    pool::{Pool, spawn},
    socket,
};

/// Number of threads for each process. While one encrypts, another writes.
const THREADS: usize = 3;

/// The threads, and the file that they write. They end when this value is dropped.
#[derive(Debug)]
pub struct DiskWriters {
    /// The disk file of the process.
    pub file: Arc<DiskFile>,
    pieces: SyncSender<Piece>,
    work: Weak<Work>,
}

/// The threads of an earlier file, which may still write pieces that were requested before.
#[derive(Debug)]
pub struct EarlierWriters(Weak<Work>);

impl EarlierWriters {
    /// Whether all threads have ended.
    pub fn have_ended(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// What the threads of one process share.
#[derive(Debug)]
struct Work {
    pool: Arc<Pool>,
    client: Arc<Client>,
    file: Arc<DiskFile>,
    pieces: Mutex<Receiver<Piece>>,
    has_failed: AtomicBool,
}

impl DiskWriters {
    /// Starts the threads that write a file.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        pool: &Arc<Pool>,
        client: &Arc<Client>,
        file: DiskFile,
    ) -> io::Result<DiskWriters> {
        let (sender, receiver) = sync_channel(MAX_PENDING);
        let file = Arc::new(file);
        let work = Arc::new(Work {
            pool: Arc::clone(pool),
            client: Arc::clone(client),
            file: Arc::clone(&file),
            pieces: Mutex::new(receiver),
            has_failed: AtomicBool::new(false),
        });
        for number in 0..THREADS {
            let own = Arc::clone(&work);
            match spawn("disk", move || run(own)) {
                // Fewer threads suffice.
                Err(error) if number > 0 => tracing::warn!(%error, "cannot start a disk thread"),
                started => started?,
            }
        }
        let writers = DiskWriters { file, pieces: sender, work: Arc::downgrade(&work) };
        // The threads that were started have their own references.
        pool.let_go_all(work);
        Ok(writers)
    }

    /// Ends the use of the file: the threads end after the pieces that were requested, and the last
    /// of them frees the file's space on the disk.
    pub fn close(self) -> EarlierWriters {
        self.file.close();
        EarlierWriters(self.work)
    }

    /// Adds a piece. Waits while [`MAX_PENDING`] pieces wait already. Returns false if no thread is
    /// left.
    pub fn push(&self, piece: Piece) -> bool {
        self.pieces.send(piece).is_ok()
    }
}

/// Body of a thread.
fn run(work: Arc<Work>) {
    loop {
        let next = work.pieces.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(piece) = next else { break };
        let stored = catch_unwind(AssertUnwindSafe(|| work.store(&piece)));
        let tag = stored.ok().and_then(|stored| work.logged(stored));
        let reply = FromHostPool::Stored {
            offset: piece.offset,
            done: tag.is_some(),
            tag: tag.unwrap_or_default(),
        };
        if socket::send(&work.client.socket, &reply.encode(), None::<BorrowedFd<'_>>).is_err() {
            work.pool.end(&work.client);
        }
    }
    let (pool, file) = (Arc::clone(&work.pool), Arc::clone(&work.file));
    pool.let_go_all(work);
    // The last reference deletes the file, which can take long. No lock is held.
    drop(file);
}

impl Work {
    fn store(&self, piece: &Piece) -> Result<DiskTag, StoreError> {
        let allowed_bytes = self.client.disk_allowance.bytes();
        self.file.store(self.client.memory.file(), piece, allowed_bytes)
    }

    /// Logs the first failure of the process.
    fn logged<T>(&self, stored: Result<T, StoreError>) -> Option<T> {
        if let Err(error) = &stored
            && !self.has_failed.swap(true, Ordering::Relaxed)
        {
            let process = self.client.process;
            let error: &dyn std::error::Error = error;
            tracing::warn!(
                error,
                "process {process}: its content stays in host memory, because it cannot be stored \
                 on disk"
            );
        }
        stored.ok()
    }
}
