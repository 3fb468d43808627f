//! A process's memory file, mapped and registered. No byte of it is read or written here.

use std::{ffi::c_void, io, os::fd::OwnedFd, ptr::NonNull, rc::Rc};

use rustix::{
    fs::SealFlags,
    mm::{MapFlags, ProtFlags},
};

use crate::cuda::{Cuda, CudaError};

/// So much is registered at a time, and copied: a few milliseconds.
pub const CHUNK_BYTES: usize = 128 << 20;

/// Why a file is not mapped.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The system's word.
    #[error("the memory file cannot be mapped")]
    Io(#[from] io::Error),
    /// Its size could change under a copy.
    #[error("the memory file is not sealed against another size")]
    NotSealed,
    /// It is smaller than what is said to be in it.
    #[error("the memory file has {has} bytes of the {wanted} that it is said to hold")]
    TooSmall {
        /// What it has.
        has: u64,
        /// What it should.
        wanted: u64,
    },
}

/// The mapping. The memory is the process's, and its container's to pay.
#[derive(Debug)]
pub struct Region {
    cuda: Rc<Cuda>,
    start: NonNull<c_void>,
    bytes: usize,
    registered: usize,
}

impl Region {
    /// Maps the first `bytes` of a file.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn map(cuda: &Rc<Cuda>, file: &OwnedFd, bytes: u64) -> Result<Region, RegionError> {
        const BLOCK_BYTES: u64 = 512;
        let io = io::Error::from;
        let seals = rustix::fs::fcntl_get_seals(file).map_err(io)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(RegionError::NotSealed);
        }
        let stat = rustix::fs::fstat(file).map_err(io)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        // Pages that are missing would be made, and paid for, by whoever registers them.
        let there = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES);
        let has = size.min(there);
        if has < bytes || bytes == 0 {
            return Err(RegionError::TooSmall { has, wanted: bytes });
        }
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        let start = NonNull::new(start.map_err(io)?).ok_or(RegionError::NotSealed)?;
        Ok(Region { cuda: Rc::clone(cuda), start, bytes: length, registered: 0 })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of an offset.
    pub fn at(&self, offset: usize) -> *mut c_void {
        self.start.as_ptr().wrapping_byte_add(offset)
    }

    /// Registers the next chunk. False: all are.
    ///
    /// # Errors
    /// [`CudaError`]
    pub fn register_next(&mut self) -> Result<bool, CudaError> {
        let bytes = CHUNK_BYTES.min(self.bytes - self.registered);
        if bytes == 0 {
            return Ok(false);
        }
        self.cuda.register(self.at(self.registered), bytes)?;
        self.registered += bytes;
        Ok(true)
    }
}

impl Region {
    /// Lets go of the last chunk that is registered. False: none is.
    pub fn unregister_last(&mut self) -> bool {
        if self.registered == 0 {
            return false;
        }
        let offset = (self.registered - 1) / CHUNK_BYTES * CHUNK_BYTES;
        self.registered = offset;
        // What cannot be let go of ends with the process.
        let _ = self.cuda.unregister(self.at(offset));
        true
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        while self.unregister_last() {}
        // SAFETY: mapped by this, and no copy of it is in progress: those are dropped before.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}
