//! The one place of this crate with unsafe code.
#![allow(unsafe_code)]

use std::{io, os::fd::OwnedFd};

use tokio::io::{Interest, unix::AsyncFd};

/// Waits for an owned descriptor to become readable.
///
/// # Errors
/// The runtime cannot watch it.
pub fn watch_readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names one open description for as long as it lives; `AsyncFd`
    // owns it, hands out no way to replace it, and takes it off the poll set before the drop.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?)
}
