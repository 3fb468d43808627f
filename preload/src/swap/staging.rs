//! Host memory for content that is off the device: anonymous memory of the process, charged
//! to its container as the driver's own checkpoint is, on huge pages where it gets them.
//!
//! ```text
//! chunk:  empty ──helper threads──> resident ──agent──> registered ──> copied to or from
//! ```
//!
//! Several threads bring pages in, because one alone is slower than the bus; the agent
//! registers the chunks with the driver in order and copies behind.
//!
//! What is all zero is not stored (`zeros`). What is kept after a return is told by its digests: what has not changed by the next time is
//! not copied again.
//!
//! Where there is a copier it is a file in memory, so that the copier can read it as well; the
//! process has hold of it all the same, and its container is charged for it. Chunks that others
//! hold as well may then lie in files that they have in common (`dedup`).

mod dedup;

use core::ffi::c_void;

use affinode_cuda_sys::result;

use super::contexts::in_context;
use super::digest::{Digest, DigestTable, SLOT_BYTES};
use super::driver::call;
use super::prefault::{CHUNK_BYTES, ChunkQueue, MAX_CHUNKS, PREFAULT, chunk_bytes};
use super::prefault_ahead;
use super::{numa, zeros};
use crate::fds::{self, TrackedFd};
use crate::sys;

/// So much is kept for the next time; the rest is given back once the process runs again.
const KEPT_CHUNKS: usize = 8;
const MAX_BYTES: usize = MAX_CHUNKS * CHUNK_BYTES;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The memory. Zero is none.
#[repr(C)]
pub struct StagingPool {
    start: usize,
    bytes: usize,
    /// The context that chunks are registered in.
    context: usize,
    /// 1: it is a file in memory, [`owned::POOL`].
    of_file: usize,
    /// 1: nothing is given back after a return, as far as host memory allows.
    keeps: usize,
    /// 1: so much was left out of it that a copier is not missed.
    sparse: usize,
    /// 1: a copier may be writing to it still: it is replaced before it is used again.
    tainted: usize,
    registered: ChunkQueue,
    /// In whose place a sealed file is, which others have hold of as well.
    shared: ChunkQueue,
    /// What each slot holds, as far as that is known.
    known: DigestTable,
}

/// Where content is when everything has left the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredChunk {
    /// In the pool, once it is copied.
    Anew,
    /// In the pool as it was.
    Already,
    /// Nowhere: it is all zero.
    Nowhere,
}

/// What becomes of host memory that nothing is parked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrimResult {
    /// There is no more to give back.
    All,
    /// There is.
    Part,
    /// It is kept for the next time.
    Kept,
}

/// Addresses for an eighth more, so that a process that grows a little keeps what it has here;
/// none for a small one, of which a whole chunk more would be much.
fn with_room_to_grow(bytes: usize) -> usize {
    if bytes < KEPT_CHUNKS * CHUNK_BYTES {
        return bytes;
    }
    (bytes + bytes / 8).next_multiple_of(CHUNK_BYTES).min(MAX_BYTES)
}

impl StagingPool {
    /// None.
    pub const fn none() -> StagingPool {
        StagingPool {
            start: 0,
            bytes: 0,
            context: 0,
            of_file: 0,
            keeps: 0,
            sparse: 0,
            tainted: 0,
            registered: ChunkQueue::none(),
            shared: ChunkQueue::none(),
            known: DigestTable::none(),
        }
    }

    /// Begins to make room for `bytes`; [`Self::ready`] waits for each chunk, and
    /// [`Self::end`] must follow. False: the address space has no room.
    ///
    /// Nothing may be in the pool. `context` is one that lives.
    pub fn begin(&mut self, bytes: usize, context: usize) -> bool {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let shared = fds::COPIER.get().is_some();
        self.end();
        while self.unshare_next() {}
        let fits = self.tainted == 0 && self.bytes >= bytes && (self.of_file == 1 || !shared);
        if bytes > MAX_BYTES || (!fits && !self.replace(with_room_to_grow(bytes), shared)) {
            return false;
        }
        if self.context == 0 {
            self.context = context;
        }
        self.sparse = 0;
        // A chunk is registered as a whole.
        let bytes = bytes.next_multiple_of(CHUNK_BYTES).min(self.bytes);
        PREFAULT.begin(self.start, bytes, self.of_file, numa::processors(context));
        true
    }

    /// Whether the first `bytes` of it have their pages.
    pub fn is_resident(&self, bytes: usize) -> bool {
        bytes <= self.bytes
            && (0..bytes.div_ceil(CHUNK_BYTES)).all(|chunk| PREFAULT.resident.has(chunk))
    }

    /// Whether it is to be replaced before it is used again.
    pub fn is_tainted(&self) -> bool {
        self.tainted == 1
    }

    /// A copier was told to write to it, and has not said that it has.
    pub fn taint(&mut self) {
        self.tainted = 1;
    }

    /// Its file, if it is one.
    pub fn file(&self) -> Option<i32> {
        fds::POOL.get().filter(|_| self.of_file == 1)
    }

    fn replace(&mut self, bytes: usize, shared: bool) -> bool {
        let Ok(mapped) = sys::map_private(bytes + HUGE_PAGE_BYTES) else {
            return false;
        };
        if self.start == 0 {
            // The first of this process: helpers of the one that forked it are not here.
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
            // A file's pages would live on with a descriptor in a forked child.
            let own = |chunk: &usize| !self.shared.has(*chunk);
            for chunk in (0..self.chunks()).filter(own) {
                let (at, bytes) =
                    (self.at(chunk * CHUNK_BYTES).cast(), chunk_bytes(self.bytes, chunk));
                // SAFETY: mapped here, and nothing is in the pool.
                unsafe { sys::discard(at, bytes, self.of_file == 1) };
            }
            // At these addresses the application's own would be taken for what the driver knows there.
            if is_free {
                // SAFETY: as above.
                unsafe { sys::unmap_private(self.start as *mut u8, self.bytes) };
            }
        }
        self.shared.clear();
        fds::POOL.close();
        self.start = (mapped as usize).next_multiple_of(HUGE_PAGE_BYTES);
        self.bytes = bytes;
        self.of_file = 0;
        if shared && let Some(file) = self.make_file() {
            // SAFETY: just mapped, and nobody knows it yet.
            if !unsafe { sys::map_over(self.start as *mut u8, bytes, file, 0) } {
                // What is there now is not known: none of it is used.
                fds::POOL.close();
                // SAFETY: as above.
                unsafe { sys::unmap_private(mapped, bytes + HUGE_PAGE_BYTES) };
                (self.start, self.bytes) = (0, 0);
                return false;
            }
            self.of_file = 1;
        }
        sys::prefer_huge_pages(self.start as *mut u8, bytes);
        true
    }

    /// A file for the memory, of a size that nobody changes any more.
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

    /// The host address of an offset, once it can be copied to. `None`: others took the host memory
    /// meanwhile.
    pub fn ready(&mut self, offset: usize) -> Option<*mut c_void> {
        // Also of one that the driver has not let go of: whoever brings its pages in writes to it.
        PREFAULT.wait(offset / CHUNK_BYTES).then(|| self.held(offset))
    }

    /// Gives back what was brought in for content that is not stored here after all.
    pub fn give_back_unused(&mut self) {
        self.keeps = 0;
        while self.shrink() {}
    }

    /// The host address of an offset at which content is, in the driver's hands again.
    pub fn held(&mut self, offset: usize) -> *mut c_void {
        let chunk = offset / CHUNK_BYTES;
        if !self.registered.has(chunk) {
            self.register(chunk);
        }
        self.at(offset)
    }

    /// The host address of an offset.
    fn at(&self, offset: usize) -> *mut c_void {
        (self.start + offset) as *mut c_void
    }

    /// Nobody makes room any more. Helpers of the process that forked this one are not here.
    pub fn end(&mut self) {
        if self.start != 0 {
            PREFAULT.end();
        }
    }

    /// Without registration the copy is slower, and as right.
    fn register(&mut self, chunk: usize) {
        const PORTABLE: u32 = 1;
        const READ_ONLY: u32 = 8;
        let at = self.at(chunk * CHUNK_BYTES);
        let bytes = chunk_bytes(self.bytes, chunk);
        let flags = if self.shared.has(chunk) { PORTABLE | READ_ONLY } else { PORTABLE };
        let code = in_context(self.context, || call!(host_register(at, bytes, flags)));
        self.registered.set(chunk, code == result::SUCCESS);
    }

    /// False: the driver still has hold of it.
    fn unregister(&mut self, chunk: usize) -> bool {
        if !self.registered.has(chunk) {
            return true;
        }
        let at = self.at(chunk * CHUNK_BYTES);
        let code = in_context(self.context, || call!(host_unregister(at)));
        self.registered.set(chunk, code != result::SUCCESS);
        code == result::SUCCESS
    }

    /// Takes every chunk out of the driver's hands.
    pub fn unregister_all(&mut self) {
        (0..self.chunks()).for_each(|chunk| {
            self.unregister(chunk);
        });
    }

    /// A context has ended, and with it what was registered in it.
    pub fn context_ends(&mut self, context: usize) {
        if self.context == context {
            self.context = 0;
            self.registered.clear();
        }
    }

    /// Whether it is kept after the return.
    pub fn set_keeps(&mut self, keeps: bool) {
        self.keeps = usize::from(keeps);
    }

    /// What becomes of how many bytes from an offset on: of all of them the same, in one chunk, at
    /// most `most`.
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

    /// Marks what need not be stored in a pool that is being filled: so many bytes.
    pub fn leave_out(&mut self, found: &mut DigestTable) -> u64 {
        let bytes = zeros::skip_zero_pages(found.all_mut(), fds::COPIER.get().is_some());
        self.sparse = usize::from(zeros::is_worth_a_copier(bytes, found.all().len()));
        zeros::empty_chunks(found.all()).for_each(|chunk| PREFAULT.empty.set(chunk, true));
        bytes as u64
    }

    /// Whether so much was left out that a copier would not be of use the next time either.
    pub fn is_sparse(&self) -> bool {
        self.sparse == 1
    }

    /// What each slot holds, as far as that is known.
    pub fn known(&self) -> &[Digest] {
        self.known.all()
    }

    /// Whether something is not in the pool that was left out of it.
    pub fn leaves_out(&self) -> bool {
        self.known.all().contains(&Digest::LEFT_OUT)
    }

    /// How many bytes from an offset on were left out, or were not.
    pub fn left_out(&self, offset: usize, most: usize) -> (bool, usize) {
        zeros::run_at(self.known.all(), offset, most)
    }

    /// Something is about to be copied there.
    pub fn forget(&mut self, offset: usize, bytes: usize) {
        let (first, end) = (offset / SLOT_BYTES, (offset + bytes).div_ceil(SLOT_BYTES));
        let slots = self.known.all_mut().get_mut(first..);
        let slots = slots.into_iter().flatten().take(end - first);
        slots.for_each(|slot| *slot = Digest::UNKNOWN);
    }

    /// How many bytes of what was found are in it already.
    pub fn unchanged(&self, found: &DigestTable) -> u64 {
        let known = self.known.all().iter().zip(found.all());
        let same = known.filter(|(known, found)| known == found && **known != Digest::UNKNOWN);
        let slots = if self.keeps == 1 { same.count() } else { 0 };
        (slots * SLOT_BYTES) as u64
    }

    /// All that was found is there now, but for what was left out; chunks of that alone hold
    /// nothing.
    pub fn learn(&mut self, found: DigestTable) {
        self.known = found;
        for chunk in 0..self.chunks() {
            if PREFAULT.empty.has(chunk) && PREFAULT.resident.has(chunk) {
                self.discard(chunk);
            }
        }
    }

    /// The host memory that is kept while nothing is in it.
    pub fn kept_bytes(&self) -> u64 {
        let resident = (0..self.chunks()).filter(|chunk| PREFAULT.resident.has(*chunk));
        resident.map(|chunk| chunk_bytes(self.bytes, chunk) as u64).sum()
    }

    /// Gives a part of an unused pool back to the system, or to the driver's hands less of what
    /// is kept. `prepared`: it is there for the next time. `short`: host memory is, so nothing is
    /// kept any more.
    pub fn tidy(&mut self, prepared: bool, short: impl FnOnce() -> bool) -> TrimResult {
        if self.unshare_next() {
            return TrimResult::Part;
        }
        if (self.keeps == 1 || prepared) && self.tainted == 0 && !short() {
            return match (0..self.chunks()).find(|chunk| self.registered.has(*chunk)) {
                Some(chunk) if self.unregister(chunk) => TrimResult::Part,
                _ => TrimResult::Kept,
            };
        }
        self.keeps = 0;
        if self.shrink() { TrimResult::Part } else { TrimResult::All }
    }

    fn shrink(&mut self) -> bool {
        let resident = |chunk: &usize| PREFAULT.resident.has(*chunk);
        let Some(chunk) = (KEPT_CHUNKS..self.chunks()).rev().find(resident) else {
            return false;
        };
        self.forget(chunk * CHUNK_BYTES, CHUNK_BYTES);
        self.discard(chunk);
        true
    }

    /// Gives a chunk's pages back. Nothing may be in it.
    fn discard(&mut self, chunk: usize) {
        prefault_ahead::is_spoilt();
        if self.unregister(chunk) {
            // SAFETY: a chunk of the pool, in which nothing is.
            unsafe {
                let at = self.at(chunk * CHUNK_BYTES).cast();
                sys::discard(at, chunk_bytes(self.bytes, chunk), self.of_file == 1);
            }
        }
        PREFAULT.resident.set(chunk, false);
    }
}

#[cfg(test)]
mod tests;
