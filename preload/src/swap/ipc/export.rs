//! Creates handles for this process's memory, and replies to the processes that open these handles.

use affinode_cuda_sys::{POSIX_DESCRIPTOR, result};
use affinode_proto::wire::ProcessFlags;
use affinode_proto::wire::ipc::{HANDLE_BYTES, IpcHandle, IpcReply, IpcRequest};
use affinode_proto::wire::message::FRAME_BYTES;

use super::super::alloc_wrappers::stays;
use super::super::allocations::Allocation;
use super::super::driver::call;
use super::super::{SWAP, is_in_use, locked, tables, vmm};
use super::is_shareable;
use crate::fds::{self, TrackedFd};
use crate::process;
use crate::sys::{self, Descriptor, datagram};

/// Identity of this process for the processes that open its memory. Each IPC handle that this
/// process creates contains the identity. An all-zero value: this process has no identity yet.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct ExportIdentity {
    socket: [u8; 16],
    word: [u8; 16],
    proof: u64,
    is_made: bool,
}

impl ExportIdentity {
    pub const fn none() -> ExportIdentity {
        ExportIdentity { socket: [0; 16], word: [0; 16], proof: 0, is_made: false }
    }

    fn random() -> Option<ExportIdentity> {
        let (mut socket, mut word, mut proof) = ([0; 16], [0; 16], [0; 8]);
        for bytes in [&mut socket[..], &mut word, &mut proof] {
            datagram::random(bytes).ok()?;
        }
        Some(ExportIdentity { socket, word, proof: u64::from_ne_bytes(proof), is_made: true })
    }

    fn handle(&self, allocation: &Allocation) -> IpcHandle {
        let ExportIdentity { socket, word, proof, .. } = *self;
        let (address, since) = (allocation.piece.address, allocation.piece.since);
        IpcHandle { socket, word, proof, address, since }
    }

    /// Whether this process has created the given handle.
    pub(super) fn made(&self, handle: &IpcHandle) -> bool {
        self.is_made && self.socket == handle.socket && self.word == handle.word
    }
}

pub unsafe extern "C" fn ipc_get_mem_handle(handle: *mut [u8; HANDLE_BYTES], address: u64) -> u32 {
    if tables(|tables| tables.opened.around(address).is_some()) {
        // The driver also returns this code for memory that it has opened.
        return result::INVALID_VALUE;
    }
    let ours = locked(|table| table.around(address).copied());
    if let Some(allocation) = ours.filter(is_shareable)
        && !handle.is_null()
        && let Some(identity) = be_reachable()
    {
        stays(address);
        // SAFETY: the application's own place for the handle.
        unsafe { handle.write(identity.handle(&allocation).encode()) };
        return result::SUCCESS;
    }
    let code = call!(ipc_get_mem_handle(handle.cast(), address));
    if code == result::SUCCESS {
        stays(address);
        vmm::blocks(|blocks| blocks.stay_in(address, 1));
    } else if ours.is_some_and(|ours| ours.pool == 0)
        && let Some(page) = process::page()
    {
        page.note(ProcessFlags::IPC_REFUSED, true);
    }
    code
}

/// Makes this process reachable for the processes that open its memory: binds the socket on which
/// the agent receives their requests. Returns the identity for handles. `None`: a step failed.
fn be_reachable() -> Option<ExportIdentity> {
    SWAP.reach_lock.hold(|| {
        let known = tables(|tables| tables.identity);
        let identity = if known.is_made { known } else { ExportIdentity::random()? };
        // If the application has closed the socket, it is bound again under the same name.
        if fds::SHARING.get().is_none() {
            let name = identity.handle(&Allocation::default()).socket_name();
            let ask = IpcRequest { word: identity.word, address: 0, since: 0 }.encode();
            let begin = ask.first_chunk::<{ datagram::BEGIN_BYTES }>()?;
            let only = Some(datagram::ExpectedSender { begin, length: FRAME_BYTES });
            let socket = datagram::bind(&name, only, process::agent_tid()?, sys::SIGURG).ok()?;
            fds::SHARING.set(TrackedFd::note(socket.number())?);
            socket.take();
        }
        tables(|tables| tables.identity = identity);
        Some(identity)
    })
}

/// Replies to processes that request to open memory of this process. Only the agent calls this
/// function, and only while the driver has neither locked nor checkpointed this process. True:
/// there may be more requests.
pub fn answer() -> bool {
    /// Maximum number of requests that one call of `answer` handles. The agent then reads the
    /// controller's messages, even if more requests wait.
    const MAX_REQUESTS_PER_TURN: u32 = 16;
    if !is_in_use() {
        return false;
    }
    // The buffer has one byte more than a frame, to detect a message that is too long.
    let mut frame = [0; FRAME_BYTES + 1];
    for _ in 0..MAX_REQUESTS_PER_TURN {
        let Some(socket) = fds::SHARING.get() else {
            return false;
        };
        let Ok(length) = datagram::peek(socket, &mut frame) else {
            return false;
        };
        let ask = frame.first_chunk().filter(|_| length == FRAME_BYTES);
        let identity = tables(|tables| tables.identity);
        let knows = |ask: &IpcRequest| identity.is_made && is_same(&identity.word, &ask.word);
        match ask.and_then(|frame| IpcRequest::decode(frame).ok()).filter(knows) {
            Some(ask) => {
                if let Ok((_, Some(way))) = sys::receive(socket, &mut frame) {
                    // Without a reply the importer sees that its socket was closed.
                    let _ = serve(&ask, &identity, &way);
                }
            }
            // Discard the datagram without opening its descriptor, because the sender decides how
            // long the kernel takes to close such a file.
            None => datagram::discard(socket),
        }
    }
    true
}

fn serve(ask: &IpcRequest, identity: &ExportIdentity, way: &Descriptor) -> Option<()> {
    let find = || {
        let found = locked(|table| table.at(ask.address).copied())?;
        (found.piece.since == ask.since && is_shareable(&found)).then_some(found)
    };
    let Allocation { piece, asked_bytes, .. } = find()?;
    let mut memory = 0;
    if call!(mem_retain_handle(&raw mut memory, piece.address)) != result::SUCCESS {
        return None;
    }
    // The table must contain the memory of the handle after the reference was taken. From then on
    // the reference keeps that memory, whatever the application frees meanwhile.
    let shared = find().and_then(|_| {
        let mut fd = -1_i32;
        let code = call!(mem_export((&raw mut fd).cast(), memory, POSIX_DESCRIPTOR, 0));
        datagram::made(fd).filter(|_| code == result::SUCCESS)
    });
    call!(mem_release(memory));
    let answer = IpcReply { proof: identity.proof, bytes: piece.bytes, asked_bytes };
    sys::send(way.number(), &answer.encode(), Some(shared?.number())).ok().map(drop)
}

/// Whether two secret words are equal. The comparison takes constant time.
fn is_same(one: &[u8; 16], other: &[u8; 16]) -> bool {
    one.iter().zip(other).fold(0, |sum, (one, other)| sum | (one ^ other)) == 0
}

#[cfg(test)]
mod tests;
