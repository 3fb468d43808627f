//! Sends and receives frames on a packet socket. Each packet has one frame and at most one
//! descriptor.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use affinode_proto::wire::message::FRAME_BYTES;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// A frame, and the descriptor that arrived with it.
pub type Received = ([u8; FRAME_BYTES], Option<OwnedFd>);

/// Receives the next packet if one has arrived, without waiting.
///
/// # Errors
/// `WouldBlock`: no packet has arrived. Any other error: the connection has ended, or the packet is
/// not a frame.
pub fn receive(socket: impl AsFd) -> io::Result<Received> {
    let mut frame = [0; FRAME_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut parts = [IoSliceMut::new(&mut frame)];
    let bytes = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?.bytes;
    let mut descriptor = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            descriptor = fds.next();
        }
    }
    match bytes {
        FRAME_BYTES => Ok((frame, descriptor)),
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends a frame and an optional descriptor, without waiting. Returns the number of bytes sent. On
/// a stream socket this can be less than the frame.
///
/// # Errors
/// If the socket is full, or the peer has closed it.
pub fn send(
    socket: impl AsFd,
    frame: &[u8; FRAME_BYTES],
    descriptor: Option<&OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = descriptor.map(|fd| [fd.as_fd()]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut control, flags)?)
}
