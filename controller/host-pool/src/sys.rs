//! Contains all unsafe code of this crate: mappings of memory files, and attributes of mounts.
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    os::fd::{AsFd, AsRawFd},
    ptr::NonNull,
};

use rustix::{
    fs::FallocateFlags,
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
};

/// Maximum number of attempts to allocate pages while the kernel returns `EINTR` or `EAGAIN`.
const RETRIES: u32 = 100;

/// Allocates the pages of a range of a memory file. They are charged to the cgroup of this process.
/// `mapping` begins at the file's first byte and contains the range.
///
/// # Errors
/// The `errno` of the system call. If the file system is full, this is `EFAULT` or `ENOSPC`, and
/// some of the pages may have been allocated.
pub fn populate(
    file: impl AsFd,
    mapping: &Mapping,
    offset: usize,
    bytes: usize,
) -> Result<(), Errno> {
    let populated = match retried(|| mapping.populate(offset, bytes)) {
        // Linux before 5.14 does not know this advice. The pages that it allocates here are
        // cleared only when the process touches them.
        Err(Errno::INVAL) => {
            let (offset, bytes) = (offset as u64, bytes as u64);
            retried(|| rustix::fs::fallocate(&file, FallocateFlags::empty(), offset, bytes))
        }
        result => result,
    };
    mapping.forget(offset, bytes);
    populated
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

/// Makes a detached mount read-only. Files that are opened through it cannot be opened again for
/// writing, not even by a process with all capabilities of its container.
///
/// # Errors
/// The `errno` of the system call. `ENOSYS`: the kernel is older than Linux 5.12.
pub fn make_read_only(mount: impl AsFd) -> Result<(), Errno> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY
            | libc::MOUNT_ATTR_NOSUID
            | libc::MOUNT_ATTR_NODEV
            | libc::MOUNT_ATTR_NOEXEC,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the kernel reads the path and the structure, which outlive the call. The size is that
    // of the structure.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
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

    /// Size of the mapping in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Asks for huge pages. An error is ignored: the pages are then small.
    pub fn prefer_huge_pages(&self) {
        // SAFETY: the range is a mapping of this object. The advice changes no content.
        let _ =
            unsafe { rustix::mm::madvise(self.start.as_ptr(), self.bytes, Advice::LinuxHugepage) };
    }

    fn populate(&self, offset: usize, bytes: usize) -> Result<(), Errno> {
        let range = self.range(offset, bytes)?;
        // SAFETY: the range is a mapping of this object. The call allocates missing pages, but
        // changes no content.
        unsafe { rustix::mm::madvise(range, bytes, Advice::LinuxPopulateWrite) }
    }

    /// Removes a range from this process's page tables. Mapped pages would count as memory of this
    /// process for the kernel's out-of-memory killer. The pages stay in the file.
    fn forget(&self, offset: usize, bytes: usize) {
        if let Ok(range) = self.range(offset, bytes) {
            // SAFETY: the range is a mapping of this object, and of a file, so its content stays.
            let _ = unsafe { rustix::mm::madvise(range, bytes, Advice::LinuxDontNeed) };
        }
    }

    /// Returns the address of a range.
    ///
    /// # Errors
    /// `EINVAL`: the range is not inside the mapping.
    fn range(&self, offset: usize, bytes: usize) -> Result<*mut c_void, Errno> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let at = is_inside.then(|| self.start.as_ptr().wrapping_byte_add(offset));
        at.ok_or(Errno::INVAL)
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

// SAFETY: the object owns its mapping, and its methods change no memory that a reference could
// refer to. The kernel synchronises the calls of several threads.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object mapped the range, with this size, and no reference to it exists.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}
