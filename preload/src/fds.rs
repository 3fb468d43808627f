//! Descriptors of ours in the application's table: they are moved to high numbers, and before
//! each use it is made sure that the number still means our file. A number that does not is
//! forgotten, never closed.

use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::sys::{self, Identity};

/// A descriptor and what it meant when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedFd {
    fd: i32,
    identity: Identity,
}

impl TrackedFd {
    /// Notes what a descriptor means.
    pub fn note(fd: i32) -> Option<TrackedFd> {
        sys::identity(fd).map(|identity| TrackedFd { fd, identity })
    }

    /// The descriptor, if its number still means the same.
    pub fn get(&self) -> Option<i32> {
        (sys::identity(self.fd) == Some(self.identity)).then_some(self.fd)
    }

    /// Closes it, if it is still ours.
    pub fn close(self) {
        if let Some(fd) = self.get() {
            sys::close(fd);
        }
    }
}

/// The connection last made in this process or, in a forked child, by its parent.
pub static SOCKET: InheritedFd = InheritedFd::none();
/// The same for the page's file.
pub static PAGE: InheritedFd = InheritedFd::none();
/// The way to a copier.
pub static COPIER: InheritedFd = InheritedFd::none();
/// The file of the pool.
pub static POOL: InheritedFd = InheritedFd::none();
/// Where others ask for memory of this process.
pub static SHARING: InheritedFd = InheritedFd::none();

/// Where a descriptor is noted, so that a forked child knows of it.
pub struct InheritedFd {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl InheritedFd {
    const fn none() -> InheritedFd {
        InheritedFd { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Notes it in place of another.
    pub fn set(&self, owned: TrackedFd) {
        self.device.store(owned.identity.device, Ordering::Relaxed);
        self.inode.store(owned.identity.inode, Ordering::Relaxed);
        self.fd.store(owned.fd, Ordering::Release);
    }

    /// What is noted.
    pub fn owned(&self) -> Option<TrackedFd> {
        let fd = self.fd.load(Ordering::Acquire);
        let identity = Identity {
            device: self.device.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
        };
        (fd >= 0).then_some(TrackedFd { fd, identity })
    }

    /// The descriptor that is noted, if its number still means the same.
    pub fn get(&self) -> Option<i32> {
        self.owned()?.get()
    }

    /// Closes and forgets it.
    pub fn close(&self) {
        let owned = self.owned();
        self.fd.store(-1, Ordering::Release);
        if let Some(owned) = owned {
            owned.close();
        }
    }
}

/// Closes what a forked child has inherited from its parent's registration: the
/// controller must see the parent's connection end with the parent.
pub fn close_inherited() {
    [&SOCKET, &PAGE, &COPIER, &POOL, &SHARING].into_iter().for_each(InheritedFd::close);
}
