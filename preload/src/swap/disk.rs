//! Moves the content of an offloaded process from the host pool's memory to a disk file, so that
//! the memory becomes free. `disk_restore` copies it back to device memory.
//!
//! ```text
//! chunk:  in memory ──agent──> not registered ──storing thread──> written, read back, compared
//!             ^                                                            │ same      │ not same,
//!             │                                                            v           │ cancelled
//!             │                              in the disk file, memory freed            │
//!             └────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The host pool writes the pieces, because only it can limit the size of the file. This process
//! has the key and can read the file, so it needs no other process to restore. Memory is freed only
//! after the thread has read the whole chunk back from the disk and compared it. A restore cancels
//! the thread, and waits neither for it nor for the disk: a chunk in progress is still in memory.
//!
//! This file has the state and the agent's side, `disk_store` has the thread. The lock of [`DiskJob`]
//! is held while the thread uses the host pool's socket, compares memory, or frees memory. With the lock it also
//! checks that the job was not cancelled.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use affinode_proto::wire::ProcessFlags;
use affinode_proto::wire::host_pool::{DISK_PIECE_BYTES, DiskKey, DiskTag, disk_nonce};

use super::disk_restore::{DiskSlot, SLOTS};
use super::prefault::{CHUNK_BYTES, ChunkQueue, chunk_bytes};
use super::staging::StagingPool;
use super::{FutexLock, SWAP, disk_cipher, disk_store, host_pool, with_pool_if_free};
use crate::libc::{self, StackSize};
use crate::{fds, process, sys};

pub const PIECE_BYTES: usize = DISK_PIECE_BYTES as usize;
/// Number of the buffer to which the storing thread reads. The others are those of the slots. The
/// thread may still read to it after it was cancelled, while a restore uses the others.
pub const STORING_BUFFER: usize = SLOTS;
const BUFFERS_BYTES: usize = (SLOTS + 1) * PIECE_BYTES;

/// Values of [`DiskJob::state`].
const IDLE: u32 = 0;
/// The storing thread runs.
const STORING: u32 = 1;
/// The storing thread must end. It sets [`IDLE`].
const CANCELLED: u32 = 2;

/// Values of [`DiskJob::handed`], besides the number of a chunk plus [`CHUNK`].
const NOTHING: usize = 0;
/// No chunk is left.
const ALL: usize = 1;
const CHUNK: usize = 2;

/// What the agent hands to the storing thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandedChunk {
    /// The content of this chunk can be stored.
    Chunk(usize),
    /// No chunk is left.
    All,
}

/// The content of this process that is in a disk file, and the thread that moves it there. An
/// all-zero value means that no content is on disk.
#[repr(C)]
pub struct DiskJob {
    lock: FutexLock,
    state: AtomicU32,
    /// Chunks that are in the disk file, and not in memory.
    stored: ChunkQueue,
    /// The chunk that the agent hands to the thread, see [`NOTHING`].
    handed: AtomicUsize,
    /// Futex that changes with `handed`.
    progress: AtomicU32,
    /// Address and size of the staging pool.
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// Address of the table of tags, one for each piece of the staging pool.
    tags: AtomicUsize,
    /// Address of the buffers, [`BUFFERS_BYTES`] long. They stay mapped.
    buffers: AtomicUsize,
    /// Address of a mapping of the disk file, as long as the staging pool. The file exists as long as
    /// this mapping, even if the application closes the descriptor. 0: there is none.
    mapped: AtomicUsize,
    mapped_bytes: AtomicUsize,
    /// 1 while content may be in the disk file.
    used: AtomicU32,
    key: UnsafeCell<DiskKey>,
    /// The buffers' state during a restore.
    pub slots: [DiskSlot; SLOTS],
}

impl DiskJob {
    pub const fn none() -> DiskJob {
        DiskJob {
            lock: FutexLock::new(),
            state: AtomicU32::new(IDLE),
            stored: ChunkQueue::none(),
            handed: AtomicUsize::new(NOTHING),
            progress: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            tags: AtomicUsize::new(0),
            buffers: AtomicUsize::new(0),
            mapped: AtomicUsize::new(0),
            mapped_bytes: AtomicUsize::new(0),
            used: AtomicU32::new(0),
            key: UnsafeCell::new([0; 32]),
            slots: [const { DiskSlot::none() }; SLOTS],
        }
    }

    /// Whether a chunk is in the disk file.
    pub fn has(&self, chunk: usize) -> bool {
        self.stored.has(chunk)
    }

    /// Address of the mapping of the disk file. 0: there is none.
    pub fn mapped(&self) -> usize {
        self.mapped.load(Ordering::Acquire)
    }

    /// Size of the staging pool in bytes.
    pub fn pool_bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    /// Address of an offset in the staging pool.
    pub fn memory(&self, offset: usize) -> usize {
        self.start.load(Ordering::Acquire) + offset
    }

    /// Address of the buffer with a number.
    pub fn buffer(&self, number: usize) -> usize {
        self.buffers.load(Ordering::Acquire) + number * PIECE_BYTES
    }

    /// Allocates the buffers. They may contain content of an earlier storing. Called only by the
    /// storing thread.
    pub fn has_buffers(&self) -> bool {
        if self.buffers.load(Ordering::Acquire) == 0 {
            let Ok(buffers) = sys::map_private(BUFFERS_BYTES) else { return false };
            self.buffers.store(buffers as usize, Ordering::Release);
        }
        // SAFETY: the job has mapped the buffers. They have no content that is needed: no restore
        // is in progress, and only the calling thread stores.
        unsafe { sys::make_resident(self.buffer(0) as *mut u8, BUFFERS_BYTES, false) };
        true
    }

    pub fn key(&self) -> DiskKey {
        // SAFETY: the key is written only before the first content is stored, and is read after it.
        unsafe { *self.key.get() }
    }

    /// Decrypts the stored piece that is in a buffer. False: it is not what was stored.
    pub fn decrypt_stored(&self, offset: usize, bytes: usize, buffer: usize) -> bool {
        let Some(tag) = self.tag_at(offset) else { return false };
        // SAFETY: the table has a tag for each piece, and the tag of a stored piece does not change.
        let tag = unsafe { *tag };
        self.decrypt(&tag, offset, bytes, buffer)
    }

    /// Decrypts a piece that is in a buffer. False: it does not match the tag.
    pub fn decrypt(&self, tag: &DiskTag, offset: usize, bytes: usize, buffer: usize) -> bool {
        // SAFETY: the buffer has the size of a piece, and only the calling thread uses it now.
        let content =
            unsafe { core::slice::from_raw_parts_mut(buffer as *mut [u8; 16], bytes / 16) };
        disk_cipher::decrypt(&self.key(), &disk_nonce(offset as u64), tag, content)
    }

    fn tag_at(&self, offset: usize) -> Option<*mut DiskTag> {
        let tags = self.tags.load(Ordering::Acquire);
        let is_inside = tags != 0 && offset < self.pool_bytes();
        is_inside.then_some((tags + offset / PIECE_BYTES * size_of::<DiskTag>()) as *mut DiskTag)
    }

    /// Stores the tag of a piece of a chunk that is not stored yet.
    pub fn set_tag(&self, offset: usize, tag: DiskTag) {
        if let Some(at) = self.tag_at(offset) {
            // SAFETY: the table has a tag for each piece. Nothing reads this one: the chunk is not
            // stored.
            unsafe { at.write(tag) };
        }
    }

    /// Records that a chunk is in the disk file.
    pub fn set_stored(&self, chunk: usize) {
        self.stored.set(chunk, true);
        self.count();
    }

    /// Publishes the number of chunks that are in the disk file.
    fn count(&self) {
        let chunks = self.pool_bytes().div_ceil(CHUNK_BYTES);
        let stored = (0..chunks).filter(|chunk| self.has(*chunk)).count();
        if let Some(page) = process::page() {
            page.disk_chunks.store(stored as u32, Ordering::Relaxed);
        }
    }

    /// Stores what belongs to a new disk file. Called only by the storing thread, with the lock.
    pub fn set_file(&self, file: DiskTables) {
        // SAFETY: no content is stored yet, so nothing reads the key.
        unsafe { *self.key.get() = file.key };
        self.tags.store(file.tags, Ordering::Release);
        self.mapped_bytes.store(self.pool_bytes(), Ordering::Release);
        self.mapped.store(file.mapped, Ordering::Release);
        self.used.store(1, Ordering::Release);
    }

    /// Closes a disk file that is not used any more. This can take long: if the host pool has ended,
    /// the kernel deletes the file here. Called while no content is in the file, by the storing
    /// thread, or by the agent while the process is resident.
    pub fn release(&self) {
        let mapped = self.mapped.swap(0, Ordering::AcqRel);
        if mapped == 0 {
            return;
        }
        fds::DISK.close();
        let tags = self.tags.swap(0, Ordering::AcqRel);
        let pool_bytes = self.mapped_bytes.load(Ordering::Acquire);
        for (start, bytes) in [(mapped, pool_bytes), (tags, tag_bytes(pool_bytes))] {
            // SAFETY: the job has mapped this range, and the file is not used. A cancelled thread
            // uses the range only with the lock, after it has checked that it was not cancelled.
            unsafe { sys::unmap_private(start as *mut u8, bytes) };
        }
        // SAFETY: the content of the buffers is not needed.
        unsafe { sys::discard(self.buffer(0) as *mut u8, BUFFERS_BYTES, false) };
    }

    /// Runs `body` while the job is locked. `None`: the job was cancelled.
    pub fn if_storing<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        self.lock.hold(|| (self.state.load(Ordering::Acquire) == STORING).then(body))
    }

    /// Requests the next chunk from the agent, and waits for it. `None`: the job was cancelled.
    pub fn next_chunk(&self) -> Option<HandedChunk> {
        const AGAIN_MS: u64 = 100;
        self.handed.store(NOTHING, Ordering::Release);
        loop {
            let seen = self.progress.load(Ordering::Acquire);
            if self.state.load(Ordering::Acquire) != STORING {
                return None;
            }
            match self.handed.load(Ordering::Acquire) {
                NOTHING => {
                    process::poke_agent();
                    sys::futex_wait(&self.progress, seen, AGAIN_MS);
                }
                ALL => return Some(HandedChunk::All),
                handed => return Some(HandedChunk::Chunk(handed - CHUNK)),
            }
        }
    }

    fn hand(&self, chunk: Option<usize>) {
        self.handed.store(chunk.map_or(ALL, |chunk| chunk + CHUNK), Ordering::Release);
        self.wake_thread();
    }

    fn wake_thread(&self) {
        self.progress.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake_all(&self.progress);
    }

    /// Ends the job. Called by the storing thread at its end.
    pub fn end(&self, has_failed: bool) {
        self.lock.hold(|| {
            // A job that was cancelled shows nothing.
            if self.state.swap(IDLE, Ordering::AcqRel) == STORING {
                note(ProcessFlags::DISK_FAILED, has_failed);
                note(ProcessFlags::STORING_ON_DISK, false);
            }
        });
    }
}

/// What belongs to a disk file: its key, and two mappings.
#[derive(Clone, Copy)]
pub struct DiskTables {
    pub key: DiskKey,
    /// Address of the table of tags.
    pub tags: usize,
    /// Address of the mapping of the file.
    pub mapped: usize,
}

/// Size in bytes of the table of tags for a staging pool.
pub fn tag_bytes(pool_bytes: usize) -> usize {
    pool_bytes.div_ceil(PIECE_BYTES) * size_of::<DiskTag>()
}

/// Offsets in the staging pool and sizes of the pieces of a chunk.
pub fn pieces(pool_bytes: usize, chunk: usize) -> impl Iterator<Item = (usize, usize)> {
    let bytes = chunk_bytes(pool_bytes, chunk);
    let piece = move |at: usize| (chunk * CHUNK_BYTES + at, PIECE_BYTES.min(bytes - at));
    (0..bytes).step_by(PIECE_BYTES).map(piece)
}

/// Whether any content may be in a disk file.
pub fn is_used() -> bool {
    SWAP.disk.used.load(Ordering::Acquire) == 1
}

/// Whether any chunk is in a disk file.
pub fn has_any() -> bool {
    is_used() && (0..SWAP.disk.pool_bytes().div_ceil(CHUNK_BYTES)).any(has)
}

/// Whether this chunk is in a disk file, and not in memory.
pub fn has(chunk: usize) -> bool {
    SWAP.disk.has(chunk)
}

/// Begins to move the content of this offloaded process to a disk file. Does nothing if the process
/// does so already.
pub fn begin() {
    let job = &SWAP.disk;
    if job.state.load(Ordering::Acquire) == STORING {
        return;
    }
    let is_ready = is_ready(job);
    // Before the thread starts, because it clears the flag at its end.
    note(ProcessFlags::STORING_ON_DISK, is_ready);
    note(ProcessFlags::DISK_FAILED, !is_ready);
    if is_ready {
        job.handed.store(NOTHING, Ordering::Release);
        job.state.store(STORING, Ordering::Release);
        if !libc::start_thread(disk_store::main, core::ptr::null_mut(), StackSize::Default) {
            job.end(true);
        }
    }
}

/// Whether content can be stored now. The content must be in memory of the present connection to
/// the host pool, and an earlier thread must have ended.
fn is_ready(job: &DiskJob) -> bool {
    if job.state.load(Ordering::Acquire) != IDLE
        || !disk_cipher::is_supported()
        || !host_pool::has_file()
    {
        return false;
    }
    let memory = with_pool_if_free(|pool| pool.host_pool_memory()).flatten();
    let Some((start, bytes)) = memory else { return false };
    job.start.store(start, Ordering::Release);
    job.bytes.store(bytes, Ordering::Release);
    true
}

/// Hands the next chunk to the thread, if it wants one. First ends the chunk's registration with
/// the driver, because registered pages cannot be freed. `may_call`: the driver may be called now.
pub fn go_on(may_call: bool) {
    let job = &SWAP.disk;
    let wants = job.state.load(Ordering::Acquire) == STORING
        && job.handed.load(Ordering::Acquire) == NOTHING;
    if wants && is_used() {
        // If a context is ending, the thread asks again.
        with_pool_if_free(|pool| job.hand(pool.next_to_store(may_call)));
    }
}

/// Cancels the thread. Content that is not in the disk file yet stays in memory. Does not wait for
/// the disk.
pub fn cancel() {
    let job = &SWAP.disk;
    // Only the calling thread, the agent, begins a job.
    if job.state.load(Ordering::Acquire) != STORING {
        return;
    }
    job.lock.hold(|| {
        let (from, to) = (STORING, CANCELLED);
        if job.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            note(ProcessFlags::STORING_ON_DISK, false);
        }
    });
    job.wake_thread();
}

/// Closes the disk file of a process that is resident for some time, so that no call waits for it.
pub fn tidy() {
    let job = &SWAP.disk;
    if !is_used() && job.state.load(Ordering::Acquire) == IDLE {
        job.release();
    }
}

/// Records that all content is on the device again, or lost with its context.
pub fn finish(pool: &mut StagingPool) {
    note(ProcessFlags::DISK_FAILED, false);
    let job = &SWAP.disk;
    if !is_used() {
        return;
    }
    let pool_bytes = job.pool_bytes();
    for chunk in (0..pool_bytes.div_ceil(CHUNK_BYTES)).filter(|chunk| job.has(*chunk)) {
        // The memory of the chunk is free, so no part of it is unchanged at the next copy out.
        pool.forget(chunk * CHUNK_BYTES, CHUNK_BYTES);
    }
    job.stored.clear();
    job.count();
    job.used.store(0, Ordering::Release);
    host_pool::close_disk();
}

fn note(flag: ProcessFlags, on: bool) {
    if let Some(page) = process::page() {
        page.note(flag, on);
    }
}

#[cfg(test)]
mod tests;
