//! The staging pool: host memory for content that is copied out of VRAM. The controller decides for
//! each copy out which of two kinds of memory it is:
//!
//! - Memory of the process, on huge pages where the kernel gives them. The process's container is
//!   charged for it, as for the driver's own checkpoint.
//! - A memory file of the node's host pool (`host_pool`), for which Affinode is charged.
//!
//! ```text
//! chunk:  empty ──helper threads──> resident ──agent──> registered ──> copied to or from
//! ```
//!
//! Several threads fault pages in, because a single thread is slower than the bus. The agent
//! registers the chunks with the driver in order, and copies each chunk after it is registered.
//!
//! Zero pages are not stored (`zeros`). If the copy is retained after a restore, digests show at
//! the next offload which content has not changed. That content is not copied again.
//!
//! If the process has a copier, its own memory for the pool is a memory file, so that the copier
//! can read it, too. The process still maps the file, and its container is charged for it. Chunks
//! with content that other processes also have may be replaced by mappings of shared files
//! (`dedup`).

mod dedup;

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::result;
use affinode_proto::wire::ProcessFlags;

use super::contexts::in_context;
use super::digest::{Digest, DigestTable, SLOT_BYTES};
use super::driver::call;
use super::prefault::{
    CHUNK_BYTES, ChunkQueue, MAX_CHUNKS, PREFAULT, StagingMemory, StagingPlace, chunk_bytes,
};
use super::prefault_ahead;
use super::{host_pool, numa, zeros};
use crate::fds::{self, TrackedFd};
use crate::{process, sys};

/// Number of chunks that a pool of the process's own memory always keeps. If the content is not
/// retained, the other chunks are freed once the process is resident. A pool in memory of the host
/// pool keeps no chunk.
const KEPT_CHUNKS: usize = 8;
const MAX_BYTES: usize = MAX_CHUNKS * CHUNK_BYTES;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Flag of a registration with the driver: the memory is registered in all contexts.
const PORTABLE: u32 = 1;

/// The staging buffer, to which the process's device memory is copied. An all-zero value is an
/// empty buffer.
#[repr(C)]
pub struct StagingPool {
    start: usize,
    bytes: usize,
    /// The context in which chunks are registered with the driver. 0: none yet.
    context: usize,
    /// 1 if the memory is a memory file, [`fds::POOL`] or that of the host pool. 0 if it is anonymous
    /// memory.
    of_file: usize,
    /// 1 if the memory file is that of the host pool.
    of_host_pool: usize,
    /// 1 if the whole content is retained after a restore while host memory suffices.
    keeps: usize,
    /// 1 if a large part of the content was zero at the last copy out, and was skipped. A copier
    /// cannot restore skipped content, so the next offload does without a copier.
    sparse: usize,
    /// 1 if a copier may still be writing to the memory. The memory is then replaced before its
    /// next use.
    tainted: usize,
    registered: ChunkQueue,
    /// Chunks that are replaced by a mapping of a sealed file, which other processes map too.
    shared: ChunkQueue,
    /// The digest of the content of each slot (`SLOT_BYTES` bytes), where it is known.
    known: DigestTable,
}

/// Place where the content of a slot is stored when the current copy out has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredChunk {
    /// The content will be in the pool: the copy out in progress copies it there.
    Anew,
    /// The content is in the pool already, since an earlier copy out.
    Already,
    /// The content is not stored, because it is all zero.
    Nowhere,
}

/// Kind of the staging pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StagingKind {
    /// Anonymous memory of the process.
    Anonymous,
    /// A memory file of the process, which a copier can read.
    File,
    /// A memory file of the host pool.
    HostPool,
}

/// Result of an attempt to free unused host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrimResult {
    /// No more memory can be freed. Only the chunks that the pool always keeps are left.
    All,
    /// More unused memory can be freed.
    Part,
    /// No more memory can be freed, because the remaining memory is retained for the next offload.
    Kept,
}

/// Returns the size of the address range for a pool of `bytes` bytes. The size includes an
/// additional eighth, so that a process whose memory grows a little can use the same pool again. A
/// small pool gets no addition, because one more chunk would be a large part of it.
fn with_room_to_grow(bytes: usize) -> usize {
    if bytes < KEPT_CHUNKS * CHUNK_BYTES {
        return bytes;
    }
    (bytes + bytes / 8).next_multiple_of(CHUNK_BYTES).min(MAX_BYTES)
}

impl StagingPool {
    pub const fn none() -> StagingPool {
        StagingPool {
            start: 0,
            bytes: 0,
            context: 0,
            of_file: 0,
            of_host_pool: 0,
            keeps: 0,
            sparse: 0,
            tainted: 0,
            registered: ChunkQueue::none(),
            shared: ChunkQueue::none(),
            known: DigestTable::none(),
        }
    }

    /// Prepares the pool for a copy out of `bytes` bytes, and starts to prefault its pages.
    /// [`Self::ready`] waits for each chunk, and [`Self::end`] must be called afterwards. False:
    /// the address space is exhausted.
    ///
    /// At the time of the call, the pool must not hold copied-out memory, and `context` must exist.
    pub fn begin(&mut self, bytes: usize, context: usize, place: StagingPlace) -> bool {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let kind = match place {
            StagingPlace::HostPool => StagingKind::HostPool,
            StagingPlace::Own if fds::COPIER.get().is_some() => StagingKind::File,
            StagingPlace::Own => StagingKind::Anonymous,
        };
        self.end();
        while self.unshare_next() {}
        let fits = self.tainted == 0 && self.bytes >= bytes && self.is_usable_as(kind);
        let there = fits || bytes <= MAX_BYTES && self.replace(with_room_to_grow(bytes), kind);
        if let Some(page) = process::page() {
            page.note(ProcessFlags::HOST_POOL, self.of_host_pool == 1);
            // What an earlier copy retained may be gone.
            page.kept_bytes.store(self.kept_bytes(), Ordering::Relaxed);
        }
        if !there {
            return false;
        }
        if self.context == 0 {
            self.context = context;
        }
        self.sparse = 0;
        // A chunk is registered as a whole.
        let bytes = bytes.next_multiple_of(CHUNK_BYTES).min(self.bytes);
        let (start, of_file) = (self.start, self.of_file == 1);
        let memory = StagingMemory { start, bytes, of_file, place: self.place() };
        PREFAULT.begin(memory, numa::processors(context));
        true
    }

    fn place(&self) -> StagingPlace {
        match self.of_host_pool {
            1 => StagingPlace::HostPool,
            _ => StagingPlace::Own,
        }
    }

    /// Whether the pool's present memory can be used where memory of this kind is needed. A memory
    /// file of the process can be used in place of anonymous memory.
    fn is_usable_as(&self, kind: StagingKind) -> bool {
        match kind {
            StagingKind::HostPool => self.of_host_pool == 1 && host_pool::has_file(),
            StagingKind::File => self.of_host_pool == 0 && self.of_file == 1,
            StagingKind::Anonymous => self.of_host_pool == 0,
        }
    }

    /// Whether the pages of the pool's first `bytes` bytes are present.
    pub fn is_resident(&self, bytes: usize) -> bool {
        bytes <= self.bytes
            && (0..bytes.div_ceil(CHUNK_BYTES)).all(|chunk| PREFAULT.resident.has(chunk))
    }

    /// Whether the pool's memory must be replaced before its next use, for example because a copier
    /// may still write to it.
    pub fn is_tainted(&self) -> bool {
        self.tainted == 1
    }

    /// Marks the pool's memory to be replaced before its next use, for example because a copier was
    /// told to write to it and has not confirmed the end of its writes.
    pub fn taint(&mut self) {
        self.tainted = 1;
    }

    /// Returns the descriptor of the memory file that a copier can read. `None`: the pool is
    /// anonymous memory, or memory of the host pool.
    pub fn file(&self) -> Option<i32> {
        fds::POOL.get().filter(|_| self.of_file == 1 && self.of_host_pool == 0)
    }

    fn replace(&mut self, bytes: usize, kind: StagingKind) -> bool {
        let Ok(mapped) = sys::map_private(bytes + HUGE_PAGE_BYTES) else {
            return false;
        };
        if self.start == 0 {
            // The first pool of this process: helpers of a parent process do not run here.
            PREFAULT.begins_in_this_process();
        }
        prefault_ahead::is_spoilt();
        self.unregister_all();
        while self.unshare_next() {}
        let is_free = (0..self.chunks()).all(|chunk| !self.registered.has(chunk));
        self.registered.clear();
        self.known = DigestTable::none();
        self.tainted = 0;
        PREFAULT.resident.clear();
        if self.start != 0 {
            // The pages of a file would exist for as long as a forked child has the descriptor, so
            // they are freed here.
            let own = |chunk: &usize| !self.shared.has(*chunk);
            for chunk in (0..self.chunks()).filter(own) {
                let (at, bytes) =
                    (self.at(chunk * CHUNK_BYTES).cast(), chunk_bytes(self.bytes, chunk));
                // SAFETY: the pool has mapped this range and is empty.
                unsafe { sys::discard(at, bytes, self.of_file == 1) };
            }
            // Keep the addresses of a chunk that is still registered. Otherwise the application
            // could get new memory at these addresses, and the driver would treat that memory as
            // the registered chunk.
            if is_free {
                // SAFETY: the pool has mapped this range, and nothing uses it.
                unsafe { sys::unmap_private(self.start as *mut u8, self.bytes) };
            }
        }
        self.shared.clear();
        fds::POOL.close();
        self.start = (mapped as usize).next_multiple_of(HUGE_PAGE_BYTES);
        self.bytes = bytes;
        (self.of_file, self.of_host_pool) = (0, 0);
        let file = match kind {
            StagingKind::Anonymous => None,
            StagingKind::File => self.make_file(),
            StagingKind::HostPool => host_pool::file(),
        };
        let of_host_pool = kind == StagingKind::HostPool;
        if let Some(file) = file {
            // SAFETY: just mapped, and not used elsewhere yet.
            if !unsafe { sys::map_over(self.start as *mut u8, bytes, file, 0) } {
                // The state of the mapping is unknown, so no part of it is used.
                fds::POOL.close();
                self.discard_range(mapped, bytes);
                return false;
            }
            (self.of_file, self.of_host_pool) = (1, usize::from(of_host_pool));
        } else if of_host_pool {
            // Other memory must not be used, because the container's limit was not checked for it.
            self.discard_range(mapped, bytes);
            return false;
        }
        if !of_host_pool {
            sys::prefer_huge_pages(self.start as *mut u8, bytes);
        }
        true
    }

    /// Unmaps the range of a pool that could not be created.
    fn discard_range(&mut self, mapped: *mut u8, bytes: usize) {
        // SAFETY: the pool has mapped this range, and nothing uses it.
        unsafe { sys::unmap_private(mapped, bytes + HUGE_PAGE_BYTES) };
        (self.start, self.bytes) = (0, 0);
    }

    /// Creates the memory file of the pool and seals its size. Returns its descriptor. `None`: a
    /// step failed.
    fn make_file(&self) -> Option<i32> {
        let fd = sys::lift(sys::memory_file(c"affinode-copied-out", self.bytes).ok()?);
        let owned = TrackedFd::note(fd).filter(|_| sys::seal_size(fd).is_ok());
        match owned {
            Some(owned) => fds::POOL.set(owned),
            None => sys::close(fd),
        }
        owned.map(|_| fd)
    }

    fn chunks(&self) -> usize {
        self.bytes.div_ceil(CHUNK_BYTES)
    }

    /// Address and size of the pool's memory, if it is in the host pool. `None`: the process's own
    /// memory is not moved to a disk file.
    pub fn host_pool_memory(&self) -> Option<(usize, usize)> {
        (self.of_host_pool == 1 && self.start != 0).then_some((self.start, self.bytes))
    }

    /// Size of the pool's address range in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the next chunk whose content can be moved to a disk file, and ends its registration
    /// with the driver. `may_call`: the driver may be called now. `None`: there is none.
    pub fn next_to_store(&mut self, may_call: bool) -> Option<usize> {
        let is_free = |pool: &StagingPool, chunk: usize| may_call || !pool.registered.has(chunk);
        let mut chunks = (0..PREFAULT.chunks().min(self.chunks())).rev();
        chunks.find(|chunk| {
            PREFAULT.resident.has(*chunk) && is_free(self, *chunk) && self.unregister(*chunk)
        })
    }

    /// Frees pages behind the content. They are left from a larger copy, or from a prefault for more
    /// memory than the process has now.
    pub fn free_behind_content(&mut self) {
        while self.shrink(PREFAULT.chunks()) {}
    }

    /// Registers the buffers of a restore from disk with the driver. False: the copies are slower.
    pub fn register_buffers(&self, start: *mut c_void, bytes: usize) -> bool {
        in_context(self.context, || call!(host_register(start, bytes, PORTABLE))) == result::SUCCESS
    }

    /// Ends the registration of the buffers.
    pub fn unregister_buffers(&self, start: *mut c_void) {
        in_context(self.context, || call!(host_unregister(start)));
    }

    /// Waits until the pages at an offset are present, and returns the host address to which
    /// content can be copied. `None`: other processes have taken the host memory, or the copy out
    /// was cancelled.
    pub fn ready(&mut self, offset: usize) -> Option<*mut c_void> {
        // Also wait if the chunk is still registered, because the prefault writes to its pages.
        PREFAULT.wait(offset / CHUNK_BYTES).then(|| self.held(offset))
    }

    /// Frees the pages that were touched for a failed copy out, except for the chunks that the pool
    /// always keeps.
    pub fn give_back_unused(&mut self) {
        self.keeps = 0;
        while self.shrink(self.always_kept()) {}
    }

    /// Returns the host address of an offset at which the pool has content. First registers the
    /// chunk of the offset with the driver, if it is not registered.
    pub fn held(&mut self, offset: usize) -> *mut c_void {
        let chunk = offset / CHUNK_BYTES;
        if !self.registered.has(chunk) {
            self.register(chunk);
        }
        self.at(offset)
    }

    /// Returns the host address of an offset in the pool.
    fn at(&self, offset: usize) -> *mut c_void {
        (self.start + offset) as *mut c_void
    }

    /// Stops the prefault and waits until its helper threads have ended. Does nothing if this
    /// process has no pool yet. The helpers that are recorded then belong to the parent process,
    /// and do not run in this process.
    pub fn end(&mut self) {
        if self.start != 0 {
            PREFAULT.end();
        }
    }

    /// Registers a chunk with the driver. If that fails, the copy is slower, but correct.
    fn register(&mut self, chunk: usize) {
        const READ_ONLY: u32 = 8;
        let at = self.at(chunk * CHUNK_BYTES);
        let bytes = chunk_bytes(self.bytes, chunk);
        let flags = if self.shared.has(chunk) { PORTABLE | READ_ONLY } else { PORTABLE };
        let code = in_context(self.context, || call!(host_register(at, bytes, flags)));
        self.registered.set(chunk, code == result::SUCCESS);
    }

    /// Unregisters a chunk. False: the driver has refused, or the chunk's context was abandoned. The
    /// chunk may then still be registered.
    fn unregister(&mut self, chunk: usize) -> bool {
        if !self.registered.has(chunk) {
            return true;
        }
        if self.context == 0 {
            return false;
        }
        let at = self.at(chunk * CHUNK_BYTES);
        let code = in_context(self.context, || call!(host_unregister(at)));
        self.registered.set(chunk, code != result::SUCCESS);
        code == result::SUCCESS
    }

    /// Unregisters every chunk from the driver.
    pub fn unregister_all(&mut self) {
        (0..self.chunks()).for_each(|chunk| {
            self.unregister(chunk);
        });
    }

    /// Records that a context has ended. If the chunks were registered in this context, their
    /// registrations have ended too.
    pub fn context_ends(&mut self, context: usize) {
        if self.context == context {
            self.context = 0;
            self.registered.clear();
        }
    }

    /// Makes sure that a context is not used again, although it may still exist. If chunks are
    /// registered in it, they may stay registered, so the pool's addresses are not used again.
    pub fn abandon_context(&mut self, context: usize) {
        if self.context == context {
            self.context = 0;
            self.taint();
        }
    }

    /// Sets whether the pool's content is retained after the restore.
    pub fn set_keeps(&mut self, keeps: bool) {
        self.keeps = usize::from(keeps);
    }

    /// Returns where the content at `offset` is stored after this copy out. The second value is the
    /// number of bytes from `offset` on that are stored in the same way, at most `most`. All these
    /// bytes are in one chunk.
    pub fn stored(
        &self,
        offset: usize,
        most: usize,
        found: Option<&DigestTable>,
    ) -> (StoredChunk, usize) {
        let most = most.min(CHUNK_BYTES - offset % CHUNK_BYTES);
        let Some(found) = found else { return (StoredChunk::Anew, most) };
        let first = offset / SLOT_BYTES;
        let of_slot = |slot: usize| match found.all().get(slot) {
            Some(&Digest::LEFT_OUT) => StoredChunk::Nowhere,
            Some(digest) if *digest != Digest::UNKNOWN && self.keeps == 1 => {
                let same = self.known.all().get(slot) == Some(digest);
                if same { StoredChunk::Already } else { StoredChunk::Anew }
            }
            _ => StoredChunk::Anew,
        };
        let all = of_slot(first);
        let slots = (first..first + most.div_ceil(SLOT_BYTES)).take_while(|s| of_slot(*s) == all);
        (all, most.min(slots.count() * SLOT_BYTES))
    }

    /// Marks the zero content that a copy out skips. Returns the number of skipped bytes.
    pub fn leave_out(&mut self, found: &mut DigestTable) -> u64 {
        let bytes = zeros::skip_zero_pages(found.all_mut(), fds::COPIER.get().is_some());
        self.sparse = usize::from(zeros::is_worth_a_copier(bytes, found.all().len()));
        zeros::empty_chunks(found.all()).for_each(|chunk| PREFAULT.empty.set(chunk, true));
        bytes as u64
    }

    /// Whether a large part of the content was zero at the last copy out, and was skipped. A copier
    /// cannot restore skipped content, so the next offload does without a copier.
    pub fn is_sparse(&self) -> bool {
        self.sparse == 1
    }

    /// Returns the digest of the content of each slot (`SLOT_BYTES` bytes), where it is known.
    pub fn known(&self) -> &[Digest] {
        self.known.all()
    }

    /// Whether any content was skipped and is therefore not in the pool.
    pub fn leaves_out(&self) -> bool {
        self.known.all().contains(&Digest::LEFT_OUT)
    }

    /// Returns whether the content at `offset` was skipped as zero, and the number of bytes from
    /// `offset` on for which the same is true.
    pub fn left_out(&self, offset: usize, most: usize) -> (bool, usize) {
        zeros::run_at(self.known.all(), offset, most)
    }

    /// Removes the digests of a range whose content is about to be overwritten.
    pub fn forget(&mut self, offset: usize, bytes: usize) {
        let (first, end) = (offset / SLOT_BYTES, (offset + bytes).div_ceil(SLOT_BYTES));
        let slots = self.known.all_mut().get_mut(first..);
        let slots = slots.into_iter().flatten().take(end - first);
        slots.for_each(|slot| *slot = Digest::UNKNOWN);
    }

    /// Returns the number of bytes that need no copy, because the pool contains them already.
    /// `found` has the digests of the present content.
    pub fn unchanged(&self, found: &DigestTable) -> u64 {
        let known = self.known.all().iter().zip(found.all());
        let same = known.filter(|(known, found)| known == found && **known != Digest::UNKNOWN);
        let slots = if self.keeps == 1 { same.count() } else { 0 };
        (slots * SLOT_BYTES) as u64
    }

    /// Stores the digests of the content that was copied out. Frees the pages of chunks whose whole
    /// content was skipped.
    pub fn learn(&mut self, found: DigestTable) {
        self.known = found;
        for chunk in 0..self.chunks() {
            if PREFAULT.empty.has(chunk) && PREFAULT.resident.has(chunk) {
                self.discard(chunk);
            }
        }
    }

    /// Bytes of host memory that the pool keeps while it is unused.
    pub fn kept_bytes(&self) -> u64 {
        let resident = (0..self.chunks()).filter(|chunk| PREFAULT.resident.has(*chunk));
        resident.map(|chunk| chunk_bytes(self.bytes, chunk) as u64).sum()
    }

    /// Bytes of the host pool's memory that the pool keeps while it is unused.
    pub fn kept_host_pool_bytes(&self) -> u64 {
        if self.is_usable_as(StagingKind::HostPool) { self.kept_bytes() } else { 0 }
    }

    /// Bytes of the process's own memory that the pool keeps while it is unused.
    pub fn kept_own_bytes(&self) -> u64 {
        if self.of_host_pool == 1 { 0 } else { self.kept_bytes() }
    }

    /// Frees or unregisters a part of a pool that is not in use. `prepared` is true if the pool is
    /// prefaulted for the next offload. `short` returns whether host memory is short. If it is
    /// short, no memory is retained for the next offload.
    pub fn tidy(&mut self, prepared: bool, short: impl FnOnce(StagingPlace) -> bool) -> TrimResult {
        if self.unshare_next() {
            return TrimResult::Part;
        }
        if (self.keeps == 1 || prepared) && self.tainted == 0 && !short(self.place()) {
            return match (0..self.chunks()).find(|chunk| self.registered.has(*chunk)) {
                Some(chunk) if self.unregister(chunk) => TrimResult::Part,
                _ => TrimResult::Kept,
            };
        }
        self.keeps = 0;
        if self.shrink(self.always_kept()) {
            return TrimResult::Part;
        }
        self.discard_late_pages();
        TrimResult::All
    }

    /// Frees pages that the host pool may have allocated after the connection had failed. No chunk
    /// of the pool may have content.
    fn discard_late_pages(&mut self) {
        if self.of_host_pool == 1 && !host_pool::has_file() {
            self.unregister_all();
            // SAFETY: the pool has mapped this range, and no chunk of it has content.
            unsafe { sys::discard(self.start as *mut u8, self.bytes, true) };
        }
    }

    /// Frees a part of a pool that is not in use, and keeps nothing for the next offload.
    pub fn free_next(&mut self) -> TrimResult {
        self.keeps = 0;
        if self.unshare_next() || self.shrink(0) {
            return TrimResult::Part;
        }
        self.discard_late_pages();
        TrimResult::All
    }

    /// Number of chunks that stay when no content is retained. Memory of the host pool is free for
    /// other containers while this one does not need it.
    fn always_kept(&self) -> usize {
        if self.of_host_pool == 1 { 0 } else { KEPT_CHUNKS }
    }

    /// Frees the last chunk that has pages, beyond the first `kept_chunks`. False: there is none, or
    /// the kernel frees none.
    fn shrink(&mut self, kept_chunks: usize) -> bool {
        let chunks = (kept_chunks..self.chunks()).rev();
        let mut resident = chunks.filter(|chunk| PREFAULT.resident.has(*chunk));
        // A chunk whose pages the kernel does not free is skipped.
        resident.any(|chunk| {
            self.forget(chunk * CHUNK_BYTES, CHUNK_BYTES);
            self.discard(chunk)
        })
    }

    /// Frees the pages of a chunk that has no content. False: the kernel does not free them.
    fn discard(&mut self, chunk: usize) -> bool {
        prefault_ahead::is_spoilt();
        let freed = !self.unregister(chunk) || {
            let at = self.at(chunk * CHUNK_BYTES).cast();
            // SAFETY: a chunk of the pool, without content.
            unsafe { sys::discard(at, chunk_bytes(self.bytes, chunk), self.of_file == 1) }
        };
        if freed {
            PREFAULT.resident.set(chunk, false);
        }
        freed
    }
}

#[cfg(test)]
mod tests;
