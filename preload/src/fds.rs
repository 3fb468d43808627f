//! Descriptors of this library in the application's table. They are moved to high numbers and
//! checked before each use, because the application may have closed one and opened another file with
//! its number. Such a number is forgotten, and never closed.

use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::sys::{self, Identity};

/// A descriptor and the file that it referred to when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedFd {
    fd: i32,
    identity: Identity,
}

impl TrackedFd {
    /// Records the file of a descriptor; `None`: it is closed.
    pub fn note(fd: i32) -> Option<TrackedFd> {
        sys::identity(fd).map(|identity| TrackedFd { fd, identity })
    }

    /// The descriptor, if its number still refers to the same file.
    pub fn get(&self) -> Option<i32> {
        (sys::identity(self.fd) == Some(self.identity)).then_some(self.fd)
    }

    /// Closes the descriptor, if it still refers to the same file.
    pub fn close(self) {
        if let Some(fd) = self.get() {
            sys::close(fd);
        }
    }
}

/// The newest socket to the controller. In a forked child, it is the parent's socket until the
/// child makes its own.
pub static SOCKET: InheritedFd = InheritedFd::none();
/// The file of the counters. In a forked child, it is the parent's file until the child makes its
/// own.
pub static PAGE: InheritedFd = InheritedFd::none();
/// The socket of the copier.
pub static COPIER: InheritedFd = InheritedFd::none();
/// The file of the staging buffer.
pub static POOL: InheritedFd = InheritedFd::none();
/// The socket on which this process receives requests of processes that open its memory.
pub static SHARING: InheritedFd = InheritedFd::none();

/// The record of a descriptor of this library. A forked child inherits the record and can close the
/// descriptor.
pub struct InheritedFd {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl InheritedFd {
    const fn none() -> InheritedFd {
        InheritedFd { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Records a descriptor, and replaces the earlier one.
    pub fn set(&self, owned: TrackedFd) {
        self.device.store(owned.identity.device, Ordering::Relaxed);
        self.inode.store(owned.identity.inode, Ordering::Relaxed);
        self.fd.store(owned.fd, Ordering::Release);
    }

    /// The recorded descriptor, without a check of its file.
    pub fn owned(&self) -> Option<TrackedFd> {
        let fd = self.fd.load(Ordering::Acquire);
        let identity = Identity {
            device: self.device.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
        };
        (fd >= 0).then_some(TrackedFd { fd, identity })
    }

    /// The recorded descriptor, if its number still refers to the same file.
    pub fn get(&self) -> Option<i32> {
        self.owned()?.get()
    }

    /// Closes and forgets the descriptor.
    pub fn close(&self) {
        let owned = self.owned();
        self.fd.store(-1, Ordering::Release);
        if let Some(owned) = owned {
            owned.close();
        }
    }
}

/// Closes the descriptors that a forked child has inherited from its parent. Otherwise the
/// controller would not see the parent's connection end with the parent.
pub fn close_inherited() {
    [&SOCKET, &PAGE, &COPIER, &POOL, &SHARING].into_iter().for_each(InheritedFd::close);
}
