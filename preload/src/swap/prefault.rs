//! Bringing the pool's chunks in, by helper threads: one alone is slower than the bus.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::{host_pressure, numa};
use crate::sys::CpuSet;
use crate::{libc, sys};

/// What is registered at a time, and the most that one copy moves.
pub const CHUNK_BYTES: usize = affinode_proto::wire::copier::CHUNK_BYTES as usize;
/// Most chunks of a pool.
pub const MAX_CHUNKS: usize = 64 * WORDS;
const WORDS: usize = 256;
const MAX_HELPERS: usize = 16;

/// A set of chunks.
pub struct ChunkQueue([AtomicU64; WORDS]);

impl ChunkQueue {
    /// None.
    pub const fn none() -> ChunkQueue {
        ChunkQueue([const { AtomicU64::new(0) }; WORDS])
    }

    fn word(&self, chunk: usize) -> Option<&AtomicU64> {
        self.0.get(chunk / 64)
    }

    /// Whether a chunk is in it.
    pub fn has(&self, chunk: usize) -> bool {
        self.word(chunk).is_some_and(|w| w.load(Ordering::Acquire) & 1 << (chunk % 64) != 0)
    }

    /// Takes a chunk in, or out.
    pub fn set(&self, chunk: usize, on: bool) {
        let bit = 1 << (chunk % 64);
        let Some(word) = self.word(chunk) else { return };
        if on {
            word.fetch_or(bit, Ordering::AcqRel)
        } else {
            word.fetch_and(!bit, Ordering::AcqRel)
        };
    }

    /// Takes all out.
    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Release));
    }
}

/// What the helpers do. Not the pool's own, which a forked child finds zeroed: no helper
/// lives in the child.
pub struct Prefault {
    start: AtomicUsize,
    bytes: AtomicUsize,
    of_file: AtomicUsize,
    /// Processors where helpers run; none: anywhere.
    near: [AtomicU64; 128],
    next: AtomicUsize,
    /// What helpers are touching now, in bytes.
    touching: AtomicU64,
    /// 1: host memory became short, and chunks are missing.
    short: AtomicU32,
    /// Chunks that are in.
    pub resident: ChunkQueue,
    /// Chunks in which nothing will be stored.
    pub empty: ChunkQueue,
    /// Changes with every chunk that has become resident.
    progress: AtomicU32,
    helpers: AtomicU32,
}

/// Of this process's pool.
pub static PREFAULT: Prefault = Prefault {
    start: AtomicUsize::new(0),
    bytes: AtomicUsize::new(0),
    of_file: AtomicUsize::new(0),
    near: [const { AtomicU64::new(0) }; 128],
    next: AtomicUsize::new(0),
    touching: AtomicU64::new(0),
    short: AtomicU32::new(0),
    resident: ChunkQueue::none(),
    empty: ChunkQueue::none(),
    progress: AtomicU32::new(0),
    helpers: AtomicU32::new(0),
};

impl Prefault {
    /// The first pool of this process: helpers of the one that forked it are not here.
    pub fn begins_in_this_process(&self) {
        self.helpers.store(0, Ordering::Release);
        self.touching.store(0, Ordering::Release);
    }

    /// Where helpers run.
    pub fn near(&self) -> CpuSet {
        core::array::from_fn(|n| self.near.get(n).map_or(0, |word| word.load(Ordering::Relaxed)))
    }

    /// Whether helpers are at work.
    pub fn is_busy(&self) -> bool {
        self.helpers.load(Ordering::Acquire) > 0
    }

    /// Has the helpers stop, each after its chunk.
    pub fn stop(&self) {
        self.next.store(MAX_CHUNKS, Ordering::Release);
    }

    /// Begins to bring in what is missing of a pool, on these processors if any are named.
    /// [`Self::end`] comes before and after.
    pub fn begin(&self, start: usize, bytes: usize, of_file: usize, near: Option<CpuSet>) {
        self.start.store(start, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.of_file.store(of_file, Ordering::Relaxed);
        let near = near.unwrap_or([0; 128]);
        self.near.iter().zip(near).for_each(|(word, near)| word.store(near, Ordering::Relaxed));
        self.empty.clear();
        self.short.store(0, Ordering::Release);
        self.next.store(0, Ordering::Release);
        let missing =
            (0..bytes.div_ceil(CHUNK_BYTES)).filter(|chunk| !self.resident.has(*chunk)).count();
        for _ in 0..missing.min(MAX_HELPERS).min(sys::processors()) {
            self.helpers.fetch_add(1, Ordering::AcqRel);
            if !libc::start_thread(help, core::ptr::null_mut()) {
                self.helpers.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Makes the next chunk resident; false when there is none left to begin.
    fn fill_next(&self) -> bool {
        let chunk = self.next.fetch_add(1, Ordering::AcqRel);
        let bytes = chunk_bytes(self.bytes.load(Ordering::Relaxed), chunk);
        if bytes == 0 {
            return false;
        }
        if !self.resident.has(chunk) && !self.empty.has(chunk) {
            if !self.may_touch(bytes as u64) {
                self.short.store(1, Ordering::Release);
                self.stop();
                self.progress.fetch_add(1, Ordering::AcqRel);
                sys::futex_wake_all(&self.progress);
                return false;
            }
            let at = self.start.load(Ordering::Relaxed) + chunk * CHUNK_BYTES;
            let of_file = self.of_file.load(Ordering::Relaxed) == 1;
            // SAFETY: a chunk of the pool, which holds nothing while it is being filled.
            unsafe { sys::make_resident(at as *mut u8, bytes, of_file) };
            self.touching.fetch_sub(bytes as u64, Ordering::AcqRel);
            self.resident.set(chunk, true);
        }
        self.progress.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake_all(&self.progress);
        true
    }

    /// Counts so much as being touched, unless host memory would become short by it. Where little
    /// is left, one helper after the other goes on: what the others are touching is counted twice
    /// by then, in the reading and here.
    fn may_touch(&self, bytes: u64) -> bool {
        loop {
            let seen = self.progress.load(Ordering::Acquire);
            let touching = self.touching.load(Ordering::Acquire);
            if !host_pressure::is_critical(touching.saturating_add(bytes)) {
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

    /// Until a chunk is in. False: host memory became short before.
    pub fn wait(&self, chunk: usize) -> bool {
        loop {
            let seen = self.progress.load(Ordering::Acquire);
            if self.resident.has(chunk) {
                return true;
            }
            if self.short.load(Ordering::Acquire) == 1 {
                return false;
            }
            if self.helpers.load(Ordering::Acquire) == 0 {
                // Nobody helps: what is registered or copied becomes resident by that.
                if !self.fill_next() && self.short.load(Ordering::Acquire) == 0 {
                    self.resident.set(chunk, true);
                }
            } else {
                sys::futex_wait(&self.progress, seen, 10);
            }
        }
    }

    /// Waits until no helper touches the pool any more.
    pub fn end(&self) {
        self.stop();
        while self.helpers.load(Ordering::Acquire) > 0 {
            let seen = self.progress.load(Ordering::Acquire);
            sys::futex_wait(&self.progress, seen, 1);
        }
    }
}

/// The size of a chunk of so many bytes: the last one is shorter.
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
    use super::super::allocations::Allocations;
    use super::super::staging::StagingPool;
    use super::super::{SWAP, addresses, locked, with_pool};
    use super::*;

    const HUGE_PAGE_BYTES: usize = 2 << 20;

    /// As a child finds it that was forked while helpers were at work.
    pub fn forked() {
        PREFAULT.helpers.store(3, Ordering::Release);
    }

    /// Who works with [`FILLING`], of which a process has one.
    pub static SHARED: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// Nothing is carried any more, and there is no pool.
    pub fn forget_all() {
        locked(|allocations| *allocations = Allocations::empty());
        addresses::let_go();
        with_pool(|pool| {
            pool.end();
            *pool = StagingPool::none();
        });
        PREFAULT.resident.clear();
        SWAP.in_use.store(0, Ordering::Release);
        SWAP.strayed.store(0, Ordering::Release);
    }

    #[test]
    fn chunks_are_filled_by_helpers_and_by_whoever_waits() {
        const CHUNKS: usize = 3;
        let _own = SHARED.lock();
        let bytes = 2 * CHUNK_BYTES + HUGE_PAGE_BYTES;
        let at = sys::map_private(bytes).unwrap();
        PREFAULT.begin(at as usize, bytes, 0, None);
        assert!((0..CHUNKS).all(|chunk| PREFAULT.wait(chunk)));
        PREFAULT.end();
        assert_eq!(PREFAULT.helpers.load(Ordering::Acquire), 0);
        // SAFETY: mapped above, with that size.
        unsafe {
            at.add(bytes - 1).write(7);
            sys::discard(at.add(bytes - HUGE_PAGE_BYTES), HUGE_PAGE_BYTES, false);
            assert_eq!(at.add(bytes - 1).read(), 0);
            sys::unmap_private(at, bytes);
        }
        PREFAULT.resident.clear();
    }

    /// The memory that the controller had promised is another's by the time that it is touched.
    #[test]
    fn memory_that_others_took_is_not_touched() {
        let _own = SHARED.lock();
        let at = sys::map_private(2 * CHUNK_BYTES).unwrap();
        host_pressure::tests::TAKEN_BY_OTHERS.store(u64::MAX / 2, Ordering::Relaxed);
        PREFAULT.begin(at as usize, 2 * CHUNK_BYTES, 0, None);
        assert!(!PREFAULT.wait(1), "it would be touched");
        PREFAULT.end();
        assert!(!PREFAULT.resident.has(0) && !PREFAULT.resident.has(1));
        host_pressure::tests::TAKEN_BY_OTHERS.store(0, Ordering::Relaxed);
        PREFAULT.begin(at as usize, 2 * CHUNK_BYTES, 0, None);
        assert!(PREFAULT.wait(0) && PREFAULT.wait(1), "the next time is as ever");
        PREFAULT.end();
        assert_eq!(PREFAULT.touching.load(Ordering::Acquire), 0);
        // SAFETY: mapped above, with that size.
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
        PREFAULT.begin(0, 0, 0, Some(one));
        PREFAULT.helpers.fetch_add(1, Ordering::AcqRel);
        std::thread::spawn(move || {
            // SAFETY: there is nothing to fill.
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
