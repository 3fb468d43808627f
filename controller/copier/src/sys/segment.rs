//! Segments: files of the copier, each with a chunk of content that several processes share. The
//! file is sealed, so that no process can change the content that others use.
//!
//! ```text
//! SegmentDraft ──all is written──> sealed, registered: SharedSegment ──its last user has left──> unmapped
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

/// File seal `F_SEAL_FUTURE_WRITE`: the file can be written only through existing mappings.
const FUTURE_WRITE: SealFlags = SealFlags::from_bits_retain(16);

/// A segment's file, mapped so that the GPU can copy from it. Other processes cannot write to the
/// file, and this process does not write to it after the seal.
#[derive(Debug)]
struct MappedSegment {
    file: OwnedFd,
    start: NonNull<c_void>,
}

impl MappedSegment {
    /// Seals the content and size of the file, so that no process can change them.
    fn seal(&self) -> io::Result<()> {
        let seals = SealFlags::SHRINK | SealFlags::GROW | FUTURE_WRITE | SealFlags::SEAL;
        Ok(rustix::fs::fcntl_add_seals(&self.file, seals)?)
    }

    /// Opens the segment's file again, read-only. The new descriptor has a file offset of its own.
    fn to_read(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

impl Drop for MappedSegment {
    fn drop(&mut self) {
        // SAFETY: this object mapped the range, with this size. It is no longer registered.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), CHUNK_BYTES) };
    }
}

/// A segment whose content is still being written.
#[derive(Debug)]
pub struct SegmentDraft {
    mapped: MappedSegment,
    written: usize,
}

impl SegmentDraft {
    /// Creates a segment without content.
    ///
    /// # Errors
    /// The `errno` of creating or mapping the file.
    pub fn begin() -> io::Result<SegmentDraft> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("affinode-shared", flags)?;
        rustix::fs::ftruncate(&file, CHUNK_BYTES as u64)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
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

    /// Returns the number of bytes written so far.
    #[cfg(test)]
    pub fn written(&self) -> usize {
        self.written
    }

    /// Appends the next part of the content. Huge pages are not requested: to collapse small pages
    /// into a huge page takes 6 ms (Linux 6.18), which makes the whole write eight times slower.
    ///
    /// # Errors
    /// The `errno` of the write.
    pub fn write(&mut self, part: &[u8]) -> io::Result<()> {
        let mut left = part;
        while !left.is_empty() {
            let done = rustix::io::pwrite(&self.mapped.file, left, self.written as u64)?;
            self.written += done;
            left = left.get(done..).unwrap_or_default();
        }
        Ok(())
    }

    /// Seals the segment and registers it with the driver, so that the GPU can copy from it.
    ///
    /// # Errors
    /// [`RegionError`]: the draft is not complete, cannot be sealed, or the driver refused it.
    pub fn finish(self, cuda: &Rc<CudaDriver>) -> Result<SharedSegment, RegionError> {
        if self.written != CHUNK_BYTES {
            return Err(RegionError::Missing);
        }
        self.mapped.seal()?;
        // SAFETY: the range is mapped until the drop, which unregisters it first.
        unsafe { cuda.register(self.mapped.start.as_ptr(), CHUNK_BYTES)? };
        Ok(SharedSegment { cuda: Rc::clone(cuda), mapped: ManuallyDrop::new(self.mapped) })
    }
}

/// A complete, sealed segment. All sessions whose processes use it own it together.
#[derive(Debug)]
pub struct SharedSegment {
    cuda: Rc<CudaDriver>,
    /// The mapped file. It is unmapped only after the driver has unregistered it.
    mapped: ManuallyDrop<MappedSegment>,
}

impl SharedSegment {
    /// Returns a read-only descriptor of the file, to be sent to a process.
    ///
    /// # Errors
    /// The `errno` of opening the file.
    pub fn to_read(&self) -> io::Result<OwnedFd> {
        self.mapped.to_read()
    }

    /// Returns the address of an offset in the mapped segment.
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
        // The range stays mapped while the driver has it registered. Otherwise another mapping
        // could get these addresses, and the driver would take that mapping for the segment.
        if self.cuda.unregister(self.at(0)).is_ok() {
            // SAFETY: dropped only here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.mapped) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_segment_cannot_change() {
        let mut draft = SegmentDraft::begin().unwrap();
        draft.write(&[7; 4096]).unwrap();
        assert_eq!(draft.written, 4096);
        let given = draft.mapped.to_read().unwrap();
        let flags = rustix::fs::fcntl_getfl(&given).unwrap();
        assert_eq!(flags & OFlags::RWMODE, OFlags::RDONLY);
        draft.mapped.seal().unwrap();
        assert!(draft.write(&[8; 4096]).is_err(), "not by a write");
        let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, if the kernel allowed it.
        let mapped = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), 4096, access, shared, &draft.mapped.file, 0)
        };
        assert!(mapped.is_err(), "nor by a mapping");
        assert!(rustix::fs::ftruncate(&draft.mapped.file, 0).is_err(), "nor by its size");
    }
}
