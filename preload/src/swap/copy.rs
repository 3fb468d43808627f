//! Copies device memory to host memory. The agent does this while the gate is closed and the GPU has
//! no work of the process. `copy_in` copies it back.
//!
//! ```text
//! copy out: begin the pool ──> copy pieces that are neither zero nor in the pool ────────> all copied?
//!                                │                                          └──> unmap, release
//!                                │ any failure: nothing was unmapped                 each
//!                                │ if a process waits for the VRAM (`early_release`): is host memory certain?
//!                                └──> unmap, release each as soon as it is copied
//! ```

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::result;
use affinode_proto::wire::ProcessFlags;
use affinode_proto::wire::message::CopyOptions;

use super::allocations::{AllocationId, AllocationPiece, MemoryPlace};
use super::backing::unback;
use super::contexts::in_context;
use super::digest::{self, DigestTable};
use super::driver::call;
use super::early_release::EarlyRelease;
use super::layout::AllocationLayout;
use super::prefault::{self, StagingPlace};
use super::staging::{StagingPool, StoredChunk, TrimResult};
use super::{
    SWAP, checksum, copier_offload, copier_restore, disk, driver, host_pressure, is_in_use,
    loader_lock, local_memory, prefault_ahead, prefault_host_pool, stream_pools, tables, with_pool,
    with_pool_if_free,
};
use crate::counters::CounterPage;
use crate::process;

/// Maximum number of contexts whose memory is copied. A process with more contexts cannot copy out.
/// The controller then orders a checkpoint by the driver, if the context need not stay.
const MAX_CONTEXTS: usize = 16;

/// Error of [`copy_out`]: other processes took the host memory that the copy needs. The driver does
/// not use this code.
pub const NO_HOST_MEMORY: u32 = 0xffff_0001;
/// Error of [`copy_out`]: the controller gave up the offload meanwhile. The driver does not use
/// this code.
pub const GIVEN_UP: u32 = 0xffff_0004;
/// Error of [`copy_out`]: another thread holds the dynamic loader's lock, and may itself wait at
/// the gate. The driver does not use this code.
pub const LOADER_HELD: u32 = affinode_proto::wire::message::BUSY_LOADER;

/// Error of `copy_in`: the disk does not return content that was moved there. The
/// driver does not use this code. The content may become readable again, so the process waits.
pub const DISK_UNREADABLE: u32 = affinode_proto::wire::message::DISK_UNREADABLE;

/// Whether a part of the process's memory is not on the device: content is in the staging pool or
/// exported, or the local memory of a context is released.
pub fn is_copied_out() -> bool {
    let in_pool = |piece: &AllocationPiece| piece.place != MemoryPlace::Device;
    is_in_use()
        && (local_memory::is_released()
            || tables(|tables| tables.next(AllocationId::FIRST, in_pool).is_some()))
}

/// Copies all swappable memory to host memory and frees it on the device.
///
/// If `how.keep` is true, the copy is retained after the restore, and content that is unchanged
/// since the last copy is not copied again. If `how.check` is true, the restore verifies checksums.
/// `handed` is `Some` if a checkpoint by the driver follows, during which a copier may copy the
/// memory. Its value is the process's VRAM in bytes.
///
/// # Errors
/// Returns the driver's code, [`NO_HOST_MEMORY`], [`GIVEN_UP`] or [`LOADER_HELD`]. All memory is on
/// the device as before, with two exceptions: memory that was exported to a copier and could not be
/// mapped again, and memory that was freed early before the driver failed or host memory became short.
/// The content of the latter is in the staging pool.
pub fn copy_out(how: CopyOptions, handed: Option<u64>) -> Result<(), u32> {
    if !is_in_use() {
        return Ok(());
    }
    if is_copied_out() {
        // The pool has content, which must be copied in first.
        return Err(result::NOT_SUPPORTED);
    }
    relax_captures();
    // Release unused memory of stream pools, because it is in no table and would stay on the
    // device.
    stream_pools::clear();
    checksum::set(how.check);
    with_pool(|pool| copy_to_host(pool, how, handed))
}

fn copy_to_host(pool: &mut StagingPool, how: CopyOptions, handed: Option<u64>) -> Result<(), u32> {
    // Content of an earlier offload that could not be restored is lost with its context.
    disk::cancel();
    disk::finish(pool);
    // The copy-out assigns new offsets and begins the pool itself.
    prefault_ahead::stop(pool);
    prefault_host_pool::is_used_up(pool);
    let Some((bytes, context)) = assign() else {
        return Err(result::OUT_OF_MEMORY);
    };
    SWAP.unchanged_bytes.store(0, Ordering::Relaxed);
    SWAP.zero_bytes.store(0, Ordering::Relaxed);
    if bytes == 0 {
        return Ok(());
    }
    if !loader_lock::load_ahead(context) {
        return Err(LOADER_HELD);
    }
    let place = if how.host_pool { StagingPlace::HostPool } else { StagingPlace::Own };
    let no_memory = match place {
        StagingPlace::HostPool => NO_HOST_MEMORY,
        StagingPlace::Own => result::OUT_OF_MEMORY,
    };
    if !pool.begin(bytes, context, place) {
        return Err(no_memory);
    }
    pool.set_keeps(how.keep);
    // Compute the digests before the first copy, because they decide which content is copied and
    // which zero pages are skipped.
    let mut found = digest::of(bytes, AllocationPiece::leaves);
    let zero_bytes = found.as_mut().map_or(0, |found| pool.leave_out(found));
    // The copier copies all content. So it is used only if most of the content is new and no zero
    // page is skipped.
    let handed = handed.filter(|_| {
        let all_new = zero_bytes == 0 && is_new(pool, found.as_ref(), bytes as u64);
        all_new && prefault_ahead::is_ready(bytes as u64)
    });
    if let Some(vram_bytes) = handed
        && copier_offload::export_to_copier(pool, vram_bytes)?
    {
        // If the copier fails to copy the content, the pool is marked and not used again.
        pool.learn(found.unwrap_or(DigestTable::none()));
        update_kept_counter(0);
        local_memory::release();
        update_counters();
        return Ok(());
    }
    // The copier was tried and failed. It may still write to the pool, so begin a new one.
    if pool.is_tainted() && !pool.begin(bytes, context, place) {
        return Err(no_memory);
    }
    let unchanged_bytes = found.as_ref().map_or(0, |found| pool.unchanged(found));
    let new_bytes = (bytes as u64).saturating_sub(zero_bytes.saturating_add(unchanged_bytes));
    let out = CopyOutProgress {
        pool: &mut *pool,
        copies: CopyStreams::new(),
        found,
        unchanged_bytes: 0,
        release: EarlyRelease::new(how.release_early, bytes as u64, new_bytes),
    };
    out.copy_all(place)?;
    if place == StagingPlace::HostPool {
        pool.free_behind_content();
    }
    SWAP.zero_bytes.store(zero_bytes, Ordering::Relaxed);
    // The pool is in use now, so no part of it counts as retained.
    update_kept_counter(0);
    give_back();
    local_memory::release();
    Ok(())
}

/// Whether less than half of the content is in the staging pool already. Content without a known
/// digest counts as new.
fn is_new(pool: &StagingPool, found: Option<&DigestTable>, bytes: u64) -> bool {
    found.is_none_or(|found| pool.unchanged(found) < bytes / 2)
}

/// Sets the calling thread to the relaxed capture mode. Its later calls then do not invalidate
/// another thread's capture of a stream.
pub(super) fn relax_captures() {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    driver::exchange_capture_mode(&mut mode);
}

/// Assigns an offset in the staging pool to each piece that leaves the device. Returns the total
/// bytes of these pieces and one of their contexts. `None`: there is no memory for the list by
/// which the pieces are sorted.
pub(super) fn assign() -> Option<(usize, usize)> {
    tables(|tables| {
        let mut from = AllocationId::FIRST;
        while let Some((id, piece)) = tables.next(from, |_| true) {
            from = id.next();
            piece.has_left = piece.leaves();
        }
        let mut order = AllocationLayout::within(tables, |piece| piece.has_left)?;
        let (mut place, mut end, mut context) = (0, 0, 0);
        while let Some(piece) = order.id(place).and_then(|id| tables.piece(id)) {
            piece.offset = end;
            end += piece.bytes;
            context = piece.context;
            place += 1;
        }
        Some((end as usize, context))
    })
}

/// Calls `body` for each piece for which `which` is true, until a call fails. Returns the code of
/// the failed call, or success. Looks up the pieces one by one, so that no lock is held during a
/// call into the driver.
pub(super) fn each(
    which: impl Fn(&AllocationPiece) -> bool,
    mut body: impl FnMut(AllocationId, &AllocationPiece) -> u32,
) -> u32 {
    let mut from = AllocationId::FIRST;
    let next = |from| tables(|tables| tables.next(from, &which).map(|(id, piece)| (id, *piece)));
    while let Some((id, piece)) = next(from) {
        match body(id, &piece) {
            result::SUCCESS => from = id.next(),
            code => return code,
        }
    }
    result::SUCCESS
}

pub(super) fn record_progress(id: AllocationId, handle: u64, place: MemoryPlace) {
    tables(|tables| {
        if let Some(piece) = tables.piece(id) {
            (piece.handle, piece.place) = (handle, place);
        }
    });
}

/// Whether the process may hold device memory that it imported, for example from a copier.
pub fn holds_imported() -> bool {
    let on_device =
        |piece: &AllocationPiece| matches!(piece.place, MemoryPlace::Device | MemoryPlace::Mapped);
    let is_imported = |piece: &AllocationPiece| piece.imported && on_device(piece);
    is_in_use()
        && (SWAP.strayed.load(Ordering::Acquire) == 1
            || tables(|tables| {
                tables.next(AllocationId::FIRST, is_imported).is_some()
                    || tables.cache.holds_imported()
            }))
}

/// Returns the error for a copy out that was cancelled, or for which host memory is short.
fn cancelled() -> u32 {
    let is_given_up = |page: &CounterPage| page.is_turned_back() && page.is_not_wanted();
    if process::page().is_some_and(is_given_up) { GIVEN_UP } else { NO_HOST_MEMORY }
}

/// State of a copy out in progress: staging pool, streams, digests, and released memory.
struct CopyOutProgress<'a> {
    pool: &'a mut StagingPool,
    copies: CopyStreams,
    found: Option<DigestTable>,
    unchanged_bytes: u64,
    release: EarlyRelease,
}

impl CopyOutProgress<'_> {
    /// Copies all pieces, and waits until the copies have ended.
    fn copy_all(mut self, place: StagingPlace) -> Result<(), u32> {
        // Before memory may be released, create all streams: later this must not fail any more.
        let needs_stream = |piece: &AllocationPiece| self.release.is_on() && piece.leaves();
        let created = each(needs_stream, |_, piece| {
            self.copies.on_stream(piece.context, |_| result::SUCCESS)
        });
        let copied = as_result(created)
            .and_then(|()| {
                as_result(each(AllocationPiece::leaves, |id, piece| self.copy(id, piece)))
            })
            .and_then(|()| as_result(self.release.finish()));
        let CopyOutProgress { pool, copies, found, unchanged_bytes, release } = self;
        let has_released = release.has_released();
        drop(release);
        // Wait also after a failure: no copy may still run when the pool or the memory is freed.
        let finished = copies.finish();
        pool.end();
        let ended = copied.and(finished);
        // Without digests, nothing is known of the pool's content from now on, even of parts that
        // were not copied.
        let found = found.unwrap_or(DigestTable::none());
        match ended {
            Ok(()) => {
                pool.learn(found);
                SWAP.unchanged_bytes.store(unchanged_bytes, Ordering::Relaxed);
            }
            Err(_) if has_released => {
                // The process is partly copied out. The pool has no content for the other pieces.
                pool.learn(found);
                each(AllocationPiece::leaves, |_, piece| {
                    pool.forget(piece.offset as usize, piece.bytes as usize);
                    result::SUCCESS
                });
                update_kept_counter(0);
                update_counters();
            }
            Err(code) => {
                // After GIVEN_UP the pages stay for the next offload, unless host memory is short
                // too.
                let is_short = || code == GIVEN_UP && host_pressure::is_critical(0, place);
                if code == NO_HOST_MEMORY || is_short() {
                    pool.give_back_unused();
                }
                update_kept_counter(pool.kept_bytes());
            }
        }
        ended
    }

    /// Starts to copy a piece to the staging pool, without the parts that are zero or that the pool
    /// contains already. Returns the driver's code, [`NO_HOST_MEMORY`] or [`GIVEN_UP`].
    fn copy(&mut self, id: AllocationId, piece: &AllocationPiece) -> u32 {
        let (mut done, mut copied_bytes) = (0, 0);
        while done < piece.bytes {
            let offset = (piece.offset + done) as usize;
            let left = (piece.bytes - done) as usize;
            let (stored, bytes) = self.pool.stored(offset, left, self.found.as_ref());
            match stored {
                StoredChunk::Nowhere => {}
                StoredChunk::Already => self.unchanged_bytes += bytes as u64,
                StoredChunk::Anew => {
                    if prefault::is_turned_back() && !self.release.has_begun() {
                        return cancelled();
                    }
                    self.pool.forget(offset, bytes);
                    let device = piece.address + done;
                    let Some(host) = self.pool.ready(offset) else { return cancelled() };
                    let code = self.copies.on_stream(piece.context, |stream| {
                        call!(copy_out(host, device, bytes, stream))
                    });
                    if code != result::SUCCESS {
                        return code;
                    }
                    copied_bytes += bytes as u64;
                }
            }
            done += bytes as u64;
        }
        self.release.submitted(&mut self.copies, (id, piece), copied_bytes)
    }
}

pub(super) fn as_result(code: u32) -> Result<(), u32> {
    if code == result::SUCCESS { Ok(()) } else { Err(code) }
}

/// Frees the device memory of all pieces whose content was copied out. A piece that cannot be
/// unmapped stays on the device.
fn give_back() {
    each(AllocationPiece::leaves, |id, piece| {
        if unback(piece) {
            record_progress(id, 0, MemoryPlace::Pool);
        }
        result::SUCCESS
    });
    update_counters();
}

/// Updates the process's counters: the copied-out bytes, and whether memory is imported from a
/// copier or exported to it.
pub(super) fn update_counters() {
    let in_pool =
        |piece: &AllocationPiece| matches!(piece.place, MemoryPlace::Pool | MemoryPlace::Mapped);
    let bytes = tables(|tables| tables.bytes(in_pool));
    let imported = holds_imported();
    if let Some(page) = process::page() {
        page.copied_out_bytes.store(bytes, Ordering::Relaxed);
        page.note(ProcessFlags::IMPORTED, imported);
        page.note(ProcessFlags::EXPORTED_TO_COPIER, copier_offload::bytes() > 0);
    }
}

/// Whether the context of the copied-out memory is broken: whether a synchronisation of this
/// context returns the error `code`. Nothing runs on the GPU, so the driver returns at once.
pub fn is_broken(code: u32) -> bool {
    if !is_copied_out() {
        return false;
    }
    let context = tables(|tables| {
        tables
            .next(AllocationId::FIRST, |piece| piece.place != MemoryPlace::Device)
            .map(|(_, piece)| piece.context)
    });
    context.is_some_and(|context| in_context(context, || call!(ctx_synchronize())) == code)
}

/// Unregisters the staging pool from the driver before a checkpoint, and offers its content to the
/// copier. Each registered byte of host memory makes checkpoint and restore slower. This process
/// registers the pool again during the copy to the device, unless a copier has registered it
/// earlier.
pub fn release_copied_out(vram_bytes: u64) {
    if is_copied_out() {
        with_pool(|pool| {
            pool.unregister_all();
            if copier_offload::bytes() == 0 {
                copier_restore::offer(pool, vram_bytes);
            }
        });
    } else {
        prefault_host_pool::free();
    }
}

/// Frees a part of the staging pool, if the application runs and the pool is not in use. Frees no
/// memory if the pool is retained and host memory is sufficient.
///
/// If `all` is true, no memory is kept for the next offload.
pub fn tidy(all: bool) -> TrimResult {
    if !is_in_use() || is_copied_out() {
        return TrimResult::All;
    }
    disk::tidy();
    let tidy = |pool: &mut StagingPool| {
        if !all && !pool.is_tainted() && prefault_host_pool::keeps_pages() {
            return (TrimResult::Kept, pool.kept_bytes());
        }
        prefault_host_pool::end();
        let tidied = match all {
            true => pool.free_next(),
            false => pool.tidy(prefault_ahead::is_on(), host_pressure::is_near_in),
        };
        (tidied, pool.kept_bytes())
    };
    let Some((tidied, kept_bytes)) = with_pool_if_free(tidy) else {
        // Try again after the interval that applies to retained memory.
        return TrimResult::Kept;
    };
    update_kept_counter(kept_bytes);
    tidied
}

pub(super) fn update_kept_counter(bytes: u64) {
    if let Some(page) = process::page() {
        page.kept_bytes.store(bytes, Ordering::Relaxed);
    }
}

/// Streams on which copies are in progress: one stream per context, created on first use.
pub(super) struct CopyStreams {
    streams: [(usize, *mut c_void); MAX_CONTEXTS],
    many: usize,
}

impl CopyStreams {
    pub(super) fn new() -> CopyStreams {
        CopyStreams { streams: [(0, core::ptr::null_mut()); MAX_CONTEXTS], many: 0 }
    }

    pub(super) fn on_stream(
        &mut self,
        context: usize,
        body: impl FnOnce(*mut c_void) -> u32,
    ) -> u32 {
        in_context(context, || {
            const NON_BLOCKING: u32 = 1;
            let known = self.streams.iter().take(self.many).find(|known| known.0 == context);
            if let Some((_, stream)) = known {
                return body(*stream);
            }
            let mut stream = core::ptr::null_mut();
            let Some(free) = self.streams.get_mut(self.many) else {
                return result::NOT_SUPPORTED;
            };
            match call!(stream_create(&raw mut stream, NON_BLOCKING)) {
                result::SUCCESS => {}
                code => return code,
            }
            *free = (context, stream);
            self.many += 1;
            body(stream)
        })
    }

    /// Waits until all copies have ended. Returns the first error.
    pub(super) fn synchronize(&self) -> Result<(), u32> {
        self.streams.iter().take(self.many).try_for_each(|(context, stream)| {
            as_result(in_context(*context, || call!(stream_synchronize(*stream))))
        })
    }

    /// Waits until all copies have ended, and destroys their streams. Returns the first error.
    pub(super) fn finish(self) -> Result<(), u32> {
        let mut ended = Ok(());
        for (context, stream) in self.streams.into_iter().take(self.many) {
            let code = in_context(context, || {
                let code = call!(stream_synchronize(stream));
                call!(stream_destroy(stream));
                code
            });
            ended = ended.and(as_result(code));
        }
        ended
    }
}

#[cfg(test)]
mod tests;
