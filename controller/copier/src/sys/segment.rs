//! Content that several processes have in common: a chunk in a memory file of the node's, sealed, so
//! that none of them can change it for the others.
//!
//! ```text
//! Draft ──all is written──> sealed, registered: Segment ──the last who has it is gone──> let go of
//! ```

use std::{
    ffi::c_void,
    io,
    mem::ManuallyDrop,
    os::fd::{AsRawFd, OwnedFd},
    ptr::NonNull,
    rc::Rc,
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
};

use super::{
    cuda::CudaDriver,
    region::{CHUNK_BYTES, RegionError},
};
use crate::dedup::ChunkContent;

/// `F_SEAL_FUTURE_WRITE`: only what is mapped already can be written to.
const FUTURE_WRITE: SealFlags = SealFlags::from_bits_retain(16);

/// The file, mapped here so that the device may copy from it. Nobody else can write to it, and
/// here nobody does.
#[derive(Debug)]
struct MappedSegment {
    file: OwnedFd,
    start: NonNull<c_void>,
}

impl MappedSegment {
    /// From now on nobody changes its content or its size.
    fn seal(&self) -> io::Result<()> {
        let seals = SealFlags::SHRINK | SealFlags::GROW | FUTURE_WRITE | SealFlags::SEAL;
        Ok(rustix::fs::fcntl_add_seals(&self.file, seals)?)
    }

    /// Opened anew, so that whoever gets it can read alone and has a description of its own.
    fn to_read(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

impl Drop for MappedSegment {
    fn drop(&mut self) {
        // SAFETY: mapped by this, with that size, and not registered any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), CHUNK_BYTES) };
    }
}

/// One that is being written.
#[derive(Debug)]
pub struct SegmentDraft {
    mapped: MappedSegment,
    written: usize,
}

impl SegmentDraft {
    /// Without content yet.
    ///
    /// # Errors
    /// The system's word.
    pub fn begin() -> io::Result<SegmentDraft> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("affinode-shared", flags)?;
        rustix::fs::ftruncate(&file, CHUNK_BYTES as u64)?;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                CHUNK_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let start = NonNull::new(start?).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(SegmentDraft { mapped: MappedSegment { file, start }, written: 0 })
    }

    /// How much there is.
    #[cfg(test)]
    pub fn written(&self) -> usize {
        self.written
    }

    /// Writes the next part. On huge pages only where a memory file gets them by itself: to make
    /// each of them one takes 6 ms (Linux 6.18), and eight times as long for all.
    ///
    /// # Errors
    /// The system's word.
    pub fn write(&mut self, part: &[u8]) -> io::Result<()> {
        let mut left = part;
        while !left.is_empty() {
            let done = rustix::io::pwrite(&self.mapped.file, left, self.written as u64)?;
            self.written += done;
            left = left.get(done..).unwrap_or_default();
        }
        Ok(())
    }

    /// Nobody changes it any more, and the device may copy from it.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn finish(self, cuda: &Rc<CudaDriver>) -> Result<SharedSegment, RegionError> {
        if self.written != CHUNK_BYTES {
            return Err(RegionError::Missing);
        }
        self.mapped.seal()?;
        // SAFETY: mapped until the drop, which unregisters it before.
        unsafe { cuda.register(self.mapped.start.as_ptr(), CHUNK_BYTES)? };
        Ok(SharedSegment { cuda: Rc::clone(cuda), mapped: ManuallyDrop::new(self.mapped) })
    }
}

/// One that is there for all who have it.
#[derive(Debug)]
pub struct SharedSegment {
    cuda: Rc<CudaDriver>,
    /// Let go of only once the driver has.
    mapped: ManuallyDrop<MappedSegment>,
}

impl SharedSegment {
    /// Its file, for somebody to read.
    ///
    /// # Errors
    /// The system's word.
    pub fn to_read(&self) -> io::Result<OwnedFd> {
        self.mapped.to_read()
    }

    /// Where an offset is mapped.
    pub fn at(&self, offset: usize) -> *mut c_void {
        self.mapped.start.as_ptr().wrapping_byte_add(offset)
    }
}

impl ChunkContent for SharedSegment {
    fn read(&self, offset: usize, to: &mut [u8]) -> io::Result<()> {
        super::read_exact_at(&self.mapped.file, offset, to)
    }
}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // Otherwise another's memory would be taken for what the driver knows at these addresses.
        if self.cuda.unregister(self.at(0)).is_ok() {
            // SAFETY: this once, and nobody uses it any more.
            unsafe { ManuallyDrop::drop(&mut self.mapped) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_changed_by_nobody() {
        let mut draft = SegmentDraft::begin().unwrap();
        draft.write(&[7; 4096]).unwrap();
        assert_eq!(draft.written, 4096);
        let given = draft.mapped.to_read().unwrap();
        let flags = rustix::fs::fcntl_getfl(&given).unwrap();
        assert_eq!(flags & OFlags::RWMODE, OFlags::RDONLY);
        draft.mapped.seal().unwrap();
        assert!(draft.write(&[8; 4096]).is_err(), "not by a write");
        let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, if there were one.
        let mapped = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), 4096, access, shared, &draft.mapped.file, 0)
        };
        assert!(mapped.is_err(), "nor by a mapping");
        assert!(rustix::fs::ftruncate(&draft.mapped.file, 0).is_err(), "nor by its size");
    }
}
