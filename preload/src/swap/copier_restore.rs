//! Restore through a copier (a separate process that copies VRAM for others). The copier creates
//! and fills the memory while the driver restores the context of this process. Then this process
//! only imports and maps the memory.
//!
//! ```text
//! offer: copied out, about to be checkpointed ──> the pool's file and the list of pieces, to the copier
//! announce: Checkpointed, so the copier may register the pool; Restoring, so the copier begins
//! import: Restored ──> Begin? ──> each Block: import, map ──> Filled ──> on the device
//!            │ any other message, or too late
//!            └──> imported memory is unmapped and released, the connection closed: the pool
//!                 still has the content, and the process copies it from there
//! ```
//!
//! One socket serves one offload. A restore does not need the copier: without a copier, the process
//! copies the content itself.

use core::sync::atomic::{AtomicU32, Ordering};

use affinode_cuda_sys::{LOCATION_DEVICE, MemAllocationProp, POSIX_DESCRIPTOR, result};
use affinode_proto::wire::ProcessFlags;
use affinode_proto::wire::copier::{
    FromCopier, MAX_PIECES, MIN_MEAN_BYTES, PIECES_A_FRAME, Piece as Wire, ToCopier,
};
use affinode_proto::wire::message::FRAME_BYTES;

use super::allocations::{AllocationId, AllocationPiece, MemoryPlace};
use super::backing::{is_able, map, unback};
use super::copy::{each, record_progress};
use super::driver::call;
use super::layout::AllocationLayout;
use super::prefault_ahead;
use super::staging::StagingPool;
use super::{tables, with_pool};
use crate::counters::CounterPage;
use crate::fds::{self, TrackedFd};
use crate::process;
use crate::sys::{self, Descriptor, task};

/// Maximum wait for the copier's message Begin after the driver's restore, in milliseconds. Usually
/// the message has arrived by then, because a copier that fills memory sends it during the restore.
/// A copier that fills no memory closes the connection. Only a stopped copier does neither.
const BEGIN_WITHIN_MS: u64 = 500;
/// Time limit in milliseconds for the next block of memory from the copier. The time for copying
/// the block's bytes is added.
const BLOCK_WITHIN_MS: u64 = 2_000;
/// Minimum speed of a copier that is worth a wait, in bytes per millisecond. If the copier is
/// slower, a copy by the process itself is faster.
const BYTES_A_MS: u64 = 2_000_000;

/// 1 if this process has offered its copied-out content to the copier on the current socket, else
/// 0.
static OFFERED: AtomicU32 = AtomicU32::new(0);

/// Closes the connection to the previous copier, and stores the copier's socket that the controller
/// has sent.
pub fn meet(socket: Option<Descriptor>) {
    hang_up();
    if let Some(socket) = socket {
        match TrackedFd::note(socket.number()) {
            Some(owned) => {
                socket.take();
                fds::COPIER.set(owned);
            }
            None => drop(socket),
        }
    }
}

/// Closes the connection to the copier, which then frees everything that it holds for this process.
/// Also closes the descriptors that are still queued in the socket, because an exported handle
/// keeps its memory allocated while the handle exists.
pub fn hang_up() {
    if let Some(copier) = fds::COPIER.get() {
        // A forked child may have the socket too, so it is shut down and not only closed.
        sys::shut_down(copier);
        while receive(0).is_some() {}
    }
    fds::COPIER.close();
    OFFERED.store(0, Ordering::Relaxed);
    prefault_ahead::is_over();
}

/// Offers the copied-out content to the copier, so that the copier restores it. If the copier
/// cannot restore this content, closes the connection. Also records in the counters whether any
/// copier could restore this process, for the controller.
pub fn offer(pool: &StagingPool, vram_bytes: u64) {
    let summary = summary(MemoryPlace::Pool);
    if let Some(page) = process::page() {
        page.note(ProcessFlags::NO_COPIER, summary.is_none() || pool.is_sparse());
    }
    // A copier cannot restore content that was skipped in the pool, or is not in the pool's file.
    let offered = summary
        .filter(|_| !pool.leaves_out() && !pool.is_shared())
        .and_then(|summary| announce_copied_out(pool, summary, is_off, vram_bytes));
    match offered {
        Some(()) => OFFERED.store(1, Ordering::Relaxed),
        None => hang_up(),
    }
}

/// Reports to the copier that the driver has checkpointed the process. From now on each message of
/// the copier wakes the agent (the thread of this library that handles such messages).
pub fn announce_offloaded() {
    if let Some(copier) = fds::COPIER.get() {
        let _ = sys::notify(copier, sys::gettid(), sys::SIGURG);
    }
    send(ToCopier::Checkpointed, None);
}

/// Whether the agent has more urgent work than the copier's messages: a caller waits at the gate,
/// or a message of the controller has arrived.
fn is_wanted() -> bool {
    process::page().is_some_and(CounterPage::has_waiters)
        || fds::SOCKET.get().is_some_and(|socket| task::wait_readable(socket, 0))
}

/// Handles the next message of the copier while the process is offloaded. True: a message was
/// handled, and there may be more.
pub fn recv() -> bool {
    let Some((message, file)) = receive(0) else {
        return false;
    };
    match (message, file) {
        (FromCopier::Same { chunk }, file) => {
            let taken = file.is_some_and(|file| {
                with_pool(|pool| pool.share(chunk as usize, file.number(), is_wanted))
            });
            if send(ToCopier::Mapped { chunk, taken }, None).is_none() {
                // The copier still expects the content in the chunk, so it could not restore the
                // process.
                hang_up();
            }
        }
        // The message is too late to be used.
        (FromCopier::Ready, None) => {}
        _ => hang_up(),
    }
    true
}

/// Reports to the copier that the driver now restores the process.
pub fn announce_restore() {
    send(ToCopier::Restoring, None);
}

/// Receives the copier's next message, if one has arrived. Returns whether it is Ready, which means
/// that the copier can copy out.
pub(super) fn has_said_ready() -> bool {
    matches!(receive(0), Some((FromCopier::Ready, None)))
}

/// Sends the descriptor of the next exported piece to the copier. While the socket is full, waits
/// until `end_us` at most. `None`: the descriptor was not sent.
pub(super) fn send_piece(shared: i32, end_us: u64) -> Option<()> {
    const PAUSE_US: u64 = 200;
    loop {
        match sys::send(fds::COPIER.get()?, &ToCopier::CopyOut.encode(), Some(shared)) {
            Ok(_) => return Some(()),
            Err(sys::EAGAIN | sys::ETOOMANYREFS) if sys::now_us() < end_us => {
                sys::sleep_us(PAUSE_US);
            }
            Err(_) => return None,
        }
    }
}

/// Waits until the copier has copied all exported memory. False: the copier has failed or is too
/// slow, or a caller waits at the gate. For the caller it is faster to map the memory again than to
/// wait for the copy.
pub(super) fn has_copied(bytes: u64) -> bool {
    const SLICE_MS: u64 = 10;
    const ALMOST_MS: u64 = 500;
    let start_ms = sys::now_us() / 1_000;
    let copied = loop {
        let waited_ms = (sys::now_us() / 1_000).saturating_sub(start_ms);
        let wanted = process::page().is_some_and(CounterPage::has_waiters);
        let over = waited_ms >= BLOCK_WITHIN_MS + bytes / BYTES_A_MS;
        let Some(copier) = fds::COPIER.get() else { break None };
        if over || (wanted && waited_ms >= ALMOST_MS) || task::wait_readable(copier, SLICE_MS) {
            break receive(0);
        }
    };
    let copied = matches!(copied, Some((FromCopier::Copied, None)));
    OFFERED.store(u32::from(copied), Ordering::Relaxed);
    copied
}

/// Sends a message to the copier. First checks that the stored descriptor is still the copier's
/// socket.
fn send(message: ToCopier, descriptor: Option<i32>) -> Option<()> {
    sys::send(fds::COPIER.get()?, &message.encode(), descriptor).ok().map(drop)
}

/// Asks the copier to register the staging pool, which has no content yet. `None`: the message was
/// not sent.
pub(super) fn announce_prefault(pool: &StagingPool, bytes: u64) -> Option<()> {
    let (.., device) = summary(MemoryPlace::Device)?;
    send(ToCopier::Prefaulted { bytes, uuid: uuid_of(device)? }, Some(pool.file()?))
}

fn uuid_of(device: i32) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    (call!(device_get_uuid(&raw mut uuid, device)) == result::SUCCESS).then_some(uuid)
}

/// Sends the copier the list of pieces for which `which` is true. Their content is in the staging
/// pool, or will be there soon. `None`: a message was not sent.
pub(super) fn announce_copied_out(
    pool: &StagingPool,
    (pieces, bytes, device): Summary,
    which: fn(&AllocationPiece) -> bool,
    vram_bytes: u64,
) -> Option<()> {
    fds::COPIER.get()?;
    let file = pool.file()?;
    let uuid = uuid_of(device)?;
    let rest_bytes = vram_bytes.saturating_sub(bytes);
    // The copier already has the file if the process was prefaulted.
    let file = Some(file).filter(|_| !prefault_ahead::is_told());
    send(ToCopier::CopiedOut { bytes, rest_bytes, pieces, uuid }, file)?;
    let (mut many, mut words) = (0, [0; PIECES_A_FRAME]);
    let mut order = AllocationLayout::of(which)?;
    for place in 0.. {
        let Some((_, piece)) = order.piece(place) else { break };
        if many == PIECES_A_FRAME {
            send(ToCopier::Chunks { many: many as u32, words }, None)?;
            many = 0;
        }
        let rdma = piece.property.gpu_direct_rdma == 1;
        *words.get_mut(many)? = Wire { bytes: piece.bytes, rdma }.word()?;
        many += 1;
    }
    send(ToCopier::Chunks { many: many as u32, words }, None)
}

fn is_off(piece: &AllocationPiece) -> bool {
    piece.place == MemoryPlace::Pool
}

/// Summary of the pieces that a copier is to copy: their number, their total bytes, and their
/// device.
pub(super) type Summary = (u32, u64, i32);

/// Returns the summary of the pieces whose content is at `place`. `None`: a copier cannot create
/// such memory. For a copier, the pieces must be contiguous in the staging pool, on one device and
/// without special properties. Their number and their mean size must be within the protocol's
/// limits.
///
/// The application must also be unable to export the memory. The process imports what a copier
/// creates, and the driver does not export imported memory. Memory of `cuMemAlloc` meets this
/// condition: the application cannot export it, even if this library has created it as exportable.
/// Memory of `cuMemAlloc` that this library has exported stays on the device, so it is not among
/// these pieces.
pub(super) fn summary(place: MemoryPlace) -> Option<Summary> {
    let (mut many, mut end) = (0_u32, 0);
    let mut device = None;
    let mut order = match place {
        // Pieces that stay on the device are left out.
        MemoryPlace::Device => AllocationLayout::of(AllocationPiece::leaves)?,
        _ => AllocationLayout::of(|piece| piece.place != MemoryPlace::Device)?,
    };
    while let Some((id, piece)) = order.piece(many as usize) {
        let property = piece.property;
        let plain = MemAllocationProp {
            location_id: property.location_id,
            gpu_direct_rdma: property.gpu_direct_rdma,
            ..MemAllocationProp::default()
        };
        let handle_types = match id {
            AllocationId::Allocation(_) => 0,
            AllocationId::Block(_) => property.handle_types,
        };
        let kind = MemAllocationProp { kind: 0, location_type: 0, handle_types, ..property };
        let fits = piece.place == place
            && piece.offset == end
            && kind == plain
            && property.location_type == LOCATION_DEVICE
            && device.is_none_or(|known| known == property.location_id)
            && is_able(property.location_id);
        if !fits {
            return None;
        }
        device = Some(property.location_id);
        many += 1;
        end += piece.bytes;
    }
    let large = end / u64::from(many.max(1)) >= MIN_MEAN_BYTES;
    (large && many as usize <= MAX_PIECES).then_some((many, end, device?))
}

/// Imports all memory that the copier has filled. False: the import failed, and the content is
/// still in the staging pool.
pub fn import_from_copier() -> bool {
    if OFFERED.load(Ordering::Relaxed) == 0 {
        // A process whose offload was cancelled before its checkpoint has offered nothing, so there
        // is nothing to import.
        hang_up();
        return false;
    }
    let all = take_all().is_some();
    hang_up();
    let mapped = |piece: &AllocationPiece| piece.place == MemoryPlace::Mapped;
    each(mapped, |id, piece| {
        if all {
            record_progress(id, piece.handle, MemoryPlace::Device);
        } else if unback(piece) {
            record_progress(id, 0, MemoryPlace::Pool);
        }
        result::SUCCESS
    });
    all
}

fn take_all() -> Option<()> {
    send(ToCopier::Restored, None)?;
    loop {
        match receive(BEGIN_WITHIN_MS)?.0 {
            FromCopier::Begin => break,
            // The message is too late to be used.
            FromCopier::Ready | FromCopier::Same { .. } => {}
            _ => return None,
        }
    }
    let mut order = AllocationLayout::of(is_off)?;
    let mut index = 0;
    loop {
        let piece = order.piece(index as usize);
        let bytes = piece.map_or(0, |(_, piece)| piece.bytes);
        match (receive(BLOCK_WITHIN_MS + bytes / BYTES_A_MS)?, piece) {
            ((FromCopier::Block { index: which }, Some(handle)), Some((id, piece)))
                if which == index =>
            {
                import(id, &piece, &handle)?;
                index += 1;
            }
            ((FromCopier::Filled, None), None) => return Some(()),
            _ => return None,
        }
    }
}

fn receive(within_ms: u64) -> Option<(FromCopier, Option<Descriptor>)> {
    if !task::wait_readable(fds::COPIER.get()?, within_ms) {
        return None;
    }
    let mut frame = [0; FRAME_BYTES];
    match sys::receive(fds::COPIER.get()?, &mut frame) {
        Ok((bytes, descriptor)) if bytes == frame.len() => {
            FromCopier::decode(&frame).ok().map(|message| (message, descriptor))
        }
        _ => None,
    }
}

fn import(id: AllocationId, piece: &AllocationPiece, shared: &Descriptor) -> Option<()> {
    let mut handle = 0;
    let number = usize::try_from(shared.number()).ok()?;
    let code = call!(mem_import(&raw mut handle, number, POSIX_DESCRIPTOR));
    let piece = AllocationPiece { imported: true, ..*piece };
    if code != result::SUCCESS || map(&piece, handle).is_err() {
        return None;
    }
    let noted = tables(|tables| {
        tables.piece(id).map(|known| {
            (known.handle, known.place, known.imported) = (handle, MemoryPlace::Mapped, true);
        })
    });
    if noted.is_none() {
        // The piece is in no table, so no later step would undo the mapping.
        unback(&AllocationPiece { handle, ..piece });
    }
    noted
}

#[cfg(test)]
mod tests;
