//! Sends and receives frames on packet sockets. Each packet has one frame and at most one
//! descriptor.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use affinode_proto::wire::message::FRAME_BYTES;
use rustix::{
    io::retry_on_intr,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags,
    },
};

/// The bytes of one frame.
pub type Frame = [u8; FRAME_BYTES];

/// Waits for the next packet. Returns its frame and its descriptor, or `None` if the peer has
/// closed the socket.
///
/// # Errors
/// The connection has failed, or the packet is not a frame.
pub fn receive_with_descriptor(socket: impl AsFd) -> io::Result<Option<(Frame, Option<OwnedFd>)>> {
    let mut frame = [0; FRAME_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut frame)];
        rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptor = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            descriptor = fds.next();
        }
    }
    checked(received.bytes, frame).map(|frame| frame.map(|frame| (frame, descriptor)))
}

/// Waits for the next packet of an untrusted peer. Returns its frame, or `None` if the peer has
/// closed the socket.
///
/// There is no buffer for descriptors, so the kernel closes the packet's descriptors within this
/// call. Closing a descriptor of an untrusted file can take long. Each peer therefore needs a
/// thread of its own.
///
/// # Errors
/// The connection has failed, or the packet is not a frame.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Frame>> {
    let mut frame = [0; FRAME_BYTES];
    // With this flag the kernel returns the packet's real size.
    let flags = RecvFlags::TRUNC;
    let (_, bytes) = retry_on_intr(|| rustix::net::recv(&socket, &mut frame[..], flags))?;
    checked(bytes, frame)
}

fn checked(bytes: usize, frame: Frame) -> io::Result<Option<Frame>> {
    match bytes {
        FRAME_BYTES => Ok(Some(frame)),
        0 => Ok(None),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends a frame and an optional descriptor, without waiting.
///
/// # Errors
/// If the socket is full, or the peer has closed it.
pub fn send(socket: impl AsFd, frame: &Frame, descriptor: Option<impl AsFd>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = descriptor.as_ref().map(|fd| [fd.as_fd()]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut control, flags)?;
    Ok(())
}
