//! Contains all unsafe code of this crate, in functions with safe interfaces.
#![allow(unsafe_code)]

pub mod memory_limits;

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

use tokio::io::{Interest, unix::AsyncFd};

/// Registers an owned descriptor with the async runtime, to wait until it is readable.
///
/// # Errors
/// The runtime cannot watch it.
pub fn watch_readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names one open description during its whole life. `AsyncFd` owns it, has
    // no method that replaces it, and removes it from the poll set before the drop.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?)
}

/// Registers an owned descriptor with the async runtime, to wait until it is readable or writable.
///
/// # Errors
/// The runtime cannot watch it.
pub fn watch(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    let both = Interest::READABLE | Interest::WRITABLE;
    // SAFETY: as in `watch_readable`.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, both) }?)
}

/// Makes the kernel reject descriptors that are sent to this Unix socket, or to a socket that is
/// accepted from it (Linux 6.16).
///
/// # Errors
/// The kernel does not support this option.
pub fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    use nix::libc;
    /// Socket option `SO_PASSRIGHTS` of `asm-generic/socket.h`.
    const PASS_RIGHTS: i32 = 83;
    let off: i32 = 0;
    let bytes = size_of_val(&off) as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the value is an int of the size that is passed, and is only read.
    let done = unsafe {
        libc::setsockopt(socket, libc::SOL_SOCKET, PASS_RIGHTS, (&raw const off).cast(), bytes)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the descriptors that systemd stored for this process, with their names. Only the first
/// call returns descriptors.
///
/// # Errors
/// The variables of systemd are invalid.
pub fn handed_over() -> io::Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let descriptors = sd_notify::listen_fds_with_names()?;
    // SAFETY: LISTEN_PID shows that systemd opened these descriptors for this very process. They
    // were just checked to be open, no other code here uses them, and they are taken once.
    Ok(descriptors.map(|(fd, name)| (name, unsafe { OwnedFd::from_raw_fd(fd) })).collect())
}

/// Takes a write lease (`F_SETLEASE`) on a file. A user can do this with each file that the user
/// owns. If `on` is false, releases the lease.
///
/// # Errors
/// Other processes have the file open.
#[cfg(test)]
pub fn lease(file: impl AsFd, on: bool) -> io::Result<()> {
    use nix::libc::{F_SETLEASE, F_UNLCK, F_WRLCK, SIGURG, fcntl};
    /// Command `F_SETSIG` of `fcntl`, from `asm-generic/fcntl.h`.
    const F_SETSIG: i32 = 10;
    let file = file.as_fd().as_raw_fd();
    // SAFETY: calls on an open descriptor with numbers; the signal has no handler here.
    let done = unsafe {
        match fcntl(file, F_SETSIG, SIGURG) {
            0 => fcntl(file, F_SETLEASE, if on { F_WRLCK } else { F_UNLCK }),
            failed => failed,
        }
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
