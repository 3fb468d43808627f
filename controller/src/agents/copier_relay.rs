//! Between one process and its copier. A copier serves all processes of a GPU on one thread, so what
//! one of them sends does not reach it before it is known that it can be let go of at once.

use std::{io, os::fd::OwnedFd};

use affinode_copier::socket;
use rustix::fs::FileType;
use tokio::io::{Interest, unix::AsyncFd};

use super::peer;
use crate::sys;

/// Carries frames both ways until one side hangs up, or the process sends what it should not. To be
/// run on the container's own thread.
pub async fn carry(process: OwnedFd, copier: OwnedFd) {
    let (Ok(process), Ok(copier)) = (sys::watch(process), sys::watch(copier)) else { return };
    let ended = tokio::select! {
        ended = pass(&process, &copier, is_harmless) => ended,
        ended = pass(&copier, &process, |_| true) => ended,
    };
    let Err(error) = ended;
    if error.kind() == io::ErrorKind::InvalidInput {
        tracing::warn!(%error, "a process is cut off from its copier");
    }
}

/// Until it cannot go on.
async fn pass(
    from: &AsyncFd<OwnedFd>,
    to: &AsyncFd<OwnedFd>,
    may_pass: impl Fn(&OwnedFd) -> bool,
) -> io::Result<std::convert::Infallible> {
    loop {
        let receive = |from: &OwnedFd| socket::receive(from);
        let (frame, descriptor) = from.async_io(Interest::READABLE, receive).await?;
        if descriptor.as_ref().is_some_and(|descriptor| !may_pass(descriptor)) {
            let why = "it has sent a descriptor of another kind than memory and device";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let send = |to: &OwnedFd| socket::send(to, &frame, descriptor.as_ref());
        to.async_io(Interest::WRITABLE, send).await?;
    }
}

/// Whether nothing of a stranger's takes part when it is let go of: a file in memory, or one of a
/// device, as the driver has them for device memory.
fn is_harmless(descriptor: &OwnedFd) -> bool {
    let is_device = || {
        let stat = rustix::fs::fstat(descriptor);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice)
    };
    peer::is_memory(descriptor) || is_device()
}
