//! Serves one connection of an agent, from its Hello message to its end.

use std::{io, mem::MaybeUninit, os::fd::OwnedFd, sync::Arc, time::Duration};

use affinode_copier::socket;
use affinode_core::{Key, ProcessId};
use affinode_proto::wire::{
    WIRE_VERSION,
    message::{AgentMessage, ControllerMessage, FRAME_BYTES, FrameError},
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::{UnixStream, unix::OwnedReadHalf, unix::OwnedWriteHalf},
    runtime::Handle,
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};

use super::{AgentHandle, AgentMail, OUTBOX, OutgoingFrame, peer, rate_limit::RateLimits};
use crate::{error_chain, sys};

/// Time limit for the arrival of the Hello, the first message of a process that connects.
const HELLO: Duration = Duration::from_secs(2);
/// Time limit for an agent's socket to accept a message.
const WRITE: Duration = Duration::from_secs(5);
/// Maximum number of messages per second that the controller reads from one process. Further
/// messages wait in the socket of the process.
const RATE: u32 = 200;

#[derive(Debug, thiserror::Error)]
enum ConnectionRefusal {
    #[error("the agent of a process sent no first message (Hello) within {} s", HELLO.as_secs())]
    Late,
    #[error("cannot read the agent's first message")]
    Io(#[from] io::Error),
    #[error("cannot parse the agent's first message")]
    Frame(#[from] FrameError),
    #[error("the agent's first message is not a Hello")]
    NoHello,
    #[error(
        "the container's library has protocol version {0}, but the controller has version {WIRE_VERSION}: restart the container, so that it is managed again"
    )]
    Version(u32),
    #[error("cannot identify the process that connected")]
    Papers(#[from] peer::PeerError),
}

/// Serves an agent's connection until it ends. The wait for the end of the process runs on
/// `runtime`, the controller's own runtime. The controller therefore notices the end even while the
/// container's thread is blocked.
pub async fn serve(
    mut stream: UnixStream,
    key: Key,
    id: ProcessId,
    budgets: Arc<RateLimits>,
    runtime: Handle,
    mail: mpsc::Sender<AgentMail>,
) {
    let (hello, page, (identity, clock_ahead_ms, pidfd)) = match introduce(&stream).await {
        Ok(introduced) => introduced,
        Err(refusal) => {
            let retry = !matches!(refusal, ConnectionRefusal::Version(_));
            let goodbye = ControllerMessage::Refuse { version: WIRE_VERSION, retry }.encode();
            let _ = timeout(WRITE, stream.write_all(&goodbye)).await;
            // A peer that closed the connection before its Hello is not reported.
            let silent = matches!(&refusal, ConnectionRefusal::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof);
            if !silent && let Some(why) = budgets.refusals.tell(error_chain::chain(&refusal)) {
                let _ = mail.send(AgentMail::Refused { key, why }).await;
            }
            return;
        }
    };
    let (outbox, outgoing) = mpsc::channel(OUTBOX);
    let (told, joined) = oneshot::channel();
    let watch = runtime.spawn(watch(pidfd, joined, id, mail.clone())).abort_handle();
    let AgentMessage::Hello { abilities, .. } = hello else {
        return;
    };
    let page = Arc::new(page);
    let ward = Handle::current();
    let agent = AgentHandle { outbox: Some(outbox), page, abilities, clock_ahead_ms, watch, ward };
    // The reader starts after `Joined` is queued, so that the actor never gets a message of an
    // unknown process.
    let comes = AgentMail::Joined { key, id, identity, hello, agent };
    if mail.send(comes).await.is_err() {
        return;
    }
    let _ = told.send(());
    let (reader, writer) = stream.into_split();
    tokio::select! {
        () = read(reader, id, &budgets, &mail) => {}
        () = write(writer, outgoing) => {}
    }
    let _ = mail.send(AgentMail::Detached(id)).await;
}

type Introduced = (AgentMessage, std::fs::File, peer::Identified);

async fn introduce(stream: &UnixStream) -> Result<Introduced, ConnectionRefusal> {
    let (frame, descriptors) =
        timeout(HELLO, receive_hello(stream)).await.map_err(|_| ConnectionRefusal::Late)??;
    let hello = AgentMessage::decode(&frame)?;
    let AgentMessage::Hello { version, .. } = hello else {
        return Err(ConnectionRefusal::NoHello);
    };
    if version != WIRE_VERSION {
        return Err(ConnectionRefusal::Version(version));
    }
    let page = peer::page(descriptors)?;
    let identity = peer::identify(stream)?;
    Ok((hello, page, identity))
}

async fn receive_hello(stream: &UnixStream) -> io::Result<([u8; FRAME_BYTES], Vec<OwnedFd>)> {
    let mut frame = [0; FRAME_BYTES];
    let mut descriptors = Vec::new();
    let mut filled = 0;
    while filled < FRAME_BYTES {
        let rest = &mut frame[filled..];
        let taken =
            stream.async_io(Interest::READABLE, || receive(stream, rest, &mut descriptors)).await?;
        if taken == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filled += taken;
    }
    Ok((frame, descriptors))
}

fn receive(
    stream: &UnixStream,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    // Space for two descriptors. A second descriptor is counted and refused, and the kernel closes
    // any further ones.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received =
        rustix::net::recvmsg(stream, &mut [io::IoSliceMut::new(buffer)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            // At most two descriptors are kept, even if they arrive in several messages.
            descriptors.extend(fds.take(2_usize.saturating_sub(descriptors.len())));
        }
    }
    Ok(received.bytes)
}

/// Waits until the process ends, and then sends `Exited` to the actor. `Exited` is sent only after
/// the message `Joined` of the same process.
async fn watch(
    pidfd: OwnedFd,
    joined: oneshot::Receiver<()>,
    id: ProcessId,
    mail: mpsc::Sender<AgentMail>,
) {
    if joined.await.is_err() {
        return;
    }
    if let Ok(watched) = sys::watch_readable(pidfd) {
        let _ = watched.readable().await;
        let _ = mail.send(AgentMail::Exited(id)).await;
    }
}

async fn read(
    mut from: OwnedReadHalf,
    id: ProcessId,
    budgets: &RateLimits,
    mail: &mpsc::Sender<AgentMail>,
) {
    let (mut second, mut count) = (Instant::now(), 0);
    let mut frame = [0; FRAME_BYTES];
    while from.read_exact(&mut frame).await.is_ok() {
        if second.elapsed() >= Duration::from_secs(1) {
            (second, count) = (Instant::now(), 0);
        }
        count += 1;
        if count > RATE {
            tokio::time::sleep_until(second + Duration::from_secs(1)).await;
        }
        // Unread frames stay in the process's socket, so only that process has to wait.
        budgets.messages.take().await;
        match AgentMessage::decode(&frame) {
            Ok(message) => {
                if let AgentMessage::Report { order, outcome, elapsed_us, .. } = message {
                    tracing::debug!(process = id.0, order, ?outcome, elapsed_us, "order executed");
                }
                if mail.send(AgentMail::Message(id, message)).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                if let Some(why) = budgets.refusals.tell(error.to_string()) {
                    tracing::warn!(
                        process = id.0,
                        "process {}: connection closed, because a message is invalid: {why}",
                        id.0
                    );
                }
                return;
            }
        }
    }
}

async fn write(mut to: OwnedWriteHalf, mut outgoing: mpsc::Receiver<OutgoingFrame>) {
    while let Some(OutgoingFrame { message, descriptor }) = outgoing.recv().await {
        let frame = message.encode();
        let sending = async {
            let mut sent = 0;
            // The descriptor is sent with the first byte. The rest of the frame has none, even if
            // the first write was short.
            if descriptor.is_some() {
                let stream: &UnixStream = to.as_ref();
                let first = || socket::send(stream, &frame, descriptor.as_ref());
                sent = stream.async_io(Interest::WRITABLE, first).await?;
            }
            to.write_all(frame.get(sent..).unwrap_or_default()).await
        };
        if !matches!(timeout(WRITE, sending).await, Ok(Ok(()))) {
            return;
        }
    }
}
