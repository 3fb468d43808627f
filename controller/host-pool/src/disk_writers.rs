//! The threads that write the disk file of one process. Each process has its own, so a disk that
//! does not respond delays no other process, and no allocation of memory.

use std::{
    io,
    os::fd::BorrowedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use affinode_proto::wire::host_pool::{FromHostPool, MAX_PENDING};

use crate::{
    client::Client,
    disk_file::{DiskFile, Piece, PieceBuffer, StoreError},
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
}

/// What the threads of one process share.
struct Work {
    pool: Arc<Pool>,
    client: Arc<Client>,
    file: Arc<DiskFile>,
    pieces: Mutex<Receiver<Piece>>,
    has_failed: AtomicBool,
}

impl DiskWriters {
    /// Starts the threads.
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
        let writers = DiskWriters { file, pieces: sender };
        // The threads that were started have their own references.
        pool.let_go_all(work);
        Ok(writers)
    }

    /// Adds a piece. Waits while [`MAX_PENDING`] pieces wait already. Returns false if no thread is
    /// left.
    pub fn push(&self, piece: Piece) -> bool {
        self.pieces.send(piece).is_ok()
    }
}

/// Body of a thread.
fn run(work: Arc<Work>) {
    let mut buffer = PieceBuffer::new();
    loop {
        let next = work.pieces.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(piece) = next else { break };
        let stored = catch_unwind(AssertUnwindSafe(|| work.store(&piece, &mut buffer)));
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
    let pool = Arc::clone(&work.pool);
    pool.let_go_all(work);
}

impl Work {
    fn store(
        &self,
        piece: &Piece,
        buffer: &mut PieceBuffer,
    ) -> Result<affinode_proto::wire::host_pool::DiskTag, StoreError> {
        let allowed_bytes = self.client.disk_allowance.bytes();
        self.file.store(self.client.memory.file(), piece, allowed_bytes, buffer)
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
