//! A process's memory file, mapped by the copier and registered with the driver. The copier itself
//! never reads or writes the mapping. It reads from the file instead, so that a hole stays a hole
//! and uses no memory. It makes no call that waits for a lock of the file (`lseek`, `fallocate`),
//! because the container could hold that lock.

use std::{collections::BTreeMap, ffi::c_void, io, os::fd::OwnedFd, ptr::NonNull, rc::Rc};

use rustix::{
    fs::SealFlags,
    mm::{MapFlags, ProtFlags},
};

use super::{
    cuda::{CopyStream, CudaDriver, CudaError, DeviceBlock},
    segment::SharedSegment,
};

/// Size of a chunk in bytes. A chunk is the part of a memory file that is registered or copied at a
/// time. Each such step takes a few milliseconds.
#[cfg(not(test))]
pub const CHUNK_BYTES: usize = affinode_proto::wire::copier::CHUNK_BYTES as usize;
/// Size of a chunk in bytes. A chunk is the part of a memory file that is registered or copied at a
/// time. It is smaller in tests, because they copy many chunks.
#[cfg(test)]
pub const CHUNK_BYTES: usize = 16 << 20;
const PAGE_BYTES: usize = 4096;
/// File system type (`f_type`) of tmpfs, the only one that a memory file may have
/// (`linux/magic.h`).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Reason why the copier cannot map or register a process's memory file.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A system call has failed.
    #[error("cannot map the memory file")]
    Io(#[from] io::Error),
    /// The size of the file is not sealed, so it could change during a copy.
    #[error(
        "the size of the memory file is not sealed, so the process could change it during a copy"
    )]
    NotSealed,
    /// The file may have pages that are not charged to the process's container.
    #[error("the memory file is not on tmpfs with ordinary pages")]
    NotPlain,
    /// The file is smaller than the process announced it to be.
    #[error("the memory file has {has} of the announced {wanted} bytes")]
    TooSmall {
        /// Actual size of the file in bytes.
        has: u64,
        /// Size in bytes that the process has announced.
        wanted: u64,
    },
    /// Pages of the file are missing. A registration would allocate these pages and charge them to
    /// the copier.
    #[error("the process has not allocated all pages of the memory file")]
    Missing,
    /// The process reported that it uses a segment in place of a chunk, but it has not freed the
    /// chunk.
    #[error(
        "the process has not freed a chunk of the memory file, although a shared segment stores \
         its content"
    )]
    NotGivenUp,
    /// The driver has refused a call.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug)]
pub enum CopyDirection {
    /// Copies from host memory to device memory.
    In,
    /// Copies from device memory to host memory.
    Out,
}

/// A process's memory file, mapped by the copier. The memory belongs to the process, and its
/// container is charged for it.
#[derive(Debug)]
pub struct HostRegion {
    cuda: Rc<CudaDriver>,
    file: OwnedFd,
    start: NonNull<c_void>,
    bytes: usize,
    registered: usize,
    /// Segments that store the content of chunks in place of the memory file, by chunk number.
    elsewhere: BTreeMap<usize, Rc<SharedSegment>>,
    /// Numbers of the chunks whose content is now in a segment, but whose memory in this region is
    /// still registered.
    given_up: Vec<usize>,
}

/// Checks that the copier can map the first `bytes` of a file safely.
fn check(file: &OwnedFd, bytes: u64) -> Result<(), RegionError> {
    let io = io::Error::from;
    let seals = rustix::fs::fcntl_get_seals(file).map_err(io)?;
    // Files of huge pages can have seals too. Mapping such a file takes pages from the node's pool,
    // no matter which process uses them, and a huge page cannot be unmapped in part.
    let kind = rustix::fs::fstatfs(file).map_err(io)?.f_type;
    if !u64::try_from(kind).is_ok_and(|kind| kind == TMPFS_MAGIC) {
        return Err(RegionError::NotPlain);
    }
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) {
        return Err(RegionError::NotSealed);
    }
    let stat = rustix::fs::fstat(file).map_err(io)?;
    let has = u64::try_from(stat.st_size).unwrap_or(0);
    if has < bytes || bytes == 0 {
        return Err(RegionError::TooSmall { has, wanted: bytes });
    }
    Ok(())
}

/// States which pages of a range are present in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageState {
    All,
    Some,
    None,
}

/// Determines which pages of a range are present in memory. It uses a call that needs no lock of
/// the file, because a container could hold that lock.
///
/// # Safety
/// The range must be mapped.
unsafe fn pages(start: *mut c_void, bytes: usize) -> io::Result<PageState> {
    let mut pages = vec![0_u8; bytes.div_ceil(PAGE_BYTES)];
    // SAFETY: the caller guarantees the range. `pages` has a byte for each of its pages.
    let done = unsafe { libc::mincore(start, bytes, pages.as_mut_ptr()) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let there = pages.iter().filter(|page| **page & 1 == 1).count();
    Ok(match there {
        0 => PageState::None,
        some if some == pages.len() => PageState::All,
        _ => PageState::Some,
    })
}

impl HostRegion {
    /// Maps the first `bytes` of a process's memory file, after a check that this is safe.
    ///
    /// # Errors
    /// [`RegionError`]: the file does not meet a requirement, or cannot be mapped.
    pub fn map(
        cuda: &Rc<CudaDriver>,
        file: OwnedFd,
        bytes: u64,
    ) -> Result<HostRegion, RegionError> {
        check(&file, bytes)?;
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let start = NonNull::new(start.map_err(io::Error::from)?).ok_or(RegionError::NotSealed)?;
        let cuda = Rc::clone(cuda);
        let (elsewhere, given_up) = (BTreeMap::new(), Vec::new());
        Ok(HostRegion { cuda, file, start, bytes: length, registered: 0, elsewhere, given_up })
    }

    /// Reads content of the memory file at an offset. Holes are read as zeros and stay holes.
    ///
    /// # Errors
    /// The `errno` of the read.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()> {
        super::read_exact_at(&self.file, offset, to)
    }

    /// Records that a chunk's content is now in a segment and no longer in the memory file.
    ///
    /// # Errors
    /// [`RegionError`]: the connection to the process must be closed.
    pub fn put_elsewhere(
        &mut self,
        chunk: usize,
        segment: Rc<SharedSegment>,
    ) -> Result<(), RegionError> {
        let offset = chunk.saturating_mul(CHUNK_BYTES);
        let whole = offset.checked_add(CHUNK_BYTES).is_some_and(|end| end <= self.registered);
        let again = self.elsewhere.contains_key(&chunk);
        // SAFETY: a part of the mapping, as `whole` has just shown.
        if !whole || again || unsafe { pages(self.at(offset), CHUNK_BYTES)? } != PageState::None {
            return Err(RegionError::NotGivenUp);
        }
        self.elsewhere.insert(chunk, segment);
        self.given_up.push(chunk);
        Ok(())
    }

    /// Unregisters the memory of one chunk whose content is in a segment. Returns false if there is
    /// no such chunk.
    ///
    /// # Errors
    /// [`CudaError`]: the memory may still be registered. The copier should end.
    pub fn let_go_next(&mut self) -> Result<bool, CudaError> {
        let Some(chunk) = self.given_up.last().copied() else {
            return Ok(false);
        };
        self.cuda.unregister(self.at(chunk * CHUNK_BYTES))?;
        self.given_up.pop();
        Ok(true)
    }

    /// Returns the number of the region's bytes whose content is in segments.
    pub fn elsewhere_bytes(&self) -> usize {
        self.elsewhere.len() * CHUNK_BYTES
    }

    /// Returns whether a chunk's content is in a segment.
    pub fn is_elsewhere(&self, chunk: usize) -> bool {
        self.elsewhere.contains_key(&chunk)
    }

    /// Returns the size of the mapped memory file in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn at(&self, offset: usize) -> *mut c_void {
        self.start.as_ptr().wrapping_byte_add(offset)
    }

    /// Registers the next chunk with the driver. Returns false if all chunks are registered.
    ///
    /// # Errors
    /// [`RegionError`]: pages are missing, or the driver refused the registration.
    pub fn register_next(&mut self) -> Result<bool, RegionError> {
        let bytes = CHUNK_BYTES.min(self.bytes - self.registered);
        if bytes == 0 {
            return Ok(false);
        }
        // SAFETY: a part of the mapping.
        if unsafe { pages(self.at(self.registered), bytes)? } != PageState::All {
            return Err(RegionError::Missing);
        }
        // If the container frees pages after this check, the driver allocates them again, charged to
        // the copier. That cannot be seen afterwards: the file has as many pages as before.
        // SAFETY: the range is mapped until the drop, which unregisters it first.
        unsafe { self.cuda.register(self.at(self.registered), bytes)? };
        self.registered += bytes;
        Ok(true)
    }

    /// Starts a copy of `bytes` between a block of device memory and the region, at `offset` in the
    /// region.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused a copy.
    pub fn copy(
        &self,
        way: CopyDirection,
        offset: usize,
        block: &DeviceBlock,
        bytes: usize,
        copies: &mut CopyStream,
    ) -> Result<(), CudaError> {
        let mut done = 0;
        while done < bytes {
            let from = offset + done;
            // The driver refuses a copy that crosses into another registration.
            let part = (bytes - done).min(CHUNK_BYTES - from % CHUNK_BYTES);
            let at = match self.elsewhere.get(&(from / CHUNK_BYTES)) {
                Some(segment) => segment.at(from % CHUNK_BYTES),
                None => self.at(from),
            };
            // SAFETY: the range is registered, in this region or as a segment. The owner of this
            // region drops the copies first.
            unsafe {
                match way {
                    CopyDirection::In => copies.copy_in(at.cast_const(), part, block, done)?,
                    // A copy out must never overwrite content that other processes use.
                    CopyDirection::Out if !self.elsewhere.is_empty() => {
                        let code = affinode_cuda_sys::result::NOT_SUPPORTED;
                        return Err(CudaError::Call { call: "copy_out", code });
                    }
                    CopyDirection::Out => copies.copy_out(at, part, block, done)?,
                }
            }
            done += part;
        }
        copies.all_of(block)
    }

    /// Unregisters the last registered chunk. Returns false if no chunk is registered.
    ///
    /// # Errors
    /// [`CudaError`]: the memory may still be registered. The copier should end.
    pub fn unregister_last(&mut self) -> Result<bool, CudaError> {
        if self.let_go_next()? {
            return Ok(true);
        }
        if self.registered == 0 {
            return Ok(false);
        }
        let offset = (self.registered - 1) / CHUNK_BYTES * CHUNK_BYTES;
        if self.elsewhere.remove(&(offset / CHUNK_BYTES)).is_some() {
            self.registered = offset;
            return Ok(true);
        }
        self.cuda.unregister(self.at(offset))?;
        self.registered = offset;
        Ok(true)
    }
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        while matches!(self.unregister_last(), Ok(true)) {}
        if self.registered > 0 {
            // The mapping stays. Otherwise another mapping could get these addresses, and the
            // driver would take that mapping for this region.
            return;
        }
        // SAFETY: this region mapped the range. No copy of it is in progress, because copies are
        // dropped first.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use rustix::fs::MemfdFlags;

    use super::*;

    const BYTES: u64 = 1 << 20;

    fn file(seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("copied_out", flags).unwrap();
        rustix::fs::ftruncate(&file, BYTES).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn file_that_could_shrink_is_refused() {
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        assert!(check(&file(all), BYTES).is_ok());
        for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let refused = check(&file(all.difference(missing)), BYTES);
            assert!(matches!(refused, Err(RegionError::NotSealed)), "{refused:?}");
        }
        let refused = check(&file(all), BYTES + 1);
        assert!(matches!(refused, Err(RegionError::TooSmall { has: BYTES, .. })), "{refused:?}");
        assert!(check(&file(all), 0).is_err());
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        if let Ok(huge) = rustix::fs::memfd_create("huge", flags) {
            rustix::fs::fcntl_add_seals(&huge, all).unwrap();
            let refused = check(&huge, 1);
            assert!(matches!(refused, Err(RegionError::NotPlain)), "{refused:?}");
        }
        let disk = OwnedFd::from(File::open("/proc/self/exe").unwrap());
        assert!(matches!(check(&disk, 1), Err(RegionError::Io(_))));
    }

    #[test]
    fn a_hole_is_seen_before_it_is_paid_for() {
        let memory = file(SealFlags::SHRINK);
        let written = File::from(memory.try_clone().unwrap());
        let there = |memory: &OwnedFd| {
            let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
            // SAFETY: a new mapping of the file's size, unmapped below.
            unsafe {
                let at =
                    rustix::mm::mmap(std::ptr::null_mut(), BYTES as usize, read, shared, memory, 0)
                        .unwrap();
                let found = pages(at, BYTES as usize).unwrap();
                rustix::mm::munmap(at, BYTES as usize).unwrap();
                found
            }
        };
        assert_eq!(there(&memory), PageState::None, "nothing was written");
        written.write_all_at(&vec![1; BYTES as usize], 0).unwrap();
        assert_eq!(there(&memory), PageState::All);
        let punch = |offset, bytes| {
            use rustix::fs::FallocateFlags;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&memory, flags, offset, bytes).unwrap();
        };
        punch(BYTES / 2, 4096);
        assert_eq!(there(&memory), PageState::Some);
        punch(0, BYTES - 4096);
        assert_eq!(there(&memory), PageState::Some, "the last page alone");
        punch(0, BYTES);
        assert_eq!(there(&memory), PageState::None);
    }
}
