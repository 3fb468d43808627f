//! Copies content from the staging pool back to device memory.
//!
//! ```text
//! create, map, start to copy each ──> all copied? ──> done
//!  │ no VRAM                           │ any failure: all is unmapped and released;
//!  │ (waits for it if ordered)         │ what cannot be unmapped is filled next time
//!  └───────────────────────────────────┴─> again; the content is in the pool
//! ```

use affinode_cuda_sys::result;

use super::allocations::{AllocationId, AllocationPiece, MemoryPlace};
use super::backing::{back, unback};
use super::copy::{
    CopyStreams, as_result, each, is_copied_out, record_progress, relax_captures, update_counters,
    update_kept_counter,
};
use super::driver::call;
use super::prefault::CHUNK_BYTES;
use super::staging::StagingPool;
use super::{
    checksum, copier_offload, copier_restore, disk, disk_restore, local_memory, tables, with_pool,
};
use crate::sys;

/// Copies all copied-out content back to device memory, at the same addresses as before. If VRAM is
/// short, waits until the time `awaits_vram_until_us`, because another process is freeing it. `None`:
/// does not wait.
///
/// # Errors
/// Returns the driver's code, in most cases because VRAM is short. Nothing is lost, and the call
/// can be repeated.
pub fn copy_in(awaits_vram_until_us: Option<u64>) -> Result<(), u32> {
    if !is_copied_out() {
        return Ok(());
    }
    copy_in_unverified(awaits_vram_until_us)?;
    // Compare only after all content is copied in, because the device computes the digests.
    checksum::look();
    // Until now the lists must show which content is not in the pool.
    with_pool(disk::finish);
    Ok(())
}

/// Copies all copied-out content back, and does not verify it.
pub(super) fn copy_in_unverified(awaits_vram_until_us: Option<u64>) -> Result<(), u32> {
    relax_captures();
    // A chunk that is being stored is still in memory.
    disk::cancel();
    let wait = VramWait { until_us: awaits_vram_until_us };
    let copied =
        with_pool(|_| wait.retry(local_memory::restore)).and_then(|()| copy_in_content(&wait));
    if copied.is_err() {
        // The next attempt may be much later. Until then nothing may stay on the device.
        with_pool(|_| local_memory::release());
    }
    copied
}

fn copy_in_content(wait: &VramWait) -> Result<(), u32> {
    // First map the exported memory: its content is still on the device.
    copier_offload::restore_from_copier()?;
    let returned = if copier_restore::import_from_copier() {
        update_counters();
        Ok(())
    } else {
        copy_to_device(wait)
    };
    update_kept_counter(with_pool(|pool| pool.kept_bytes()));
    returned
}

fn copy_to_device(wait: &VramWait) -> Result<(), u32> {
    with_pool(|pool| {
        let mut copies = CopyStreams::new();
        let is_copied = |piece: &AllocationPiece| piece.place != MemoryPlace::Device;
        let begun =
            as_result(each(is_copied, |id, piece| fill((pool, wait), &mut copies, id, piece)))
                .and_then(|()| match disk::has_any() {
                    true => disk_restore::fill(pool, &mut copies),
                    false => Ok(()),
                });
        // Wait also after a failure: no copy may still run when the memory is unmapped again.
        let finished = copies.finish();
        let copied = begun.and(finished);
        each(
            |piece| piece.place == MemoryPlace::Mapped,
            |id, piece| {
                if copied.is_ok() {
                    record_progress(id, piece.handle, MemoryPlace::Device);
                } else if unback(piece) {
                    record_progress(id, 0, MemoryPlace::Pool);
                }
                result::SUCCESS
            },
        );
        update_counters();
        copied
    })
}

/// Maps new physical memory at a piece's addresses and starts to copy the content into it. Does not
/// wait for the copy, so that the caller can map the next piece meanwhile.
fn fill(
    (pool, wait): (&mut StagingPool, &VramWait),
    copies: &mut CopyStreams,
    id: AllocationId,
    piece: &AllocationPiece,
) -> u32 {
    if piece.place == MemoryPlace::Mapped {
        return fill_from_host(pool, copies, piece);
    }
    match wait.retry(|| back(piece)) {
        Ok(handle) => {
            record_progress(id, handle, MemoryPlace::Mapped);
            tables(|tables| tables.piece(id).map(|piece| piece.imported = false));
            fill_from_host(pool, copies, piece)
        }
        Err(code) => code,
    }
}

/// Starts to fill a piece of device memory with its content from the staging pool, which is in host
/// memory. Parts that were skipped as zero are cleared on the device.
pub(super) fn fill_from_host(
    pool: &mut StagingPool,
    copies: &mut CopyStreams,
    piece: &AllocationPiece,
) -> u32 {
    let mut done = 0;
    while done < piece.bytes {
        let offset = (piece.offset + done) as usize;
        let left = (piece.bytes - done) as usize;
        // The driver refuses a copy that crosses the end of a registration, so a copy ends with its
        // chunk.
        let (is_zero, bytes) = pool.left_out(offset, left);
        let device = piece.address + done;
        let is_on_disk = disk::has(offset / CHUNK_BYTES);
        let code = copies.on_stream(piece.context, |stream| match is_zero {
            true => call!(clear(device, 0, bytes, stream)),
            // `disk_restore` copies it when all device memory is mapped.
            false if is_on_disk => result::SUCCESS,
            false => call!(copy_in(device, pool.held(offset).cast_const(), bytes, stream)),
        });
        if code != result::SUCCESS {
            return code;
        }
        done += bytes as u64;
    }
    result::SUCCESS
}

/// The wait of a copy in for VRAM that another process is freeing.
struct VramWait {
    /// Time from which no allocation is tried any more, in microseconds. `None`: each allocation is
    /// tried once, at any time.
    until_us: Option<u64>,
}

impl VramWait {
    /// Repeats an allocation while it fails because VRAM is short.
    fn retry<T>(&self, mut allocate: impl FnMut() -> Result<T, u32>) -> Result<T, u32> {
        const PAUSE_US: u64 = 500;
        let Some(until_us) = self.until_us else { return allocate() };
        // The time is checked before each attempt: this process may have been stopped before.
        while sys::now_us() < until_us {
            match allocate() {
                Err(result::OUT_OF_MEMORY) => sys::sleep_us(PAUSE_US),
                ended => return ended,
            }
        }
        Err(result::OUT_OF_MEMORY)
    }
}
