//! SEQPACKET sockets for the messages. Each packet has one JSON value and at most one descriptor.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag,
    SockType, UnixAddr, UnixCredentials, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::MAX_PACKET_BYTES;

/// A SEQPACKET socket: one end of a connection, or a listener.
#[derive(Debug)]
pub struct Packet(OwnedFd);

impl Packet {
    fn new() -> io::Result<Self> {
        let fd =
            socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        Ok(Self(fd))
    }

    /// Connects to the daemon's socket at this path.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let packet = Self::new()?;
        socket::connect(packet.0.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(packet)
    }

    /// Listens on a path at which no file may exist yet.
    pub fn listen(path: &Path) -> io::Result<Self> {
        let packet = Self::new()?;
        socket::bind(packet.0.as_raw_fd(), &UnixAddr::new(path)?)?;
        socket::listen(&packet.0, Backlog::new(128)?)?;
        Ok(packet)
    }

    /// Accepts the next connection.
    pub fn accept(&self) -> io::Result<Self> {
        let fd = retry(|| socket::accept4(self.0.as_raw_fd(), SockFlag::SOCK_CLOEXEC))?;
        Ok(Self(own(fd)))
    }

    /// Returns the peer's pid, user id and group id, as the kernel reports them.
    pub fn peer(&self) -> io::Result<UnixCredentials> {
        Ok(socket::getsockopt(&self.0, sockopt::PeerCredentials)?)
    }

    /// Shuts the connection down, which wakes every thread that waits on it at either end.
    pub fn hang_up(&self) {
        let _ = socket::shutdown(self.0.as_raw_fd(), socket::Shutdown::Both);
    }

    /// Sends one message, with at most one descriptor.
    pub fn send<T: Serialize>(&self, message: &T, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_PACKET_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "message too large"));
        }
        let fds: Vec<RawFd> = fd.iter().map(|fd| fd.as_raw_fd()).collect();
        let control = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &control[..0] } else { &control[..] };
        let data = [IoSlice::new(&bytes)];
        retry(|| {
            socket::sendmsg::<()>(self.0.as_raw_fd(), &data, control, MsgFlags::MSG_NOSIGNAL, None)
        })?;
        Ok(())
    }

    /// Receives one message. Returns `None` if the other end is closed.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        let mut bytes = vec![0u8; MAX_PACKET_BYTES];
        let mut space = cmsg_space!([RawFd; 1]);
        let (length, truncated, fd) = loop {
            let mut data = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            match socket::recvmsg::<()>(self.0.as_raw_fd(), &mut data, Some(&mut space), flags) {
                Ok(message) => {
                    let mut fds = Vec::new();
                    for control in message.cmsgs()? {
                        if let ControlMessageOwned::ScmRights(received) = control {
                            fds.extend(received.into_iter().map(own));
                        }
                    }
                    break (message.bytes, message.flags.contains(MsgFlags::MSG_TRUNC), fds.pop());
                }
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
        };
        if length == 0 {
            return Ok(None);
        }
        if truncated {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "message too large"));
        }
        Ok(Some((serde_json::from_slice(&bytes[..length])?, fd)))
    }
}

impl AsFd for Packet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[allow(unsafe_code)]
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just created this descriptor (accept4, SCM_RIGHTS), so it has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Makes a system call, and repeats it if a signal has interrupted it. Otherwise a signal to the
/// application could make a driver call fail.
fn retry<T>(mut call: impl FnMut() -> nix::Result<T>) -> nix::Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => continue,
            other => return other,
        }
    }
}
