//! Ranges of this process's address space: reserved device addresses, windows onto device memory,
//! anonymous host memory.
//!
//! A device address is a reserved range without access rights, so that an access by the application
//! faults as on a real GPU. The driver itself accesses the contents through a second mapping of the
//! memory file at another address, the window.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::abi::{OUT_OF_MEMORY, Outcome};

/// Unit of device memory, and of mappings on x86-64.
pub const PAGE_BYTES: usize = 4096;

/// A range of the address space, which is unmapped when this value is dropped.
#[derive(Debug)]
pub struct Pages {
    start: usize,
    bytes: usize,
}

impl Pages {
    /// Reserves a range of addresses without memory behind it.
    pub fn reserve(bytes: usize, align: usize) -> Outcome<Self> {
        let whole = bytes.checked_add(align).ok_or(OUT_OF_MEMORY)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mut pages = Self::map(whole, libc::PROT_NONE, flags, -1)?;
        let (first, last) = (pages.start, pages.start + pages.bytes);
        pages.start = first.next_multiple_of(align);
        pages.bytes = bytes.next_multiple_of(PAGE_BYTES).min(last - pages.start);
        unmap(first, pages.start - first);
        unmap(pages.start + pages.bytes, last - pages.start - pages.bytes);
        Ok(pages)
    }

    pub fn host(bytes: usize) -> Outcome<Self> {
        Self::map(
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
        )
    }

    /// Maps a memory file, as a window onto device memory. A forked child does not inherit the
    /// mapping. Otherwise the child would keep the memory allocated after its parent has ended.
    pub fn window(memory: BorrowedFd<'_>, bytes: usize) -> Outcome<Self> {
        let pages = Self::map(
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            memory.as_raw_fd(),
        )?;
        // SAFETY: the range is exactly the range that was just mapped. A failure of this call has
        // no effect in this process.
        unsafe { libc::madvise(pages.start as *mut _, pages.bytes, libc::MADV_DONTFORK) };
        Ok(pages)
    }

    fn map(bytes: usize, protection: i32, flags: i32, fd: i32) -> Outcome<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            Err(OUT_OF_MEMORY)
        } else {
            Ok(Self { start: start as usize, bytes })
        }
    }

    pub fn start(&self) -> usize {
        self.start
    }

    /// Size of the range in bytes, in whole pages.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the content of another range of the same size into this range.
    pub fn copy_from(&self, source: &Pages) {
        let bytes = self.bytes.min(source.bytes);
        // SAFETY: both ranges are mapped readable and writable for `bytes`, and are different mappings.
        unsafe {
            ptr::copy_nonoverlapping(source.start as *const u8, self.start as *mut u8, bytes)
        };
    }

    /// Touches every page of the range, so that the kernel allocates it.
    pub fn touch(&self) {
        for page in (self.start..self.start + self.bytes).step_by(PAGE_BYTES) {
            // SAFETY: the page is inside a writable mapping that only this value owns.
            unsafe { ptr::write_volatile(page as *mut u8, 1) };
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        unmap(self.start, self.bytes);
    }
}

fn unmap(start: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: only called on ranges that a `Pages` owns and gives up.
        unsafe { libc::munmap(start as *mut _, bytes) };
    }
}
