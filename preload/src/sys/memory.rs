//! Maps, shares and frees memory of the process.

use core::ffi::{CStr, c_void};

use super::{Errno, call, close, fcntl, number, plain};

/// Makes the kernel zero these pages in a forked child.
///
/// # Safety
/// The range must be whole, private, anonymous pages that belong to the caller.
pub unsafe fn wipe_on_fork(start: *const c_void, bytes: usize) -> Result<(), Errno> {
    const MADV_WIPEONFORK: usize = 18;
    let args = [start as usize, bytes, MADV_WIPEONFORK, 0, 0, 0];
    // SAFETY: the call changes no content in this process, and the caller is responsible for the
    // range.
    unsafe { call(number::MADVISE, args) }.map(drop)
}

/// Maps memory that has no pages until it is used, and that exists neither in a forked child nor in
/// a core dump. `place` is what `mmap` gets, with its access in place of the protection.
///
/// If the process has called `mlockall(MCL_FUTURE)`, the kernel allocates all pages of a new
/// mapping at once, except where no access is permitted. So access is permitted only when the
/// mapping is no longer locked.
///
/// # Safety
/// If `place` names an address (`MAP_FIXED`), nothing may refer to what is mapped there. After an
/// error of a fixed mapping, the state of the range is unknown.
unsafe fn map_unpopulated(place: [usize; 6]) -> Result<usize, Errno> {
    const PROT_NONE: usize = 0;
    const MAP_FIXED: usize = 0x10;
    const ENOMEM: Errno = Errno(12);
    let [at, bytes, access, flags, fd, offset] = place;
    // SAFETY: the caller is responsible for a range that it names.
    let start = unsafe { call(number::MMAP, [at, bytes, PROT_NONE, flags, fd, offset]) }?;
    // SAFETY: these calls change no content, and are made for the mapping just made.
    let permitted = unsafe {
        // If this fails, the pages are allocated too early, and the memory is nevertheless usable.
        let _ = call(number::MUNLOCK, [start, bytes, 0, 0, 0, 0]);
        match is_kept_private(start, bytes) {
            true => call(number::MPROTECT, [start, bytes, access, 0, 0, 0]),
            false => Err(ENOMEM),
        }
    };
    if permitted.is_err() && flags & MAP_FIXED == 0 {
        unmap(start, bytes);
    }
    permitted.map(|_| start)
}

/// Maps private memory that exists neither in a forked child nor in a core dump.
pub fn map_private(bytes: usize) -> Result<*mut u8, Errno> {
    const PROT_READ_WRITE: usize = 1 | 2;
    const PRIVATE_ANONYMOUS_NORESERVE: usize = 2 | 0x20 | 0x4000;
    let place = [0, bytes, PROT_READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, usize::MAX, 0];
    // SAFETY: a new mapping at an address that the kernel chooses.
    unsafe { map_unpopulated(place) }.map(|at| at as *mut u8)
}

/// Unmaps a part of a range that [`map_private`] mapped.
///
/// # Safety
/// Nothing may refer to the unmapped part afterwards.
pub unsafe fn unmap_private(start: *mut u8, bytes: usize) {
    unmap(start as usize, bytes);
}

/// Runs `run` with zeroed memory that is aligned to its size (a power of two). Returns `None` if
/// memory is short.
pub fn with_scratch<T>(bytes: usize, run: impl FnOnce(*mut u8) -> T) -> Option<T> {
    let reserved = map_private(2 * bytes).ok()? as usize;
    let done = run(reserved.next_multiple_of(bytes) as *mut u8);
    unmap(reserved, 2 * bytes);
    Some(done)
}

/// Replaces a part of a range that [`map_private`] mapped by a shared mapping of a part of a file.
/// Like the old mapping, the new one exists neither in a forked child nor in a core dump. Returns
/// false if this fails. The state of the range is then unknown.
///
/// # Safety
/// Nothing may refer to the part that is replaced.
pub unsafe fn map_over(start: *mut u8, bytes: usize, fd: i32, offset: usize) -> bool {
    const PROT_READ_WRITE: usize = 1 | 2;
    const MAP_SHARED_FIXED: usize = 1 | 0x10;
    let place = [start as usize, bytes, PROT_READ_WRITE, MAP_SHARED_FIXED, fd as usize, offset];
    // SAFETY: this library has mapped the range, and the caller is responsible for it.
    unsafe { map_unpopulated(place) }.is_ok()
}

/// Excludes a mapping of this library from forked children (`MADV_DONTFORK`) and from core dumps
/// (`MADV_DONTDUMP`). A dump would otherwise contain the content of the process's GPU memory, which
/// it does not contain without this library. Returns false if the kernel refused.
fn is_kept_private(at: usize, bytes: usize) -> bool {
    const MADV_DONTFORK: usize = 10;
    const MADV_DONTDUMP: usize = 16;
    [MADV_DONTFORK, MADV_DONTDUMP].into_iter().all(|advice| {
        // SAFETY: the call changes no content in this process, and is only made for mappings of
        // this library.
        unsafe { call(number::MADVISE, [at, bytes, advice, 0, 0, 0]) }.is_ok()
    })
}

/// Requests huge pages for a range.
pub fn prefer_huge_pages(start: *mut u8, bytes: usize) {
    const MADV_HUGEPAGE: usize = 14;
    // SAFETY: changes no content.
    let _ = unsafe { call(number::MADVISE, [start as usize, bytes, MADV_HUGEPAGE, 0, 0, 0]) };
}

/// Prevents the kernel from replacing the pages of a range by huge pages. The kernel would charge
/// the huge pages to the cgroup of this process, even if another process had allocated the pages.
pub fn keep_page_sizes(start: *mut u8, bytes: usize) {
    const MADV_NOHUGEPAGE: usize = 15;
    // SAFETY: changes no content.
    let _ = unsafe { call(number::MADVISE, [start as usize, bytes, MADV_NOHUGEPAGE, 0, 0, 0]) };
}

/// Allocates the pages of new memory at once. For a file, the function requests huge pages, which
/// the kernel may deny. Without the request, a file gets small pages on most machines, because of
/// the default of `shmem_enabled`.
///
/// # Safety
/// The range must be mapped, must begin and end at the border of a huge page, and must have no
/// content. The function writes zeros: into each huge page of a file and, on kernels before 5.14,
/// into all pages.
pub unsafe fn make_resident(start: *mut u8, bytes: usize, of_file: bool) {
    const MADV_POPULATE_WRITE: usize = 23;
    const PAGE_BYTES: usize = 4096;
    if of_file {
        // SAFETY: the caller meets the conditions of this function.
        unsafe { make_huge(start, bytes) };
    }
    // SAFETY: changes no content.
    let done =
        unsafe { call(number::MADVISE, [start as usize, bytes, MADV_POPULATE_WRITE, 0, 0, 0]) };
    if done.is_err() {
        for offset in (0..bytes).step_by(PAGE_BYTES) {
            // SAFETY: this page is inside the range for which the caller is responsible.
            unsafe { start.add(offset).write_volatile(0) };
        }
    }
}

/// Allocates pages of a file as huge pages, if the kernel allows it.
///
/// # Safety
/// The same conditions as for [`make_resident`].
unsafe fn make_huge(start: *mut u8, bytes: usize) {
    const MADV_COLLAPSE: usize = 25;
    const HUGE_PAGE_BYTES: usize = 2 << 20;
    for offset in (0..bytes).step_by(HUGE_PAGE_BYTES) {
        let page_bytes = HUGE_PAGE_BYTES.min(bytes - offset);
        // SAFETY: the address is inside the range for which the caller is responsible. The kernel
        // only collapses a range that has a page already.
        let done = unsafe {
            let page = start.add(offset);
            page.write_volatile(0);
            call(number::MADVISE, [page as usize, page_bytes, MADV_COLLAPSE, 0, 0, 0])
        };
        if done.is_err() {
            // The kernel is older than 6.1, or it denies huge pages. Small pages are correct, too.
            return;
        }
    }
}

/// Frees the physical pages of a range. The range stays mapped and reads as zero. Returns false if
/// pages of the range may still be allocated.
///
/// # Safety
/// The content of the range must not be needed any more.
pub unsafe fn discard(start: *mut u8, bytes: usize, of_file: bool) -> bool {
    const MADV_DONTNEED: usize = 4;
    const MADV_REMOVE: usize = 9;
    let advice = if of_file { MADV_REMOVE } else { MADV_DONTNEED };
    // SAFETY: the caller guarantees that the content is not needed.
    let advise = || unsafe { call(number::MADVISE, [start as usize, bytes, advice, 0, 0, 0]) };
    advise().is_ok() || {
        // The kernel frees no locked pages. The process may have locked all of its memory
        // (`mlockall`).
        // SAFETY: changes no content.
        let _ = unsafe { call(number::MUNLOCK, [start as usize, bytes, 0, 0, 0, 0]) };
        advise().is_ok()
    }
}

/// Creates a memory file of `bytes` zero bytes that can be sealed.
pub fn memory_file(name: &CStr, bytes: usize) -> Result<i32, Errno> {
    const CLOEXEC_ALLOW_SEALING: usize = 1 | 2;
    const EFBIG: Errno = Errno(27);
    // Check this here, because the kernel would report this error by a signal that ends the
    // process.
    if bytes > super::file_limit_bytes() {
        return Err(EFBIG);
    }
    let args = [name.as_ptr() as usize, CLOEXEC_ALLOW_SEALING, 0, 0, 0, 0];
    let fd = plain(number::MEMFD_CREATE, args)?;
    if let Err(error) = plain(number::FTRUNCATE, [fd, bytes, 0, 0, 0, 0]) {
        close(fd as i32);
        return Err(error);
    }
    Ok(fd as i32)
}

/// Seals the size of a memory file, so that it can never change again.
pub fn seal_size(fd: i32) -> Result<(), Errno> {
    const F_ADD_SEALS: usize = 1033;
    const SEAL_SHRINK_GROW: usize = 1 | 2 | 4;
    fcntl(fd, F_ADD_SEALS, SEAL_SHRINK_GROW).map(drop)
}

/// A memory file whose content can no longer change, mapped for reading. The mapping exists neither
/// in a forked child nor in a core dump.
pub struct SealedFile {
    at: usize,
    bytes: usize,
}

/// State of a memory range after an attempt to move a mapping into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagePlacement {
    /// The range has the new mapping.
    Taken,
    /// The range still has its old mapping, unchanged.
    AsBefore,
    /// Parts of the range's old mapping are missing, and the new mapping is not there.
    Broken,
}

impl SealedFile {
    /// Maps the first `bytes` of a file. Returns `None` if the file is not sealed against changes,
    /// or is shorter.
    pub fn map(fd: i32, bytes: usize) -> Option<SealedFile> {
        const PROT_READ: usize = 1;
        const MAP_SHARED_POPULATE: usize = 1 | 0x8000;
        if !is_sealed(fd, bytes) {
            return None;
        }
        let args = [0, bytes, PROT_READ, MAP_SHARED_POPULATE, fd as usize, 0];
        let sealed = SealedFile { at: plain(number::MMAP, args).ok()?, bytes };
        is_kept_private(sealed.at, bytes).then_some(sealed)
    }

    /// Whether the file has the same content as the memory at an address. `stop` is polled. If it
    /// returns true, the comparison ends and the result is false.
    ///
    /// # Safety
    /// Memory must be mapped at `at`, in whole pages, with the same number of bytes as this
    /// mapping.
    pub unsafe fn is_same(&self, at: *const u8, stop: impl Fn() -> bool) -> bool {
        const PART_BYTES: usize = 4 << 20;
        const WORD_BYTES: usize = size_of::<u64>();
        let mut parts = (0..self.bytes).step_by(PART_BYTES);
        parts.all(|offset| {
            let words = PART_BYTES.min(self.bytes - offset) / WORD_BYTES;
            // SAFETY: the pages are inside this mapping, of a file that does not shrink, and inside
            // the range for which the caller is responsible. Both begin with a page, and nothing
            // writes to either.
            let (one, other) = unsafe {
                let (one, other) = ((self.at as *const u8).add(offset), at.add(offset));
                (
                    core::slice::from_raw_parts(one.cast::<u64>(), words),
                    core::slice::from_raw_parts(other.cast::<u64>(), words),
                )
            };
            !stop() && are_same(one, other)
        })
    }

    /// Moves this mapping into a part of a range that [`map_private`] mapped, in place of the
    /// part's old mapping. The part then maps the file that [`Self::is_same`] has compared, even if
    /// the file's descriptor number refers to another file by now.
    ///
    /// # Safety
    /// Nothing may write to the replaced part from now on.
    pub unsafe fn take_place(self, start: *mut u8) -> PagePlacement {
        const MAYMOVE_FIXED: usize = 1 | 2;
        let args = [self.at, self.bytes, self.bytes, MAYMOVE_FIXED, start as usize, 0];
        // SAFETY: the caller is responsible for the range. The range and this mapping belong to
        // this library.
        let moved = unsafe { call(number::MREMAP, args) };
        if moved.is_ok() {
            // The mapping has left its old address.
            core::mem::forget(self);
            PagePlacement::Taken
        } else if is_kept_private(start as usize, self.bytes) {
            // This call succeeds only if the whole range is still mapped, and then it changes
            // nothing.
            PagePlacement::AsBefore
        } else {
            PagePlacement::Broken
        }
    }
}

impl Drop for SealedFile {
    fn drop(&mut self) {
        unmap(self.at, self.bytes);
    }
}

/// Maps a file that can only be read, at an address that the kernel chooses. The mapping exists
/// neither in a forked child nor in a core dump. The file exists as long as the mapping, even if its
/// descriptor is closed.
pub fn map_to_read(fd: i32, bytes: usize) -> Option<usize> {
    const PROT_READ: usize = 1;
    const MAP_SHARED_NORESERVE: usize = 1 | 0x4000;
    let place = [0, bytes, PROT_READ, MAP_SHARED_NORESERVE, fd as usize, 0];
    // SAFETY: a new mapping at an address that the kernel chooses.
    unsafe { map_unpopulated(place) }.ok()
}

/// Reads a part of a file to memory. Returns the number of bytes that were read.
///
/// # Safety
/// The memory must be mapped, and nothing else may use it.
pub unsafe fn read_at(fd: i32, to: *mut u8, bytes: usize, offset: u64) -> Result<usize, Errno> {
    let args = [fd as usize, to as usize, bytes, offset as usize, 0, 0];
    // SAFETY: the caller is responsible for the memory.
    unsafe { call(number::PREAD64, args) }
}

/// Copies memory of this process that may be unmapped, or mapped from a file that cannot be read.
/// Returns false if a part of it could not be read. No signal is raised.
///
/// # Safety
/// The memory `to` must be mapped, and nothing else may use it.
pub unsafe fn copy_own_memory(to: *mut u8, from: usize, bytes: usize) -> bool {
    let (to, from) = ([to as usize, bytes], [from, bytes]);
    let args = [super::getpid() as usize, to.as_ptr() as usize, 1, from.as_ptr() as usize, 1, 0];
    // SAFETY: the caller is responsible for the memory.
    let copied = unsafe { call(number::PROCESS_VM_READV, args) };
    copied == Ok(bytes)
}

/// Compares two lists of words without `memcmp`. There is no libc, and the compiler's own `memcmp`
/// compares byte by byte.
pub fn are_same(one: &[u64], other: &[u64]) -> bool {
    const WORDS_PER_STEP: usize = 512;
    let mut pairs = one.chunks(WORDS_PER_STEP).zip(other.chunks(WORDS_PER_STEP));
    pairs.all(|(one, other)| one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b)) == 0)
}

/// Whether a file is sealed, so that neither its size nor its content can change, and has at least
/// this size.
fn is_sealed(fd: i32, bytes: usize) -> bool {
    const F_GET_SEALS: usize = 1034;
    const SHRINK_GROW: usize = 2 | 4;
    const WRITE: usize = 8;
    const FUTURE_WRITE: usize = 16;
    // st_size is the seventh word of struct stat, which is 144 bytes long.
    let mut stat = [0_u64; 18];
    let args = [fd as usize, stat.as_mut_ptr() as usize, 0, 0, 0, 0];
    fcntl(fd, F_GET_SEALS, 0).is_ok_and(|seals| {
        seals & SHRINK_GROW == SHRINK_GROW && seals & (WRITE | FUTURE_WRITE) != 0
    }) && plain(number::FSTAT, args).is_ok()
        && stat[6] >= bytes as u64
}

/// Frees the memory of a part of a memory file, mapped or not. Returns false if this fails.
pub fn punch(fd: i32, offset: usize, bytes: usize) -> bool {
    const KEEP_SIZE_PUNCH_HOLE: usize = 1 | 2;
    let args = [fd as usize, KEEP_SIZE_PUNCH_HOLE, offset, bytes, 0, 0];
    plain(number::FALLOCATE, args).is_ok()
}

/// Maps the first `bytes` of a file, shared. The address is a multiple of `bytes`, which must be a
/// power of two.
pub fn map_aligned(fd: i32, bytes: usize) -> Result<*mut u8, Errno> {
    const PROT_READ_WRITE: usize = 1 | 2;
    const MAP_SHARED_FIXED: usize = 1 | 0x10;
    const MAP_PRIVATE_ANONYMOUS_NORESERVE: usize = 2 | 0x20 | 0x4000;
    // Reserve twice the size, map the file over the aligned part, unmap the rest.
    let args = [0, 2 * bytes, 0, MAP_PRIVATE_ANONYMOUS_NORESERVE, usize::MAX, 0];
    let reserved = plain(number::MMAP, args)?;
    let aligned = reserved.next_multiple_of(bytes);
    let args = [aligned, bytes, PROT_READ_WRITE, MAP_SHARED_FIXED, fd as usize, 0];
    // SAFETY: replaces pages of the reservation just made, to which nothing refers.
    let mapped = unsafe { call(number::MMAP, args) };
    if mapped.is_err() {
        unmap(reserved, 2 * bytes);
        return mapped.map(|at| at as *mut u8);
    }
    unmap(reserved, aligned - reserved);
    unmap(aligned + bytes, reserved + bytes - aligned);
    mapped.map(|at| at as *mut u8)
}

fn unmap(start: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: only called for parts of a reservation that the caller has made.
        let _ = unsafe { call(number::MUNMAP, [start, bytes, 0, 0, 0, 0]) };
    }
}

/// A range of memory that is unmapped when this value is dropped.
pub struct MappedRegion {
    start: usize,
    bytes: usize,
}

impl MappedRegion {
    /// Maps zeroed memory, in whole pages.
    pub fn new(bytes: usize) -> Result<MappedRegion, Errno> {
        const PROT_READ_WRITE: usize = 1 | 2;
        const MAP_PRIVATE_ANONYMOUS: usize = 2 | 0x20;
        let args = [0, bytes, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, usize::MAX, 0];
        plain(number::MMAP, args).map(|start| MappedRegion { start, bytes })
    }

    /// Returns the address of the mapping's first byte.
    pub fn start(&self) -> usize {
        self.start
    }
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        unmap(self.start, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{identity, lift};
    use super::*;

    #[test]
    fn failed_move_leaves_the_old_mapping() {
        const BYTES: usize = 8192;
        const F_ADD_SEALS: usize = 1033;
        const SHRINK_GROW_FUTURE_WRITE: usize = 2 | 4 | 16;
        let fd = lift(memory_file(c"test", BYTES).unwrap());
        fcntl(fd, F_ADD_SEALS, SHRINK_GROW_FUTURE_WRITE).unwrap();
        let at = map_private(BYTES).unwrap();
        // SAFETY: just mapped, of this size; nothing else refers to it.
        unsafe {
            at.write(7);
            let [first, second] = [(); 2].map(|()| SealedFile::map(fd, BYTES).unwrap());
            assert!(!first.is_same(at, || false));
            let own = first.at as *mut u8;
            assert_eq!(
                first.take_place(own),
                PagePlacement::AsBefore,
                "the mapping is already at this address"
            );
            assert_eq!(at.read(), 7);
            at.write(0);
            assert!(second.is_same(at, || false) && !second.is_same(at, || true));
            assert_eq!(second.take_place(at), PagePlacement::Taken);
            assert_eq!(at.read(), 0);
        }
        assert!(SealedFile::map(fd, BYTES + 4096).is_none(), "the file has fewer bytes");
        unmap(at as usize + BYTES / 2, BYTES / 2);
        assert!(!is_kept_private(at as usize, BYTES), "a part of the range is not mapped");
        unmap(at as usize, BYTES / 2);
        close(fd);
    }

    /// Runs `body` in a forked child, which may lock its memory or limit itself. `body` may only make
    /// system calls. It returns 0 if all is well.
    fn in_child(body: impl FnOnce() -> i32) {
        use nix::sys::wait::{WaitStatus, waitpid};
        use nix::unistd::{ForkResult, fork};
        // SAFETY: the child only makes system calls, and ends.
        match unsafe { fork() }.unwrap() {
            // SAFETY: ends the child at once.
            ForkResult::Child => unsafe { nix::libc::_exit(body()) },
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
        }
    }

    /// A program may lock its present and future memory. The staging pool must nevertheless have
    /// only the pages that it needs, and it must be able to free them.
    #[test]
    fn locked_memory_has_no_early_pages() {
        const BYTES: usize = 4 << 20;
        const PAGES: usize = BYTES / 4096;
        /// Number of pages that are allocated.
        fn pages(at: *mut u8) -> usize {
            let mut there = [0_u8; PAGES];
            // SAFETY: the caller has mapped the range.
            let done = unsafe { nix::libc::mincore(at.cast(), BYTES, there.as_mut_ptr()) };
            if done == 0 { there.iter().filter(|page| **page & 1 == 1).count() } else { PAGES + 1 }
        }
        in_child(|| {
            // SAFETY: system calls on memory of this child alone, which nothing else uses.
            unsafe {
                if nix::libc::mlockall(nix::libc::MCL_FUTURE) != 0 {
                    return 1;
                }
                let (Ok(at), Ok(file)) = (map_private(BYTES), memory_file(c"test", BYTES)) else {
                    return 2;
                };
                if pages(at) != 0 {
                    return 3;
                }
                for of_file in [false, true] {
                    if of_file && (!map_over(at, BYTES, file, 0) || pages(at) != 0) {
                        return 4;
                    }
                    at.write_volatile(7);
                    // As `mlockall(MCL_CURRENT)` locks it.
                    if nix::libc::mlock(at.cast(), 8192) != 0 {
                        return 5;
                    }
                    if !discard(at, BYTES, of_file) || pages(at) != 0 || at.read_volatile() != 0 {
                        return 6;
                    }
                }
                let read = map_to_read(file, BYTES);
                if !discard(at, BYTES, true) || read.is_none_or(|at| pages(at as *mut u8) != 0) {
                    return 7;
                }
                0
            }
        });
    }

    /// A core dump must not contain the content of GPU memory, and a forked child must not have it.
    #[test]
    fn memory_is_in_no_core_dump() {
        const BYTES: usize = 1 << 20;
        let fd = memory_file(c"test", BYTES).unwrap();
        let flags = |at: usize| {
            let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
            // The kernel may have joined the mapping with another one.
            let is_head = |line: &&str| {
                let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
                let [from, to] = range
                    .map(|(from, to)| [from, to].map(|text| usize::from_str_radix(text, 16)))
                    .unwrap_or([Ok(0), Ok(0)]);
                matches!((from, to), (Ok(from), Ok(to)) if (from..to).contains(&at))
            };
            let mut lines = all.lines().skip_while(|line| !is_head(line));
            lines.find(|line| line.starts_with("VmFlags:")).unwrap().to_owned()
        };
        let has = |at: usize, flag: &str| flags(at).split(' ').any(|word| word == flag);
        let at = map_private(BYTES).unwrap();
        let read = map_to_read(fd, BYTES).unwrap();
        for start in [at as usize, read] {
            assert!(has(start, "dd") && has(start, "dc"), "{}", flags(start));
        }
        // SAFETY: just mapped, and nothing refers to it.
        assert!(unsafe { map_over(at, BYTES, fd, 0) });
        assert!(has(at as usize, "dd") && has(at as usize, "dc"), "{}", flags(at as usize));
        unmap(at as usize, BYTES);
        unmap(read, BYTES);
        close(fd);
    }

    /// A memory file larger than the limit RLIMIT_FSIZE must not be created: the call must return
    /// an error. The kernel's usual reaction is a signal, which would end the application.
    #[test]
    fn memory_file_beyond_limit_is_an_error() {
        use nix::sys::resource::{Resource, setrlimit};
        in_child(|| {
            let limited = setrlimit(Resource::RLIMIT_FSIZE, 8192, 8192).is_ok();
            let made = [8192, 8193].map(|bytes| memory_file(c"test", bytes).is_ok());
            i32::from(!limited || made != [true, false])
        });
    }

    #[test]
    fn a_memory_file_is_mapped_aligned_and_sealed() {
        let fd = lift(memory_file(c"test", 16384).unwrap());
        seal_size(fd).unwrap();
        let at = map_aligned(fd, 16384).unwrap();
        assert_eq!(at as usize % 16384, 0);
        // SAFETY: just mapped, 16384 bytes long.
        unsafe { at.write(7) };
        assert!(plain(number::FTRUNCATE, [fd as usize, 0, 0, 0, 0, 0]).is_err());
        let identity_before = identity(fd);
        assert!(identity_before.is_some());
        close(fd);
        assert_eq!(identity(fd), None);
    }
}
