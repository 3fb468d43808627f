//! Offload through a copier (a separate process that copies VRAM for others). This process exports
//! its memory and is checkpointed by the driver. Meanwhile the copier copies the content to the
//! staging pool, which the copier has registered before.
//!
//! ```text
//! Device ──copied to new memory, if it cannot be exported──> exported, sent, unmapped, released
//!   ^                                                                       │
//!   │                                                                       v
//!   └── imported by its own descriptor, mapped ──any failure── Handed ──the copier sends Copied──> Pool
//! ```
//!
//! Until the copier reports Copied, the content is in device memory of which this process has a
//! descriptor. So the content survives the end of the copier and of the controller. A pool to which
//! the copier may still be writing is not used again.

use affinode_cuda_sys::{POSIX_DESCRIPTOR, result};

use super::allocations::{AllocationId, AllocationPiece, MemoryPlace};
use super::backing::{back, map, unback};
use super::contexts::in_context;
use super::copy::{as_result, each, record_progress, update_counters};
use super::driver::{self, call};
use super::layout::AllocationLayout;
use super::staging::StagingPool;
use super::{copier_restore, is_in_use, tables, with_pool};
use crate::fds::TrackedFd;
use crate::sys::{self, Descriptor, datagram};

/// Time limit, in microseconds, for the copier to receive the exported descriptors.
const WITHIN_US: u64 = 4_000_000;

/// Number of bytes that were exported to the copier and are not copied yet. Their content is only
/// in the exported memory.
pub fn bytes() -> u64 {
    if is_in_use() { tables(|tables| tables.bytes(is_exported)) } else { 0 }
}

fn is_exported(piece: &AllocationPiece) -> bool {
    piece.place == MemoryPlace::Handed
}

/// Exports to the copier all memory that this offload removes from the device. False: the export
/// failed, and all memory is on the device as before.
///
/// # Errors
/// Returns the driver's code if exported memory could not be mapped again. Some of the memory then
/// stays exported, and the connection to the copier is closed.
pub fn export_to_copier(pool: &mut StagingPool, vram_bytes: u64) -> Result<bool, u32> {
    // The copier needs all pages of the pool: end the prefault.
    pool.end();
    if export_all(pool, vram_bytes).is_some() {
        return Ok(true);
    }
    copier_restore::hang_up();
    pool.taint();
    take_back().map(|()| false)
}

fn export_all(pool: &StagingPool, vram_bytes: u64) -> Option<()> {
    let mut order = AllocationLayout::of(AllocationPiece::leaves)?;
    let summary = copier_restore::summary(MemoryPlace::Device)?;
    let many = summary.0 as usize;
    // The exported descriptors are in the application's table until the copier has finished, so use
    // at most a quarter of the table.
    (many <= sys::descriptor_limit() / 4).then_some(())?;
    copier_restore::announce_copied_out(pool, summary, AllocationPiece::leaves, vram_bytes)?;
    // The controller's pause of allocations ends only a little later than this deadline.
    let end_us = sys::now_us() + WITHIN_US;
    for place in 0..many {
        let (id, piece) = order.piece(place)?;
        hand(id, &piece, end_us)?;
    }
    Some(())
}

fn hand(id: AllocationId, piece: &AllocationPiece, end_us: u64) -> Option<()> {
    (sys::now_us() < end_us).then_some(())?;
    let exportable =
        !piece.imported && piece.property.handle_types & POSIX_DESCRIPTOR == POSIX_DESCRIPTOR;
    let handed = if exportable { piece.handle } else { copy(piece)? };
    let sent = export(handed).and_then(|shared| {
        let owned = TrackedFd::note(shared.number())?;
        copier_restore::send_piece(shared.number(), end_us)?;
        Some((shared, owned))
    });
    // Unmap the piece only once its descriptor was sent to the copier. Until then a failure changes
    // nothing.
    let gone = sent.is_some() && unback(piece);
    if !exportable {
        // From now on only the descriptor keeps the memory alive.
        call!(mem_release(handed));
    }
    let (shared, owned) = sent.filter(|_| gone)?;
    shared.take();
    tables(|tables| {
        let piece = tables.piece(id)?;
        (piece.shared, piece.place) = (Some(owned), MemoryPlace::Handed);
        Some(())
    })
}

fn export(handle: u64) -> Option<Descriptor> {
    let mut fd = -1_i32;
    let code = call!(mem_export((&raw mut fd).cast(), handle, POSIX_DESCRIPTOR, 0));
    datagram::made(fd).filter(|_| code == result::SUCCESS).map(Descriptor::lifted)
}

/// Copies a piece to new, exportable memory on the device, and returns the handle of the new
/// memory. The copy is needed because the driver cannot export memory that was imported, or that
/// was created without a handle type for exports.
fn copy(piece: &AllocationPiece) -> Option<u64> {
    let bytes = piece.bytes as usize;
    let mut property = piece.property;
    property.handle_types |= POSIX_DESCRIPTOR;
    let mut aside = AllocationPiece { property, address: 0, imported: false, ..*piece };
    let code = call!(mem_address_reserve(&raw mut aside.address, bytes, 0, 0, 0));
    (code == result::SUCCESS).then_some(())?;
    let made = back(&aside).ok();
    let copied = made.filter(|_| copy_across(aside.address, piece) == result::SUCCESS);
    if let Some(handle) = made {
        call!(mem_unmap(aside.address, bytes));
        if copied.is_none() {
            call!(mem_release(handle));
        }
    }
    call!(mem_address_free(aside.address, bytes));
    copied
}

fn copy_across(to: u64, piece: &AllocationPiece) -> u32 {
    const NON_BLOCKING: u32 = 1;
    let Some(copy) = driver::copy_across() else {
        return result::NOT_SUPPORTED;
    };
    in_context(piece.context, || {
        let mut stream = core::ptr::null_mut();
        match call!(stream_create(&raw mut stream, NON_BLOCKING)) {
            result::SUCCESS => {}
            code => return code,
        }
        // SAFETY: both ranges are mapped with this size, and nothing else uses them now.
        let begun = unsafe { copy(to, piece.address, piece.bytes as usize, stream) };
        let ended = call!(stream_synchronize(stream));
        call!(stream_destroy(stream));
        if begun == result::SUCCESS { ended } else { begun }
    })
}

/// Waits until the copier has copied all exported memory to the staging pool. False: the copier has
/// failed or was too slow.
pub fn settle() -> bool {
    let bytes = bytes();
    if bytes == 0 {
        return true;
    }
    if !copier_restore::has_copied(bytes) {
        leave();
        return false;
    }
    each(is_exported, |id, piece| {
        piece.shared.into_iter().for_each(TrackedFd::close);
        put(id, 0, MemoryPlace::Pool);
        result::SUCCESS
    });
    update_counters();
    true
}

/// Closes the connection to the copier, and marks the staging pool as unusable, because the copier
/// may still write to it.
fn leave() {
    copier_restore::hang_up();
    with_pool(StagingPool::taint);
}

/// Maps the memory that was exported to the copier into this process again. Does nothing if the
/// copier has copied all of it.
///
/// # Errors
/// Returns the driver's error code. The memory stays exported, and the call can be repeated.
pub fn restore_from_copier() -> Result<(), u32> {
    if bytes() == 0 {
        return Ok(());
    }
    leave();
    take_back()
}

fn take_back() -> Result<(), u32> {
    let code = each(is_exported, |id, piece| {
        let Some(shared) = piece.shared.and_then(|shared| shared.get()) else {
            return result::INVALID_VALUE;
        };
        let mut handle = 0;
        match call!(mem_import(&raw mut handle, shared as usize, POSIX_DESCRIPTOR)) {
            result::SUCCESS => {}
            code => return code,
        }
        // Treat the piece as memory that a copier created: it is unknown whether the driver can
        // restore a checkpoint of a process with such memory.
        if let Err(code) = map(&AllocationPiece { imported: true, ..*piece }, handle) {
            return code;
        }
        sys::close(shared);
        put(id, handle, MemoryPlace::Device);
        tables(|tables| tables.piece(id).map(|piece| piece.imported = true));
        result::SUCCESS
    });
    update_counters();
    as_result(code)
}

fn put(id: AllocationId, handle: u64, place: MemoryPlace) {
    record_progress(id, handle, place);
    tables(|tables| tables.piece(id).map(|piece| piece.shared = None));
}

#[cfg(test)]
mod tests;
