//! Relays messages between one process and its copier. A copier serves all processes of a GPU on
//! one thread. If a process sent a descriptor that blocks when it is closed, that thread would
//! stop. The relay therefore forwards only descriptors that can be closed without blocking.

use std::{io, os::fd::OwnedFd};

use affinode_copier::socket;
use rustix::fs::FileType;
use tokio::io::{Interest, unix::AsyncFd};

use super::peer;
use crate::sys;

/// Relays frames in both directions until one side closes its socket, or the process sends a
/// descriptor that is not allowed. Must run on the container's own thread, because receiving a
/// message may block there.
pub async fn carry(process: OwnedFd, copier: OwnedFd) {
    let (Ok(process), Ok(copier)) = (sys::watch(process), sys::watch(copier)) else { return };
    let ended = tokio::select! {
        ended = pass(&process, &copier, is_harmless) => ended,
        ended = pass(&copier, &process, |_| true) => ended,
    };
    let Err(error) = ended;
    if error.kind() == io::ErrorKind::InvalidInput {
        tracing::warn!(%error, "the controller closed the connection of a process to its copier");
    }
}

/// Relays frames in one direction until an error occurs.
async fn pass(
    from: &AsyncFd<OwnedFd>,
    to: &AsyncFd<OwnedFd>,
    may_pass: impl Fn(&OwnedFd) -> bool,
) -> io::Result<std::convert::Infallible> {
    loop {
        let receive = |from: &OwnedFd| socket::receive(from);
        let (frame, descriptor) = from.async_io(Interest::READABLE, receive).await?;
        // A refused descriptor is closed here, on the container's own thread.
        if descriptor.as_ref().is_some_and(|descriptor| !may_pass(descriptor)) {
            let why = "the process sent a descriptor that is neither a memory file nor a device";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let send = |to: &OwnedFd| socket::send(to, &frame, descriptor.as_ref());
        to.async_io(Interest::WRITABLE, send).await?;
    }
}

/// Returns whether a descriptor can be closed without waiting for another process. That is true for
/// a file in memory and for a device. The driver exports device memory as a device file.
fn is_harmless(descriptor: &OwnedFd) -> bool {
    let is_device = || {
        let stat = rustix::fs::fstat(descriptor);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice)
    };
    peer::is_memory(descriptor) || is_device()
}
