//! Helper threads that touch the pages of the staging pool, so that the pages exist before content
//! is copied to them. Several threads are needed, because a single one is slower than the bus.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

use super::{host_pool, host_pressure, numa};
use crate::counters::CounterPage;
use crate::libc::StackSize;
use crate::sys::CpuSet;
use crate::{libc, process, sys};

/// Size of a chunk of the staging pool, in bytes. A chunk is registered with the driver as a whole,
/// and one copy covers one chunk at most.
pub const CHUNK_BYTES: usize = affinode_proto::wire::copier::CHUNK_BYTES as usize;
/// Maximum number of chunks of a staging pool.
pub const MAX_CHUNKS: usize = 64 * WORDS;
const WORDS: usize = 256;
const MAX_HELPERS: usize = 16;
/// Bytes that a helper touches, in a few milliseconds, before it checks again whether the copy out
/// was cancelled.
const STEP_BYTES: usize = 16 << 20;

/// Owner of the staging pool's memory: this process or the node's host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagingPlace {
    /// Memory of this process, which is charged to its container.
    Own,
    /// A memory file of the node's host pool.
    HostPool,
}

/// A set of numbers of chunks, stored as bits.
pub struct ChunkQueue([AtomicU64; WORDS]);

impl ChunkQueue {
    pub const fn none() -> ChunkQueue {
        ChunkQueue([const { AtomicU64::new(0) }; WORDS])
    }

    fn word(&self, chunk: usize) -> Option<&AtomicU64> {
        self.0.get(chunk / 64)
    }

    /// Whether a chunk is in the set.
    pub fn has(&self, chunk: usize) -> bool {
        self.word(chunk).is_some_and(|w| w.load(Ordering::Acquire) & 1 << (chunk % 64) != 0)
    }

    /// Adds a chunk to the set, or removes it.
    pub fn set(&self, chunk: usize, on: bool) {
        let bit = 1 << (chunk % 64);
        let Some(word) = self.word(chunk) else { return };
        if on {
            word.fetch_or(bit, Ordering::AcqRel)
        } else {
            word.fetch_and(!bit, Ordering::AcqRel)
        };
    }

    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Release));
    }
}

/// The part of a staging pool that is to be filled with pages.
#[derive(Clone, Copy, Debug)]
pub struct StagingMemory {
    /// Address of the first byte.
    pub start: usize,
    /// Size of the part in bytes.
    pub bytes: usize,
    /// Whether the memory is a memory file.
    pub of_file: bool,
    /// Owner of the memory: this process or the node's host pool.
    pub place: StagingPlace,
}

/// State that the prefault helpers (threads that touch pages) share. It is not in the staging
/// pool's pages, so a forked child inherits its values, although no helper runs in the child.
pub struct Prefault {
    start: AtomicUsize,
    bytes: AtomicUsize,
    of_file: AtomicUsize,
    /// 1 if the host pool allocates the pages.
    of_host_pool: AtomicUsize,
    /// Processors on which the helpers run, as bits; all 0: any processor.
    near: [AtomicU64; 128],
    next: AtomicUsize,
    /// Number of bytes that helpers are touching now.
    touching: AtomicU64,
    /// Number of bytes that are not touched yet.
    missing_bytes: AtomicU64,
    /// 1 if the helpers have stopped because host memory was short or the copy out was cancelled.
    /// Some chunks then have no pages.
    short: AtomicU32,
    /// 1 if the copy out in progress goes on although its offload was given up.
    committed: AtomicU32,
    /// Chunks whose pages are present.
    pub resident: ChunkQueue,
    /// Chunks in which no content will be stored. The helpers skip them.
    pub empty: ChunkQueue,
    /// Futex that changes each time a chunk becomes resident.
    progress: AtomicU32,
    helpers: AtomicU32,
}

/// The prefault state of this process's staging pool.
pub static PREFAULT: Prefault = Prefault {
    start: AtomicUsize::new(0),
    bytes: AtomicUsize::new(0),
    of_file: AtomicUsize::new(0),
    of_host_pool: AtomicUsize::new(0),
    near: [const { AtomicU64::new(0) }; 128],
    next: AtomicUsize::new(0),
    touching: AtomicU64::new(0),
    missing_bytes: AtomicU64::new(0),
    short: AtomicU32::new(0),
    committed: AtomicU32::new(0),
    resident: ChunkQueue::none(),
    empty: ChunkQueue::none(),
    progress: AtomicU32::new(0),
    helpers: AtomicU32::new(0),
};

impl Prefault {
    /// Resets the counts of helpers before this process creates its first staging pool. After a
    /// fork, the counts are those of the parent process, whose helpers do not run here.
    pub fn begins_in_this_process(&self) {
        self.helpers.store(0, Ordering::Release);
        self.touching.store(0, Ordering::Release);
    }

    /// The processors on which the helpers run.
    pub fn near(&self) -> CpuSet {
        core::array::from_fn(|n| self.near.get(n).map_or(0, |word| word.load(Ordering::Relaxed)))
    }

    /// Number of chunks from the pool's first byte on that get content.
    pub fn chunks(&self) -> usize {
        self.bytes.load(Ordering::Relaxed).div_ceil(CHUNK_BYTES)
    }

    /// Whether the pages of all chunks that get content are present.
    pub fn has_all_pages(&self) -> bool {
        (0..self.chunks()).all(|chunk| self.resident.has(chunk) || self.empty.has(chunk))
    }

    /// Whether device memory may be freed although pages for other content are still missing. The
    /// copy out then fails only if other processes take twice the missing memory meanwhile. From now
    /// on the helpers also go on if the offload is given up. Always false if it was given up before,
    /// because a helper may have stopped.
    pub fn commit(&self) -> bool {
        const RESERVE_BYTES: u64 = 1 << 30;
        let missing_bytes = self.missing_bytes.load(Ordering::Acquire);
        if missing_bytes > 0 {
            let bytes = missing_bytes.saturating_mul(2).saturating_add(RESERVE_BYTES);
            if host_pressure::is_critical(bytes, self.place()) {
                self.revoke();
                return false;
            }
        }
        self.committed.store(1, Ordering::SeqCst);
        // A helper that sees a later cancellation also sees that the copy is committed.
        fence(Ordering::SeqCst);
        let is_given_up = process::page().is_some_and(CounterPage::is_turned_back);
        let may_free = !is_given_up && self.short.load(Ordering::Acquire) == 0;
        self.committed.store(u32::from(may_free), Ordering::SeqCst);
        may_free
    }

    /// Lets the controller give up the copy out again, because no device memory was freed.
    pub fn revoke(&self) {
        self.committed.store(0, Ordering::SeqCst);
    }

    /// Whether helpers are running.
    pub fn is_busy(&self) -> bool {
        self.helpers.load(Ordering::Acquire) > 0
    }

    /// Tells the helpers to stop. Each helper ends after its current chunk.
    pub fn stop(&self) {
        self.next.store(MAX_CHUNKS, Ordering::Release);
    }

    /// Starts helper threads that touch the pages of a pool's missing chunks. With `near`, they run
    /// only on these processors. [`Self::end`] must be called before and after.
    pub fn begin(&self, memory: StagingMemory, near: Option<CpuSet>) {
        let StagingMemory { start, bytes, of_file, place } = memory;
        self.start.store(start, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.of_file.store(usize::from(of_file), Ordering::Relaxed);
        let of_host_pool = usize::from(place == StagingPlace::HostPool);
        self.of_host_pool.store(of_host_pool, Ordering::Relaxed);
        let near = near.unwrap_or([0; 128]);
        self.near.iter().zip(near).for_each(|(word, near)| word.store(near, Ordering::Relaxed));
        self.empty.clear();
        self.short.store(0, Ordering::Release);
        self.revoke();
        self.next.store(0, Ordering::Release);
        let missing = (0..bytes.div_ceil(CHUNK_BYTES)).filter(|chunk| !self.resident.has(*chunk));
        self.set_missing(missing.clone().map(|chunk| chunk_bytes(bytes, chunk) as u64).sum());
        for _ in 0..missing.count().min(MAX_HELPERS).min(sys::processors()) {
            self.helpers.fetch_add(1, Ordering::AcqRel);
            if !libc::start_thread(help, core::ptr::null_mut(), StackSize::Default) {
                self.helpers.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Touches the pages of the next chunk. Skips the chunk if its pages are present or if no
    /// content will be stored in it. False: no chunk is left, host memory is short, or the copy out
    /// was cancelled.
    fn fill_next(&self) -> bool {
        let chunk = self.next.fetch_add(1, Ordering::AcqRel);
        let bytes = chunk_bytes(self.bytes.load(Ordering::Relaxed), chunk);
        if bytes == 0 {
            return false;
        }
        #[cfg(test)]
        tests::wait_to_fill(chunk);
        if !self.resident.has(chunk) && !self.empty.has(chunk) {
            let touched = if self.may_touch(bytes as u64) {
                let touched = match self.place() {
                    StagingPlace::Own => self.touch(chunk, bytes).then_some(chunk),
                    StagingPlace::HostPool => self.take_from_host_pool(chunk, bytes),
                };
                self.touching.fetch_sub(bytes as u64, Ordering::AcqRel);
                touched
            } else {
                None
            };
            let Some(touched) = touched else {
                self.short.store(1, Ordering::Release);
                self.stop();
                self.progress.fetch_add(1, Ordering::AcqRel);
                sys::futex_wake_all(&self.progress);
                return false;
            };
            self.resident.set(touched, true);
        } else if !self.resident.has(chunk) {
            self.count_touched(bytes as u64);
        }
        self.progress.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake_all(&self.progress);
        true
    }

    fn place(&self) -> StagingPlace {
        match self.of_host_pool.load(Ordering::Relaxed) {
            1 => StagingPlace::HostPool,
            _ => StagingPlace::Own,
        }
    }

    /// Requests the pages of a chunk from the host pool, and receives one reply. Maps the pages of
    /// the chunk that the reply names, which may be another chunk, and returns this chunk. `None`:
    /// the host pool has no memory, or the connection has failed.
    fn take_from_host_pool(&self, chunk: usize, bytes: usize) -> Option<usize> {
        let (answered, done) = host_pool::populate(chunk, bytes)?;
        let answered_bytes = chunk_bytes(self.bytes.load(Ordering::Relaxed), answered);
        if answered_bytes == 0 {
            return None;
        }
        let start = (self.start.load(Ordering::Relaxed) + answered * CHUNK_BYTES) as *mut u8;
        if !done {
            // SAFETY: the range is in a chunk of the pool, which has no content while it is being
            // filled. A part of its pages may exist.
            unsafe { sys::discard(start, answered_bytes, true) };
            return None;
        }
        // All pages exist, so this only maps them. The pages of the host pool are huge already.
        sys::prefer_huge_pages(start, answered_bytes);
        // SAFETY: as above.
        unsafe { sys::make_resident(start, answered_bytes, false) };
        sys::keep_page_sizes(start, answered_bytes);
        self.count_touched(answered_bytes as u64);
        Some(answered)
    }

    /// Touches all pages of a chunk. False: the copy out was cancelled, and the pages of the chunk
    /// were freed again.
    fn touch(&self, chunk: usize, bytes: usize) -> bool {
        let start = (self.start.load(Ordering::Relaxed) + chunk * CHUNK_BYTES) as *mut u8;
        let of_file = self.of_file.load(Ordering::Relaxed) == 1;
        for offset in (0..bytes).step_by(STEP_BYTES) {
            if is_turned_back() {
                // SAFETY: the range is in a chunk of the pool, which has no content while it is
                // being filled.
                unsafe { sys::discard(start, bytes, of_file) };
                return false;
            }
            let step_bytes = STEP_BYTES.min(bytes - offset);
            // SAFETY: the range is in a chunk of the pool, which has no content while it is being
            // filled.
            unsafe { sys::make_resident(start.add(offset), step_bytes, of_file) };
            self.count_touched(step_bytes as u64);
        }
        true
    }

    /// Sets the number of bytes that are still to be touched, in this state and in the process's
    /// counters.
    fn set_missing(&self, bytes: u64) {
        self.missing_bytes.store(bytes, Ordering::Release);
        if let Some(page) = process::page() {
            page.filling_bytes.store(bytes, Ordering::Relaxed);
        }
    }

    /// Subtracts touched bytes from the number of bytes that are still to be touched.
    fn count_touched(&self, bytes: u64) {
        let less = |missing: u64| Some(missing.saturating_sub(bytes));
        let before = self.missing_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        if let (Ok(before), Some(page)) = (before, process::page()) {
            // Helpers may write in any order: the lowest value is the latest.
            page.filling_bytes.fetch_min(before.saturating_sub(bytes), Ordering::Relaxed);
        }
    }

    /// Counts `bytes` as memory that a helper is touching now. False: host memory would become
    /// short, or the copy out was cancelled.
    ///
    /// If host memory seems short while other helpers are touching memory, waits for them first.
    /// Their bytes may be counted twice meanwhile: in the reading of free memory, and here.
    fn may_touch(&self, bytes: u64) -> bool {
        loop {
            let seen = self.progress.load(Ordering::Acquire);
            let touching = self.touching.load(Ordering::Acquire);
            if is_turned_back() {
                return false;
            }
            if !host_pressure::is_critical(touching.saturating_add(bytes), self.place()) {
                let counted = self.touching.compare_exchange(
                    touching,
                    touching + bytes,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                );
                if counted.is_ok() {
                    return true;
                }
            } else if touching == 0 || self.short.load(Ordering::Acquire) == 1 {
                return false;
            } else {
                sys::futex_wait(&self.progress, seen, 10);
            }
        }
    }

    /// Waits until the pages of a chunk are present. False: before that, host memory became short
    /// or the copy out was cancelled.
    pub fn wait(&self, chunk: usize) -> bool {
        #[cfg(test)]
        tests::fill_may_begin(chunk);
        loop {
            let seen = self.progress.load(Ordering::Acquire);
            if self.resident.has(chunk) {
                return true;
            }
            if self.short.load(Ordering::Acquire) == 1 {
                return false;
            }
            if self.helpers.load(Ordering::Acquire) == 0 {
                // Without helpers the chunk becomes resident when it is registered or copied to.
                if !self.fill_next() && self.short.load(Ordering::Acquire) == 0 {
                    // The last helper may have ended between the two checks.
                    if self.place() == StagingPlace::HostPool {
                        return self.resident.has(chunk);
                    }
                    self.resident.set(chunk, true);
                }
            } else {
                sys::futex_wait(&self.progress, seen, 10);
            }
        }
    }

    /// Stops the helpers, and waits until no helper touches the pool.
    pub fn end(&self) {
        self.stop();
        while self.helpers.load(Ordering::Acquire) > 0 {
            let seen = self.progress.load(Ordering::Acquire);
            sys::futex_wait(&self.progress, seen, 1);
        }
        self.set_missing(0);
    }
}

/// Whether the copy out in progress is cancelled: the controller has given up the offload, and no
/// device memory may be free yet, or host memory is short.
pub fn is_turned_back() -> bool {
    let is_cancelled = |page: &CounterPage| {
        // Pairs with the fence in `Prefault::commit`.
        fence(Ordering::SeqCst);
        !page.is_not_wanted() || PREFAULT.committed.load(Ordering::SeqCst) == 0
    };
    process::page().is_some_and(|page| page.is_turned_back() && is_cancelled(page))
}

/// Size of a chunk in a pool of `bytes` bytes. The last chunk may be shorter.
pub fn chunk_bytes(bytes: usize, chunk: usize) -> usize {
    bytes.saturating_sub(chunk.saturating_mul(CHUNK_BYTES)).min(CHUNK_BYTES)
}

unsafe extern "C" fn help(_: *mut c_void) -> *mut c_void {
    sys::set_thread_name(c"affinode-pool");
    numa::stay(&PREFAULT.near());
    while PREFAULT.fill_next() {}
    PREFAULT.helpers.fetch_sub(1, Ordering::AcqRel);
    PREFAULT.progress.fetch_add(1, Ordering::AcqRel);
    sys::futex_wake_all(&PREFAULT.progress);
    core::ptr::null_mut()
}

#[cfg(test)]
pub mod tests {
    use affinode_proto::wire::message::CopyOptions;

    use super::super::allocations::Allocations;
    use super::super::staging::StagingPool;
    use super::super::{SWAP, addresses, locked, with_pool};
    use super::*;

    const HUGE_PAGE_BYTES: usize = 2 << 20;

    /// First chunk that no helper fills before it is waited for. `usize::MAX`: none.
    pub static HELD_CHUNK: AtomicUsize = AtomicUsize::new(usize::MAX);

    /// Waits in a helper until the chunk may be filled.
    pub fn wait_to_fill(chunk: usize) {
        while chunk >= HELD_CHUNK.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    /// Lets the helpers go on if the copy out waits for a chunk that is held.
    pub fn fill_may_begin(chunk: usize) {
        if chunk >= HELD_CHUNK.load(Ordering::Acquire) {
            HELD_CHUNK.store(usize::MAX, Ordering::Release);
        }
    }

    fn own(start: usize, bytes: usize) -> StagingMemory {
        StagingMemory { start, bytes, of_file: false, place: StagingPlace::Own }
    }

    /// Sets the helper count to the value that a child has if it was forked while helpers were
    /// running.
    pub fn forked() {
        PREFAULT.helpers.store(3, Ordering::Release);
    }

    /// Returns the options of a copy out to memory of the process.
    pub fn options(keep: bool, check: bool) -> CopyOptions {
        CopyOptions { keep, check, ..CopyOptions::default() }
    }

    /// Lock for tests that use [`PREFAULT`], which exists once per process.
    pub static SHARED: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// Resets the state of the swap module for the next test: no memory is swappable, and there is
    /// no staging pool.
    pub fn forget_all() {
        locked(|allocations| *allocations = Allocations::empty());
        addresses::let_go();
        with_pool(|pool| {
            pool.end();
            *pool = StagingPool::none();
        });
        PREFAULT.resident.clear();
        HELD_CHUNK.store(usize::MAX, Ordering::Release);
        SWAP.in_use.store(0, Ordering::Release);
        SWAP.strayed.store(0, Ordering::Release);
    }

    #[test]
    fn chunks_are_filled_by_helpers_and_waiters() {
        const CHUNKS: usize = 3;
        let _own = SHARED.lock();
        let bytes = 2 * CHUNK_BYTES + HUGE_PAGE_BYTES;
        let at = sys::map_private(bytes).unwrap();
        PREFAULT.begin(own(at as usize, bytes), None);
        assert!((0..CHUNKS).all(|chunk| PREFAULT.wait(chunk)));
        PREFAULT.end();
        assert_eq!(PREFAULT.helpers.load(Ordering::Acquire), 0);
        // SAFETY: the test has mapped this range, and nothing uses it any more.
        unsafe {
            at.add(bytes - 1).write(7);
            sys::discard(at.add(bytes - HUGE_PAGE_BYTES), HUGE_PAGE_BYTES, false);
            assert_eq!(at.add(bytes - 1).read(), 0);
            sys::unmap_private(at, bytes);
        }
        PREFAULT.resident.clear();
    }

    /// The helpers must stop if the controller cancels the copy out. The controller does so when
    /// host memory is short at a limit that only the controller sees.
    #[test]
    fn fill_stops_when_copy_is_turned_back() {
        use affinode_proto::wire::Phase;
        let _own = SHARED.lock();
        let at = sys::map_private(2 * CHUNK_BYTES).unwrap();
        let fill = || {
            PREFAULT.begin(own(at as usize, 2 * CHUNK_BYTES), None);
            let is_in = PREFAULT.wait(0) && PREFAULT.wait(1);
            PREFAULT.end();
            is_in
        };
        let resident = || (0..2).filter(|chunk| PREFAULT.resident.has(*chunk)).count();
        process::with_page(|page| {
            page.generation.store(1, Ordering::Relaxed);
            page.turn_back_for_test(1);
            page.set_phase(Phase::CopyingOut);
            assert!(!fill(), "the chunk must not be touched");
            assert_eq!((resident(), PREFAULT.touching.load(Ordering::Acquire)), (0, 0));
            assert_eq!(page.filling_bytes.load(Ordering::Relaxed), 0, "the copy out is over");
            // The cancellation must not stop a prefault while no copy out is in progress.
            page.set_phase(Phase::Open);
            assert!(fill());
            PREFAULT.resident.clear();
            // The controller's cancellation was for an earlier copy out.
            page.generation.fetch_add(1, Ordering::Relaxed);
            page.set_phase(Phase::CopyingOut);
            assert!(fill());
        });
        // SAFETY: the test has mapped this range, and nothing uses it any more.
        unsafe { sys::unmap_private(at, 2 * CHUNK_BYTES) };
        PREFAULT.resident.clear();
    }

    /// The counters must tell the controller how many bytes are still to be touched.
    #[test]
    fn bytes_left_to_touch_are_published() {
        let _own = SHARED.lock();
        process::with_page(|page| {
            let left = || page.filling_bytes.load(Ordering::Relaxed);
            PREFAULT.set_missing(5);
            assert_eq!(left(), 5);
            PREFAULT.count_touched(2);
            assert_eq!(left(), 3);
            PREFAULT.count_touched(4);
            assert_eq!(left(), 0);
        });
    }

    /// If other processes have used up the host memory before the helpers touch it, the helpers
    /// must touch none of it. The next prefault must succeed when memory is free again.
    #[test]
    fn memory_that_others_took_is_not_touched() {
        let _own = SHARED.lock();
        let at = sys::map_private(2 * CHUNK_BYTES).unwrap();
        host_pressure::tests::TAKEN_BY_OTHERS.store(u64::MAX / 2, Ordering::Relaxed);
        PREFAULT.begin(own(at as usize, 2 * CHUNK_BYTES), None);
        assert!(!PREFAULT.wait(1), "the chunk must not be touched");
        PREFAULT.end();
        assert!(!PREFAULT.resident.has(0) && !PREFAULT.resident.has(1));
        host_pressure::tests::TAKEN_BY_OTHERS.store(0, Ordering::Relaxed);
        PREFAULT.begin(own(at as usize, 2 * CHUNK_BYTES), None);
        assert!(PREFAULT.wait(0) && PREFAULT.wait(1), "the next prefault succeeds");
        PREFAULT.end();
        assert_eq!(PREFAULT.touching.load(Ordering::Acquire), 0);
        // SAFETY: the test has mapped this range, and nothing uses it any more.
        unsafe { sys::unmap_private(at, 2 * CHUNK_BYTES) };
        PREFAULT.resident.clear();
    }

    #[test]
    fn a_helper_runs_where_it_is_told_to() {
        let _own = SHARED.lock();
        let allowed = sys::processors_allowed().unwrap();
        let last = (0..8192).rfind(|n| allowed[n / 64] & 1 << (n % 64) != 0).unwrap();
        let mut one = [0; 128];
        one[last / 64] = 1 << (last % 64);
        PREFAULT.begin(own(0, 0), Some(one));
        PREFAULT.helpers.fetch_add(1, Ordering::AcqRel);
        std::thread::spawn(move || {
            // SAFETY: the argument is unused, because there is nothing to fill.
            unsafe { help(core::ptr::null_mut()) };
            assert_eq!(sys::processors_allowed(), Some(one));
        })
        .join()
        .unwrap();
        PREFAULT.end();
    }

    #[test]
    fn a_set_of_chunks() {
        let chunks = ChunkQueue::none();
        chunks.set(70, true);
        assert!(chunks.has(70) && !chunks.has(69) && !chunks.has(MAX_CHUNKS + 70));
        chunks.set(70, false);
        assert!(!chunks.has(70));
    }
}
