//! Chunks whose content other processes of the same tenant hold as well: one file for all of them,
//! sealed, in the place of each one's own.
//!
//! ```text
//! own ──the copier shows a sealed file; byte by byte the same──> shared ──home, or about to be used──> own, empty
//! ```
//!
//! The file is mapped here, so that neither the copier's death nor the others' takes it away. It is
//! the copier that made it, from what both have; that it is the same is looked at here once more,
//! because what was in its place is gone then.

use super::{CHUNK_BYTES, PREFAULT, StagingPool, chunk_bytes};
use crate::sys::{self, PagePlacement, SealedFile};

impl StagingPool {
    /// Puts a sealed file in the place of a chunk that has content, if that is the same, and frees
    /// what was there. False: that was not done, also because of `stop`; the content is as it was.
    pub fn share(&mut self, chunk: usize, sealed: i32, stop: impl Fn() -> bool) -> bool {
        let fits = chunk_bytes(self.bytes, chunk) == CHUNK_BYTES
            && self.tainted == 0
            && !self.registered.has(chunk)
            && !self.shared.has(chunk);
        if self.file().is_none() || !fits {
            return false;
        }
        let at = self.chunk_at(chunk);
        // SAFETY: a chunk of the pool, which only the agent, here, writes to.
        let same = |sealed: &SealedFile| unsafe { sealed.is_same(at, stop) };
        let Some(sealed) = SealedFile::map(sealed, CHUNK_BYTES).filter(same) else {
            return false;
        };
        // SAFETY: as above; nothing is copied to it until it is its own again.
        match unsafe { sealed.take_place(at) } {
            PagePlacement::Taken => {}
            PagePlacement::AsBefore => return false,
            PagePlacement::Broken => {
                self.mend(chunk);
                return false;
            }
        }
        self.shared.set(chunk, true);
        // What it had of its own is not there for the next time.
        PREFAULT.resident.set(chunk, false);
        // Meanwhile the number may have come to mean another file.
        self.file().is_some_and(|file| sys::punch(file, chunk * CHUNK_BYTES, CHUNK_BYTES))
    }

    /// Whether content is in files that others have hold of.
    pub fn is_shared(&self) -> bool {
        self.first_shared().is_some()
    }

    fn first_shared(&self) -> Option<usize> {
        (0..self.chunks()).find(|chunk| self.shared.has(*chunk))
    }

    /// Makes a chunk of an unused pool its own again. False: there is none, or it cannot be, and the
    /// pool is to be replaced.
    pub(super) fn unshare_next(&mut self) -> bool {
        let Some(chunk) = self.first_shared() else {
            return false;
        };
        if !self.unregister(chunk) || !self.is_put_back(chunk) {
            self.taint();
            return false;
        }
        self.shared.set(chunk, false);
        self.forget(chunk * CHUNK_BYTES, CHUNK_BYTES);
        true
    }

    /// Puts a part of the pool's file where it belongs.
    fn is_put_back(&self, chunk: usize) -> bool {
        let at = self.chunk_at(chunk);
        let put_back = self.file().is_some_and(|file| {
            // SAFETY: a chunk of the pool, in which nothing is, or which is not mapped.
            unsafe { sys::map_over(at, CHUNK_BYTES, file, chunk * CHUNK_BYTES) }
        });
        if put_back {
            sys::prefer_huge_pages(at, CHUNK_BYTES);
        }
        put_back
    }

    /// The kernel has taken a chunk away and had no memory for what was to come in its place. The
    /// content is in the file alone now, and has to be mapped: nothing goes on without it.
    fn mend(&self, chunk: usize) {
        const PAUSE_US: u64 = 10_000;
        while !self.is_put_back(chunk) {
            sys::sleep_us(PAUSE_US);
        }
    }

    fn chunk_at(&self, chunk: usize) -> *mut u8 {
        self.at(chunk * CHUNK_BYTES).cast::<u8>()
    }
}

#[cfg(test)]
impl StagingPool {
    /// As if a chunk were shared.
    pub fn say_shared(&self, chunk: usize, shared: bool) {
        self.shared.set(chunk, shared);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    use nix::sys::stat::fstat;

    use super::super::super::fake_driver::{CONTEXT, Fake};
    use super::super::super::prefault::tests::SHARED;
    use super::*;
    use crate::fds;

    const BYTES: usize = 2 * CHUNK_BYTES + (2 << 20);

    /// Two chunks and a piece of one, in a file.
    fn of_file() -> StagingPool {
        let mut pool = StagingPool::none();
        assert!(pool.replace(BYTES, true) && pool.file().is_some());
        pool.context = CONTEXT;
        pool
    }

    fn end(pool: &StagingPool) {
        // SAFETY: mapped in `of_file`, with that size.
        unsafe { sys::unmap_private(pool.start as *mut u8, BYTES) };
        fds::POOL.close();
        PREFAULT.resident.clear();
    }

    /// All the same byte, but for the last.
    fn write(pool: &StagingPool, chunk: usize, byte: u8, last: u8) {
        // SAFETY: a chunk of the pool, that is its own.
        unsafe {
            pool.chunk_at(chunk).write_bytes(byte, CHUNK_BYTES);
            pool.chunk_at(chunk).add(CHUNK_BYTES - 1).write(last);
        }
    }

    fn read(pool: &StagingPool, chunk: usize) -> (u8, u8) {
        // SAFETY: a chunk of the pool.
        unsafe { (pool.chunk_at(chunk).read(), pool.chunk_at(chunk).add(CHUNK_BYTES - 1).read()) }
    }

    /// A file with the content of a chunk, and these seals.
    fn sealed(pool: &StagingPool, chunk: usize, seals: &[SealFlag]) -> OwnedFd {
        let fd = sys::memory_file(c"sealed", CHUNK_BYTES).unwrap();
        // SAFETY: just made.
        let mut file = unsafe { File::from_raw_fd(fd) };
        // SAFETY: a chunk of the pool, which nobody writes to meanwhile.
        let content = unsafe { core::slice::from_raw_parts(pool.chunk_at(chunk), CHUNK_BYTES) };
        file.write_all(content).unwrap();
        let seals = seals.iter().copied().collect::<SealFlag>();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file.into()
    }

    fn share(pool: &mut StagingPool, chunk: usize, file: &OwnedFd) -> bool {
        pool.share(chunk, file.as_raw_fd(), || false)
    }

    /// How many bytes of memory the pool's file has.
    fn has_bytes(pool: &StagingPool) -> usize {
        // SAFETY: open as long as the pool.
        let file = unsafe { BorrowedFd::borrow_raw(pool.file().unwrap()) };
        fstat(file).unwrap().st_blocks as usize * 512
    }

    const SHRINK: SealFlag = SealFlag::F_SEAL_SHRINK;
    const GROW: SealFlag = SealFlag::F_SEAL_GROW;
    const FUTURE_WRITE: SealFlag = SealFlag::from_bits_retain(16);

    #[test]
    fn what_others_hold_as_well_is_held_once_until_the_pool_is_used_again() {
        let _own = SHARED.lock();
        let _fake = Fake::new();
        let mut pool = of_file();
        write(&pool, 0, 7, 8);
        write(&pool, 1, 9, 9);
        let common = sealed(&pool, 1, &[SHRINK, GROW, FUTURE_WRITE]);
        assert_eq!(has_bytes(&pool), 2 * CHUNK_BYTES);
        assert!(!pool.is_shared());
        (0..2).for_each(|chunk| PREFAULT.resident.set(chunk, true));
        assert!(share(&mut pool, 1, &common));
        drop(common);
        assert_eq!((read(&pool, 0), read(&pool, 1)), ((7, 8), (9, 9)));
        assert_eq!(has_bytes(&pool), CHUNK_BYTES, "its own is given back");
        assert!(pool.is_shared());
        assert_eq!(pool.kept_bytes(), CHUNK_BYTES as u64, "of host memory that it can count on");
        assert!(pool.unshare_next() && !pool.unshare_next());
        assert!(!pool.is_shared() && !PREFAULT.resident.has(1), "its pages are to be brought in");
        write(&pool, 1, 5, 6);
        assert_eq!((read(&pool, 1), has_bytes(&pool)), ((5, 6), 2 * CHUNK_BYTES));
        end(&pool);
    }

    /// Also for a process that leaves again before it was tidied, and where a chunk cannot be made
    /// its own again.
    #[test]
    fn a_pool_is_all_its_own_before_anything_is_written_to_it() {
        let _own = SHARED.lock();
        let _fake = Fake::new();
        for file_is_gone in [false, true] {
            let mut pool = of_file();
            write(&pool, 0, 7, 8);
            let common = sealed(&pool, 0, &[SHRINK, GROW, FUTURE_WRITE]);
            assert!(share(&mut pool, 0, &common));
            if file_is_gone {
                fds::POOL.close();
            }
            assert!(pool.begin(BYTES, CONTEXT));
            (0..pool.chunks()).for_each(|chunk| {
                pool.ready(chunk * CHUNK_BYTES);
            });
            pool.end();
            assert!(!pool.is_shared() && !pool.is_tainted());
            assert_eq!(pool.kept_bytes(), pool.bytes as u64, "its pages are its own");
            write(&pool, 0, 5, 6);
            assert_eq!(read(&pool, 0), (5, 6));
            end(&pool);
        }
    }

    #[test]
    fn only_what_is_the_same_for_good_takes_the_place_of_a_chunk() {
        let _own = SHARED.lock();
        let mut pool = of_file();
        write(&pool, 0, 7, 8);
        write(&pool, 1, 7, 9);
        let same = sealed(&pool, 0, &[SHRINK, GROW, FUTURE_WRITE]);
        let other = sealed(&pool, 1, &[SHRINK, GROW, FUTURE_WRITE]);
        let writable = sealed(&pool, 0, &[SHRINK, GROW]);
        let shrinks = sealed(&pool, 0, &[GROW, FUTURE_WRITE]);
        for (refused, why) in [(&other, "the last byte"), (&writable, "seal"), (&shrinks, "seal")] {
            assert!(!share(&mut pool, 0, refused), "{why}");
        }
        assert!(!pool.share(0, same.as_raw_fd(), || true), "somebody calls");
        assert!(!share(&mut pool, 2, &same), "not a whole chunk");
        assert!(!share(&mut pool, usize::MAX, &same) && !share(&mut pool, 3, &same));
        pool.taint();
        assert!(!share(&mut pool, 0, &same));
        pool.tainted = 0;
        assert_eq!((read(&pool, 0), has_bytes(&pool)), ((7, 8), 2 * CHUNK_BYTES), "as it was");
        assert!(share(&mut pool, 0, &same), "this one fits");
        assert!(!share(&mut pool, 0, &same), "once");
        end(&pool);
    }
}
