//! Contains all unsafe code of this crate: mappings of memory files.
#![allow(unsafe_code)]

use std::{ffi::c_void, os::fd::AsFd, ptr::NonNull};

use rustix::{
    fs::FallocateFlags,
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
};

/// How often an allocation is tried again that the kernel asked to try again.
const RETRIES: u32 = 100;

/// Allocates the pages of a range of a memory file. They are charged to the cgroup of this process.
///
/// # Errors
/// The `errno` of the system call. If the file system is full, this is `EFAULT` or `ENOSPC`, and
/// some of the pages may have been allocated.
pub fn populate(file: impl AsFd, offset: u64, bytes: usize) -> Result<(), Errno> {
    let mapping = Mapping::new(&file, offset, bytes)?;
    mapping.prefer_huge_pages();
    match retried(|| mapping.populate()) {
        // Linux before 5.14 does not know this advice. The pages that it allocates here are
        // cleared only when the process touches them.
        Err(Errno::INVAL) => {
            retried(|| rustix::fs::fallocate(&file, FallocateFlags::empty(), offset, bytes as u64))
        }
        result => result,
    }
}

fn retried(mut call: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    for _ in 0..RETRIES {
        match call() {
            Err(Errno::INTR | Errno::AGAIN) => {}
            result => return result,
        }
    }
    Err(Errno::AGAIN)
}

/// A mapped range of a memory file. It is unmapped when this value is dropped.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<c_void>,
    bytes: usize,
}

impl Mapping {
    /// Maps a range of a file for reading and writing. `offset` must be a multiple of the page
    /// size.
    ///
    /// # Errors
    /// The `errno` of the system call.
    pub fn new(file: impl AsFd, offset: u64, bytes: usize) -> Result<Mapping, Errno> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        };
        Ok(Mapping { start: NonNull::new(start?).ok_or(Errno::NOMEM)?, bytes })
    }

    /// Asks for huge pages. An error is ignored: the pages are then small.
    fn prefer_huge_pages(&self) {
        // SAFETY: the range is a mapping of this object. The advice changes no content.
        let _ =
            unsafe { rustix::mm::madvise(self.start.as_ptr(), self.bytes, Advice::LinuxHugepage) };
    }

    fn populate(&self) -> Result<(), Errno> {
        // SAFETY: the range is a mapping of this object. The call allocates missing pages, but
        // changes no content.
        unsafe { rustix::mm::madvise(self.start.as_ptr(), self.bytes, Advice::LinuxPopulateWrite) }
    }

    /// Returns the byte at an offset of the mapping.
    #[cfg(test)]
    pub fn get(&self, at: usize) -> u8 {
        assert!(at < self.bytes);
        // SAFETY: the byte is within the mapping, and the test has allocated its page.
        unsafe { self.start.cast::<u8>().add(at).read_volatile() }
    }

    /// Writes the byte at an offset of the mapping.
    #[cfg(test)]
    pub fn set(&self, at: usize, value: u8) {
        assert!(at < self.bytes);
        // SAFETY: the byte is within the mapping, the test has allocated its page, and no
        // reference to it exists.
        unsafe { self.start.cast::<u8>().add(at).write_volatile(value) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object mapped the range, with this size, and no reference to it exists.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}
