//! The connection to the node's host pool. The host pool allocates pages of a memory file for this
//! process, so that they are charged to Affinode's cgroup and not to the container's. This process
//! maps the file. The content exists as long as this mapping, even after the host pool has ended.
//!
//! ```text
//! helper thread ──Populate──> host pool      one request and one reply for each chunk;
//!               <─Populated──                 any helper may receive any reply
//! ```
//!
//! A page that the host pool has not allocated must not be touched: it would be charged to the
//! container, whose limit was not checked.

use core::sync::atomic::{AtomicU32, Ordering};

use affinode_proto::wire::ProcessFlags;
use affinode_proto::wire::host_pool::{FromHostPool, ToHostPool};
use affinode_proto::wire::message::FRAME_BYTES;

use super::prefault::{CHUNK_BYTES, is_turned_back};
use super::{disk, prefault_host_pool};
use crate::fds::{self, TrackedFd};
use crate::process;
use crate::sys::{self, Descriptor, task};

/// Time limit for the memory file, in milliseconds. The host pool sends the file as soon as the
/// process is connected.
const FILE_WITHIN_MS: u64 = 1_000;
/// Time limit for a reply, in milliseconds. The host pool usually replies within a second, even if
/// it has no memory. The reply takes longer only if the host pool is stopped or the node reclaims
/// memory.
const REPLY_WITHIN_MS: u64 = 10_000;
/// Time limit for a reply after the controller has cancelled the copy out, in milliseconds.
const TURNED_BACK_WITHIN_MS: u64 = 200;
/// Interval, in milliseconds, at which a thread that waits for a reply checks whether the copy out
/// was cancelled.
const LOOK_MS: u64 = 20;

/// State of the connection: [`NO_FILE`], [`HAS_FILE`] or [`BROKEN`].
static STATE: AtomicU32 = AtomicU32::new(NO_FILE);
/// The memory file of the present connection has not arrived.
const NO_FILE: u32 = 0;
/// The memory file has arrived.
const HAS_FILE: u32 = 1;
/// The connection has failed and is shut down. The agent closes it before its next use. A helper
/// must not close it: other helpers may be waiting on this descriptor, and the application could
/// open another file with the same number.
const BROKEN: u32 = 2;

/// Number of requests for the disk (to open the file, or to store a piece) that have no reply yet on
/// the present connection. While there are any, the host pool may still read from the memory file,
/// and a reply may belong to a storing that was cancelled.
static UNANSWERED: AtomicU32 = AtomicU32::new(0);

/// Stores a new connection to the host pool, and ends the earlier one. A staging pool that maps the
/// earlier connection's file keeps its content.
pub fn meet(socket: Option<Descriptor>) {
    // The storing thread uses the earlier connection.
    disk::cancel();
    if let Some(earlier) = fds::HOST_POOL.get() {
        // The helpers of a prefault stop when they get no reply.
        sys::shut_down(earlier);
    }
    prefault_host_pool::lose_connection();
    hang_up();
    note_lost(false);
    if let Some(socket) = socket
        && let Some(owned) = TrackedFd::note(socket.number())
    {
        socket.take();
        fds::HOST_POOL.set(owned);
    }
}

/// Tells the controller whether a new connection is needed for the next offload.
fn note_lost(is_lost: bool) {
    if let Some(page) = process::page() {
        page.note(ProcessFlags::HOST_POOL_LOST, is_lost);
    }
}

/// Ends the connection to the host pool. No helper may be running.
fn hang_up() {
    STATE.store(NO_FILE, Ordering::Release);
    UNANSWERED.store(0, Ordering::Release);
    if let Some(socket) = fds::HOST_POOL.get() {
        // A forked child may have the socket too, so it is shut down and not only closed.
        sys::shut_down(socket);
    }
    fds::HOST_POOL.close();
    fds::HOST_POOL_FILE.close();
}

/// Whether the memory file of the present connection has arrived, and the connection has not failed.
pub fn has_file() -> bool {
    STATE.load(Ordering::Acquire) == HAS_FILE && fds::HOST_POOL.get().is_some()
}

/// Waits until the memory file of the present connection can be received. Does not receive it: a
/// staging pool that maps an earlier file is replaced when it begins, because there is no file yet.
/// False: there is no connection, it has failed, or the host pool has sent no file.
pub fn wait_for_file() -> bool {
    let socket = fds::HOST_POOL.get();
    match STATE.load(Ordering::Acquire) {
        HAS_FILE => socket.is_some(),
        NO_FILE => socket.is_some_and(|socket| task::wait_readable(socket, FILE_WITHIN_MS)),
        _ => false,
    }
}

/// Returns the memory file of the present connection, and receives it first if necessary. `None`:
/// there is no connection, it has failed, or the host pool has sent no file. No helper may be
/// running.
pub fn file() -> Option<i32> {
    let socket = fds::HOST_POOL.get()?;
    if STATE.load(Ordering::Acquire) == BROKEN {
        hang_up();
        return None;
    }
    if STATE.load(Ordering::Acquire) == NO_FILE {
        let mut frame = [0; FRAME_BYTES];
        let came = task::wait_readable(socket, FILE_WITHIN_MS)
            .then(|| sys::receive(socket, &mut frame).ok())
            .flatten();
        let file = came
            .and_then(|(_, file)| file)
            .filter(|_| matches!(FromHostPool::decode(&frame), Ok(FromHostPool::File)));
        let owned = file.as_ref().and_then(|file| TrackedFd::note(file.number()));
        let (Some(file), Some(owned)) = (file, owned) else {
            hang_up();
            return None;
        };
        file.take();
        fds::HOST_POOL_FILE.set(owned);
        STATE.store(HAS_FILE, Ordering::Release);
    }
    fds::HOST_POOL_FILE.get()
}

/// Ends the use of the disk file. Without a connection, the host pool has closed it already.
pub fn close_disk() {
    ask(&ToHostPool::CloseDisk);
}

/// Sends a request on the present connection. False: there is none.
pub fn ask(request: &ToHostPool) -> bool {
    let has_reply = matches!(request, ToHostPool::OpenDisk | ToHostPool::Store { .. });
    // Count the request before another thread can receive its reply.
    if has_reply {
        UNANSWERED.fetch_add(1, Ordering::AcqRel);
    }
    let socket = fds::HOST_POOL.get().filter(|_| has_file());
    let sent = socket.is_some_and(|socket| sys::send(socket, &request.encode(), None).is_ok());
    if has_reply && !sent {
        count_reply();
    }
    sent
}

/// Whether all requests for the disk have a reply.
pub fn has_all_replies() -> bool {
    UNANSWERED.load(Ordering::Acquire) == 0
}

fn count_reply() {
    let less = |count: u32| count.checked_sub(1);
    let _ = UNANSWERED.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
}

/// Decodes a message, and counts it if it is the reply to a request for the disk.
fn decode(frame: &[u8; FRAME_BYTES]) -> Option<FromHostPool> {
    let message = FromHostPool::decode(frame).ok()?;
    if matches!(message, FromHostPool::DiskFile { .. } | FromHostPool::Stored { .. }) {
        count_reply();
    }
    Some(message)
}

/// Receives a message that has arrived, and its descriptor if it has one. `Ok(None)`: none has
/// arrived.
///
/// # Errors
/// The connection has ended.
pub fn receive() -> Result<Option<(FromHostPool, Option<Descriptor>)>, ()> {
    let socket = fds::HOST_POOL.get().filter(|_| has_file()).ok_or(())?;
    let mut frame = [0; FRAME_BYTES];
    match sys::receive(socket, &mut frame) {
        Ok((FRAME_BYTES, file)) => decode(&frame).map(|message| Some((message, file))).ok_or(()),
        Err(sys::EAGAIN | sys::EINTR) => Ok(None),
        _ => Err(()),
    }
}

/// Waits until a message may have arrived, for at most `within_ms` milliseconds.
pub fn wait(within_ms: u64) {
    match fds::HOST_POOL.get() {
        Some(socket) => {
            task::wait_readable(socket, within_ms);
        }
        None => sys::sleep_us(within_ms * 1_000),
    }
}

/// Requests the pages of a chunk, and waits for one reply. Returns the chunk that the reply names,
/// which another thread may have requested, and whether its pages exist. `None`: the connection has
/// ended.
pub fn populate(chunk: usize, bytes: usize) -> Option<(usize, bool)> {
    let request = ToHostPool::Populate {
        offset: (chunk * CHUNK_BYTES) as u64,
        bytes: bytes as u64,
        processor: sys::processor(),
    };
    let socket = fds::HOST_POOL.get()?;
    let sent = sys::send(socket, &request.encode(), None).is_ok();
    let reply = sent.then(|| reply(socket)).flatten();
    if reply.is_none() {
        // A late reply must not be taken for that of a later request.
        STATE.store(BROKEN, Ordering::Release);
        note_lost(true);
        sys::shut_down(socket);
    }
    reply
}

fn reply(socket: i32) -> Option<(usize, bool)> {
    let mut end_us = sys::now_us() + REPLY_WITHIN_MS * 1_000;
    loop {
        if is_turned_back() {
            end_us = end_us.min(sys::now_us() + TURNED_BACK_WITHIN_MS * 1_000);
        }
        let left_ms = end_us.saturating_sub(sys::now_us()) / 1_000;
        if left_ms == 0 {
            return None;
        }
        if !task::wait_readable(socket, left_ms.min(LOOK_MS)) {
            continue;
        }
        let mut frame = [0; FRAME_BYTES];
        match sys::receive(socket, &mut frame) {
            Ok((FRAME_BYTES, _)) => match decode(&frame) {
                Some(FromHostPool::Populated { offset, done }) => {
                    return Some((usize::try_from(offset).ok()? / CHUNK_BYTES, done));
                }
                // Late replies to a storing that a restore has cancelled.
                Some(FromHostPool::Stored { .. } | FromHostPool::DiskFile { .. }) => {}
                _ => return None,
            },
            // Another thread has received the reply that had arrived.
            Err(sys::EAGAIN) => {}
            _ => return None,
        }
    }
}

#[cfg(test)]
pub mod tests;
