//! Shares chunks of the staging buffer between processes of a dedup domain, the namespace in which
//! identical content is stored once. Chunks with the same content are replaced by mappings of one
//! sealed file.
//!
//! ```text
//! own ──sealed file of the copier, same bytes──> shared ──resident, or before next use──> own, empty
//! ```
//!
//! Each process maps the sealed file itself, so the file exists for this process even after the
//! copier and the other processes have ended. The copier creates the file from content that two
//! processes have. A process compares the file with its chunk again before it replaces the chunk,
//! because the chunk's own content is then freed.

use super::{CHUNK_BYTES, PREFAULT, StagingPool, chunk_bytes};
use crate::sys::{self, PagePlacement, SealedFile};

impl StagingPool {
    /// Replaces a chunk by a mapping of a sealed file with the same content, and frees the chunk.
    /// False: the contents differ, a step failed, or `stop` returned true. The content is then as
    /// before.
    pub fn share(&mut self, chunk: usize, sealed: i32, stop: impl Fn() -> bool) -> bool {
        let fits = chunk_bytes(self.bytes, chunk) == CHUNK_BYTES
            && self.tainted == 0
            && !self.registered.has(chunk)
            && !self.shared.has(chunk);
        if self.file().is_none() || !fits {
            return false;
        }
        let at = self.chunk_at(chunk);
        // SAFETY: a chunk of the pool, to which only the agent, here, writes.
        let same = |sealed: &SealedFile| unsafe { sealed.is_same(at, stop) };
        let Some(sealed) = SealedFile::map(sealed, CHUNK_BYTES).filter(same) else {
            return false;
        };
        // SAFETY: a chunk of the pool, to which nothing is copied until it is no longer shared.
        match unsafe { sealed.take_place(at) } {
            PagePlacement::Taken => {}
            PagePlacement::AsBefore => return false,
            PagePlacement::Broken => {
                self.mend(chunk);
                return false;
            }
        }
        self.shared.set(chunk, true);
        // The chunk has no pages of its own for the next offload.
        PREFAULT.resident.set(chunk, false);
        // The descriptor may refer to another file by now.
        self.file().is_some_and(|file| sys::punch(file, chunk * CHUNK_BYTES, CHUNK_BYTES))
    }

    /// Whether any chunk of the pool is replaced by a mapping of a shared file.
    pub fn is_shared(&self) -> bool {
        self.first_shared().is_some()
    }

    fn first_shared(&self) -> Option<usize> {
        (0..self.chunks()).find(|chunk| self.shared.has(*chunk))
    }

    /// Replaces one shared chunk of an unused pool by the pool's own memory. False: no chunk is
    /// shared, or the replacement failed and the pool must be replaced.
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

    /// Maps the pool's own file at the chunk's addresses again. False: the mapping failed.
    fn is_put_back(&self, chunk: usize) -> bool {
        let at = self.chunk_at(chunk);
        let put_back = self.file().is_some_and(|file| {
            // SAFETY: a chunk of the pool without content, or one that is not mapped.
            unsafe { sys::map_over(at, CHUNK_BYTES, file, chunk * CHUNK_BYTES) }
        });
        if put_back {
            sys::prefer_huge_pages(at, CHUNK_BYTES);
        }
        put_back
    }

    /// Maps the pool's own file at a chunk's addresses again. This is needed if the kernel has
    /// removed the chunk's mapping, but then could not map the shared file there for lack of
    /// memory. The content is in that case only in the pool's file, and the agent cannot continue
    /// without it. Therefore the function tries again until it succeeds.
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
    /// Marks a chunk as shared or as not shared, without mapping a file.
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
    use super::super::super::prefault::StagingPlace;
    use super::super::super::prefault::tests::SHARED;
    use super::super::StagingKind;
    use super::*;
    use crate::fds;

    const BYTES: usize = 2 * CHUNK_BYTES + (2 << 20);

    /// A pool in a file, with two whole chunks and a part of one.
    fn of_file() -> StagingPool {
        let mut pool = StagingPool::none();
        assert!(pool.replace(BYTES, StagingKind::File) && pool.file().is_some());
        pool.context = CONTEXT;
        pool
    }

    fn end(pool: &StagingPool) {
        // SAFETY: `of_file` has mapped this range, and nothing uses it any more.
        unsafe { sys::unmap_private(pool.start as *mut u8, BYTES) };
        fds::POOL.close();
        PREFAULT.resident.clear();
    }

    /// Fills a chunk with `byte`, except for its last byte, which becomes `last`.
    fn write(pool: &StagingPool, chunk: usize, byte: u8, last: u8) {
        // SAFETY: a chunk of the pool that is not shared.
        unsafe {
            pool.chunk_at(chunk).write_bytes(byte, CHUNK_BYTES);
            pool.chunk_at(chunk).add(CHUNK_BYTES - 1).write(last);
        }
    }

    fn read(pool: &StagingPool, chunk: usize) -> (u8, u8) {
        // SAFETY: a chunk of the pool.
        unsafe { (pool.chunk_at(chunk).read(), pool.chunk_at(chunk).add(CHUNK_BYTES - 1).read()) }
    }

    /// Makes a file with the content of a chunk, and adds the given seals.
    fn sealed(pool: &StagingPool, chunk: usize, seals: &[SealFlag]) -> OwnedFd {
        let fd = sys::memory_file(c"sealed", CHUNK_BYTES).unwrap();
        // SAFETY: the descriptor was just created and has no other owner.
        let mut file = unsafe { File::from_raw_fd(fd) };
        // SAFETY: a chunk of the pool, to which nothing writes meanwhile.
        let content = unsafe { core::slice::from_raw_parts(pool.chunk_at(chunk), CHUNK_BYTES) };
        file.write_all(content).unwrap();
        let seals = seals.iter().copied().collect::<SealFlag>();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file.into()
    }

    fn share(pool: &mut StagingPool, chunk: usize, file: &OwnedFd) -> bool {
        pool.share(chunk, file.as_raw_fd(), || false)
    }

    /// Number of bytes that the pool's file occupies.
    fn has_bytes(pool: &StagingPool) -> usize {
        // SAFETY: open as long as the pool.
        let file = unsafe { BorrowedFd::borrow_raw(pool.file().unwrap()) };
        fstat(file).unwrap().st_blocks as usize * 512
    }

    const SHRINK: SealFlag = SealFlag::F_SEAL_SHRINK;
    const GROW: SealFlag = SealFlag::F_SEAL_GROW;
    const FUTURE_WRITE: SealFlag = SealFlag::from_bits_retain(16);

    #[test]
    fn common_chunk_is_shared_until_the_next_use() {
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
        assert_eq!(has_bytes(&pool), CHUNK_BYTES, "the process's own chunk is freed");
        assert!(pool.is_shared());
        assert_eq!(pool.kept_bytes(), CHUNK_BYTES as u64, "only chunks that are not shared count");
        assert!(pool.unshare_next() && !pool.unshare_next());
        assert!(
            !pool.is_shared() && !PREFAULT.resident.has(1),
            "the chunk has no pages of its own"
        );
        write(&pool, 1, 5, 6);
        assert_eq!((read(&pool, 1), has_bytes(&pool)), ((5, 6), 2 * CHUNK_BYTES));
        end(&pool);
    }

    /// Before a pool is used again, its shared chunks must be replaced by memory of the pool's own.
    /// This also applies if the process is offloaded again before `tidy`, and if the pool's file is
    /// closed.
    #[test]
    fn pool_is_unshared_before_its_next_use() {
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
            assert!(pool.begin(BYTES, CONTEXT, StagingPlace::Own));
            (0..pool.chunks()).for_each(|chunk| {
                pool.ready(chunk * CHUNK_BYTES);
            });
            pool.end();
            assert!(!pool.is_shared() && !pool.is_tainted());
            assert_eq!(pool.kept_bytes(), pool.bytes as u64, "all pages are its own again");
            write(&pool, 0, 5, 6);
            assert_eq!(read(&pool, 0), (5, 6));
            end(&pool);
        }
    }

    #[test]
    fn only_equal_sealed_file_replaces_a_chunk() {
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
        assert!(!pool.share(0, same.as_raw_fd(), || true), "a caller waits");
        assert!(!share(&mut pool, 2, &same), "not a whole chunk");
        assert!(!share(&mut pool, usize::MAX, &same) && !share(&mut pool, 3, &same));
        pool.taint();
        assert!(!share(&mut pool, 0, &same));
        pool.tainted = 0;
        assert_eq!(
            (read(&pool, 0), has_bytes(&pool)),
            ((7, 8), 2 * CHUNK_BYTES),
            "a refused chunk does not change"
        );
        assert!(share(&mut pool, 0, &same), "a file with the same content is accepted");
        assert!(!share(&mut pool, 0, &same), "once");
        end(&pool);
    }
}
