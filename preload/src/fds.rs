//! Tracks this library's own file descriptors in the application's process. The library moves them
//! to high numbers, because some programs expect certain low numbers for their own descriptors. The
//! library checks a number before each use, because the application may have closed the descriptor
//! and opened another file under the same number. In that case the library forgets the number, and
//! never closes it.

use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::sys::{self, Identity};

/// A descriptor, and the identity of the file to which it referred when it was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedFd {
    fd: i32,
    identity: Identity,
}

impl TrackedFd {
    /// Records which file a descriptor refers to. Returns `None` if the descriptor is closed.
    pub fn note(fd: i32) -> Option<TrackedFd> {
        sys::identity(fd).map(|identity| TrackedFd { fd, identity })
    }

    /// Returns the descriptor if its number still refers to the same file.
    pub fn get(&self) -> Option<i32> {
        (sys::identity(self.fd) == Some(self.identity)).then_some(self.fd)
    }

    /// Closes the descriptor if it still refers to the same file.
    pub fn close(self) {
        if let Some(fd) = self.get() {
            sys::close(fd);
        }
    }
}

/// Newest socket to the controller. In a forked child, it is the parent's socket until the child
/// creates its own.
pub static SOCKET: InheritedFd = InheritedFd::none();
/// Socket for the next connection to the controller, while there is none.
pub static SPARE: InheritedFd = InheritedFd::none();
/// File of the counters that this process shares with the controller. In a forked child, it is the
/// parent's file until the child creates its own.
pub static PAGE: InheritedFd = InheritedFd::none();
/// Socket to the copier (the process that fills GPU memory for others at a restore).
pub static COPIER: InheritedFd = InheritedFd::none();
/// File of the staging buffer, the host memory to which GPU memory is copied.
pub static POOL: InheritedFd = InheritedFd::none();
/// Socket to the node's host pool, which allocates host memory for this process.
pub static HOST_POOL: InheritedFd = InheritedFd::none();
/// Memory file that the host pool has created for this process.
pub static HOST_POOL_FILE: InheritedFd = InheritedFd::none();
/// Disk file to which content of this process was moved. The process can only read it.
pub static DISK: InheritedFd = InheritedFd::none();
/// Socket on which this process receives requests from processes that open its shared GPU memory.
pub static SHARING: InheritedFd = InheritedFd::none();

/// Static record of one descriptor of this library. A forked child inherits the record, so it can
/// close the inherited descriptor.
pub struct InheritedFd {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl InheritedFd {
    const fn none() -> InheritedFd {
        InheritedFd { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Records a descriptor in place of the one recorded before.
    pub fn set(&self, owned: TrackedFd) {
        self.device.store(owned.identity.device, Ordering::Relaxed);
        self.inode.store(owned.identity.inode, Ordering::Relaxed);
        self.fd.store(owned.fd, Ordering::Release);
    }

    /// Returns the recorded descriptor without a check that it still refers to the same file.
    pub fn owned(&self) -> Option<TrackedFd> {
        let fd = self.fd.load(Ordering::Acquire);
        let identity = Identity {
            device: self.device.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
        };
        (fd >= 0).then_some(TrackedFd { fd, identity })
    }

    /// Returns the recorded descriptor if its number still refers to the same file.
    pub fn get(&self) -> Option<i32> {
        self.owned()?.get()
    }

    /// Closes the recorded descriptor and deletes the record.
    pub fn close(&self) {
        let owned = self.owned();
        self.fd.store(-1, Ordering::Release);
        if let Some(owned) = owned {
            owned.close();
        }
    }
}

/// Closes all of this library's descriptors that a forked child has inherited. Otherwise the
/// parent's connection would stay open after the parent's end, and the controller would not notice
/// the end.
pub fn close_inherited() {
    [&SOCKET, &SPARE, &PAGE, &COPIER, &POOL, &HOST_POOL, &HOST_POOL_FILE, &DISK, &SHARING]
        .into_iter()
        .for_each(InheritedFd::close);
}
