//! Stream-ordered memory: `cuMemAllocAsync`, its memory pools, and `cuMemFreeAsync`, which also
//! frees memory of `cuMemAlloc`.
//!
//! ```text
//! cuMemAllocAsync ─┬─ a piece that was freed in the same stream, or whose stream has finished
//!                  ├─ else a new one: addresses, physical memory, mapped
//!                  └─ else, or if the stream is captured, or below 2 MiB: the driver's pool
//! cuMemFreeAsync ──── an event in that stream; unused from now on
//! a wait for work, cuMemPoolTrimTo ── frees what has ended and is above the pool's threshold
//! out of memory ───────────────────── frees all that has ended; if nothing has, waits
//! copy out ────────────────────────── frees all that is unused; so does the end of its context
//! ```
//!
//! The driver keeps the pool itself and its settings, and makes the small allocations. This library
//! adds its own bytes to the sizes that the driver reports. A pool is swappable (its memory can be
//! copied by this library) if it is on one device, cannot be exported and has no size limit. It is
//! no longer swappable once another device gets access to it. Memory in a thread's default stream
//! is left to the driver, because no unique id is known for that stream. The driver may give freed
//! memory to a second stream before the first stream's work has ended, and let the second stream
//! wait. This library does not do that.
//!
//! | module | content |
//! | --- | --- |
//! | `cache` | unused memory, and its pools; calls no driver |
//! | `completion` | when work has ended, and what is freed then |
//! | `registry` | the functions about pools |
//! | `stream` | the streams that calls name |

mod cache;
mod completion;
mod registry;
mod stream;

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use affinode_cuda_sys::{MemAllocationProp, pool_attribute, result};

pub use self::cache::{CompletionMark, PoolCache};
use self::cache::{FreePiece, NO_STREAM, PieceRequest};
pub use self::completion::{abandon, clear, context_ends, end_marks, make_room, settle};
use self::completion::{attribute, forget, give_back_after, mark, relaxed, unsettle};
use self::registry::with_swappable;
pub use self::registry::{
    pool_create, pool_destroy, pool_get_attribute, pool_set_access, pool_set_attribute,
    pool_trim_to, unused_pool_bytes,
};
use self::stream::Stream;
use super::alloc_wrappers::{MIN_BYTES, make, unmake};
use super::allocations::{Allocation, AllocationPiece, AllocationTables};
use super::backing::{is_able, property_on};
use super::contexts::current_context;
use super::driver::call;
use super::{GRANULE_BYTES, SWAP, count, locked, tables};
use crate::hook_table;

pub unsafe extern "C" fn mem_alloc_async(
    address: *mut u64,
    bytes: usize,
    stream: *mut c_void,
) -> u32 {
    let ours = || allocate(bytes, None, Stream(stream));
    let driver = || call!(mem_alloc_async(address, bytes, stream));
    // SAFETY: the application's own place for the address.
    unsafe { serve(address, ours, driver) }
}

pub unsafe extern "C" fn mem_alloc_async_ptsz(
    address: *mut u64,
    bytes: usize,
    stream: *mut c_void,
) -> u32 {
    let ours = || allocate(bytes, None, Stream::per_thread(stream));
    let driver = || call!(mem_alloc_async_ptsz(address, bytes, stream));
    // SAFETY: the application's own place for the address.
    unsafe { serve(address, ours, driver) }
}

pub unsafe extern "C" fn mem_alloc_from_pool(
    address: *mut u64,
    bytes: usize,
    pool: usize,
    stream: *mut c_void,
) -> u32 {
    let ours = || allocate(bytes, Some(pool), Stream(stream));
    let driver = || call!(mem_alloc_from_pool(address, bytes, pool, stream));
    // SAFETY: the application's own place for the address.
    unsafe { serve(address, ours, driver) }
}

pub unsafe extern "C" fn mem_alloc_from_pool_ptsz(
    address: *mut u64,
    bytes: usize,
    pool: usize,
    stream: *mut c_void,
) -> u32 {
    let ours = || allocate(bytes, Some(pool), Stream::per_thread(stream));
    let driver = || call!(mem_alloc_from_pool_ptsz(address, bytes, pool, stream));
    // SAFETY: the application's own place for the address.
    unsafe { serve(address, ours, driver) }
}

/// Serves an allocation call of the application. If `ours` returns an address, this address is
/// written to the place `address`. If `ours` returns `None`, or `address` is null, `driver` is
/// called instead.
///
/// # Safety
/// `address` must be null, or a place for an address.
unsafe fn serve(
    address: *mut u64,
    ours: impl FnOnce() -> Option<u64>,
    driver: impl FnOnce() -> u32,
) -> u32 {
    if !address.is_null()
        && let Some(swappable) = ours()
    {
        // SAFETY: the function's `# Safety` guarantees this place.
        unsafe { address.write(swappable) };
        return result::SUCCESS;
    }
    driver()
}

/// Allocates memory of `pool`, or of the device's current pool if `pool` is `None`. Returns `None`
/// if the driver must allocate.
fn allocate(asked_bytes: usize, pool: Option<usize>, stream: Stream) -> Option<u64> {
    if asked_bytes < MIN_BYTES || SWAP.wanted.load(Ordering::Acquire) == 0 || stream.is_capturing()
    {
        return None;
    }
    let context = current_context().filter(|own| *own != 0 && stream.context() == Some(*own))?;
    let mut device = -1;
    if call!(ctx_get_device(&raw mut device)) != result::SUCCESS || !is_able(device) {
        return None;
    }
    let pool = pool.or_else(|| {
        let mut pool = 0;
        (call!(device_get_pool(&raw mut pool, device)) == result::SUCCESS).then_some(pool)
    })?;
    let want = PieceRequest {
        pool: 0,
        stream: stream.id()?,
        context,
        bytes: asked_bytes.checked_next_multiple_of(GRANULE_BYTES)? as u64,
        of_others: false,
    };
    let asked = Allocation {
        piece: AllocationPiece { context, ..AllocationPiece::default() },
        asked_bytes: asked_bytes as u64,
        ..Allocation::default()
    };
    let (number, taken) = with_swappable(pool, device, |tables, number| {
        (number, reuse(tables, &PieceRequest { pool: number, ..want }, asked))
    })?;
    let (want, asked) =
        (PieceRequest { pool: number, ..want }, Allocation { pool: number, ..asked });
    let taken = taken.or_else(|| reuse_of_others(pool, want, asked));
    let Allocation { piece, .. } = taken.or_else(|| make_anew(device, asked))?;
    count(piece.bytes as i64);
    Some(piece.address)
}

/// Serves an allocation with an unused piece that fits. `None`: no piece fits, or there is no
/// memory for an entry in the table of allocations.
fn reuse(
    tables: &mut AllocationTables,
    want: &PieceRequest,
    asked: Allocation,
) -> Option<Allocation> {
    let unused = tables.cache.take(want, asked.asked_bytes)?;
    let AllocationPiece { address, bytes, property, handle, imported, .. } = unused.piece;
    let context = asked.piece.context;
    let piece = AllocationPiece {
        address,
        bytes,
        property,
        handle,
        context,
        imported,
        ..AllocationPiece::default()
    };
    let allocation = Allocation { piece, pool: want.pool, mark: unused.mark, ..asked };
    if tables.insert(allocation) {
        return Some(allocation);
    }
    tables.cache.put(&allocation, unused);
    None
}

/// Same as [`reuse`], but with pieces that were freed in other streams and whose work has ended.
/// `None` also if the pool's attributes do not allow this.
fn reuse_of_others(pool: usize, want: PieceRequest, asked: Allocation) -> Option<Allocation> {
    let may = tables(|tables| tables.cache.has_of(want.pool))
        && attribute(pool, pool_attribute::REUSE_OPPORTUNISTIC).is_some_and(|may| may != 0);
    if !may {
        return None;
    }
    settle(false);
    tables(|tables| reuse(tables, &PieceRequest { of_others: true, ..want }, asked))
}

/// Serves an allocation with new memory. `None`: a step failed, or the pool is no longer swappable.
fn make_anew(device: i32, asked: Allocation) -> Option<Allocation> {
    // The driver does not let other devices on the bus reach memory of a pool.
    let property = MemAllocationProp { gpu_direct_rdma: 0, ..property_on(device) };
    let (bytes, context) = (asked.asked_bytes as usize, asked.piece.context);
    let piece = relaxed(|| make(bytes, property, context))?;
    let allocation = Allocation { piece, ..asked };
    let noted = tables(|tables| {
        // Another thread may meanwhile have given other devices access to the pool.
        let noted = tables.cache.can_copy(allocation.pool) && tables.insert(allocation);
        if noted {
            tables.cache.made(&allocation);
        }
        noted
    });
    if !noted {
        unmake(&piece);
    }
    noted.then_some(allocation)
}

pub unsafe extern "C" fn mem_free_async(address: u64, stream: *mut c_void) -> u32 {
    free(address, Stream(stream)).unwrap_or_else(|| call!(mem_free_async(address, stream)))
}

pub unsafe extern "C" fn mem_free_async_ptsz(address: u64, stream: *mut c_void) -> u32 {
    let freed = free(address, Stream::per_thread(stream));
    freed.unwrap_or_else(|| call!(mem_free_async_ptsz(address, stream)))
}

/// Removes an allocation from the table of allocations, because it is being freed. Then no other
/// thread can free it too. `context` is the context of the stream in which it is freed.
///
/// If the allocation's mark belongs to another context, this function also destroys the mark's
/// event. When that other context ends, only marks in the table are reset, and this mark is no
/// longer in the table.
fn take_out(address: u64, context: Option<usize>) -> Option<Allocation> {
    let is_own = |mark: CompletionMark| mark.event == 0 || Some(mark.context) == context;
    let taken = locked(|table| {
        let mark = table.at(address)?.mark;
        Some(if is_own(mark) { table.remove_at(address) } else { None })
    })?;
    taken.or_else(|| {
        relaxed(|| {
            SWAP.unused_lock.hold(|| {
                let mut allocation = locked(|table| table.remove_at(address))?;
                forget(core::mem::take(&mut allocation.mark));
                Some(allocation)
            })
        })
    })
}

/// Frees swappable memory once the stream's earlier work has ended. Returns the code for the
/// application. `None`: the driver must free the memory, because it is not swappable or the stream
/// is being captured.
fn free(address: u64, stream: Stream) -> Option<u32> {
    if stream.is_capturing() {
        return None;
    }
    let mut allocation = take_out(address, stream.context())?;
    let marked = mark(stream, allocation.mark);
    allocation.mark = marked.unwrap_or_default();
    if marked.is_none() {
        // Without an event, the thread must wait for the stream. If the stream is invalid, the wait
        // fails.
        match call!(stream_synchronize(stream.0)) {
            result::SUCCESS => {}
            code => {
                locked(|table| table.insert(allocation));
                return Some(code);
            }
        }
    }
    if !allocation.piece.stays {
        count(-(allocation.piece.bytes as i64));
    }
    take_back(&allocation, marked.map(|_| stream.id().unwrap_or(NO_STREAM)));
    if allocation.pool == 0 {
        settle(false);
    }
    Some(result::SUCCESS)
}

/// Stores an allocation in the cache of unused pieces, after the caller has removed it from the
/// table of allocations. The piece must not be used before the work in its stream up to the
/// allocation's mark has ended. `after` is the id of this stream. If `after` is `None`, this work
/// has ended already, so the piece can be used at once.
fn take_back(allocation: &Allocation, after: Option<u64>) {
    let Allocation { piece, mark, .. } = *allocation;
    // A piece to which something else refers must not be reused for another allocation.
    let pool = if piece.stays { 0 } else { allocation.pool };
    let (stream, ended) = (after.unwrap_or(NO_STREAM), after.is_none());
    hook_table::see_waits();
    let refused = tables(|tables| {
        let unused = FreePiece { since: tables.now(), piece, pool, stream, mark, ended };
        (!tables.cache.put(allocation, unused)).then_some(unused)
    });
    match refused {
        Some(unused) => give_back_after(&unused),
        None => unsettle(),
    }
}

/// Frees an allocation of a pool at once. The caller has already waited for all work, so that the
/// GPU no longer uses the memory.
pub fn free_at_once(allocation: &Allocation) {
    if !allocation.piece.stays {
        count(-(allocation.piece.bytes as i64));
    }
    take_back(allocation, None);
}

/// The application's handle of the pool from which an allocation was made; 0: the pool is
/// destroyed.
pub fn handle_of(allocation: &Allocation) -> usize {
    tables(|tables| tables.cache.handle_of(allocation.pool))
}

pub unsafe extern "C" fn stream_synchronize(stream: *mut c_void) -> u32 {
    waited(call!(stream_synchronize(stream)))
}

pub unsafe extern "C" fn stream_synchronize_ptsz(stream: *mut c_void) -> u32 {
    waited(call!(stream_synchronize(Stream::per_thread(stream).0)))
}

pub unsafe extern "C" fn event_synchronize(event: usize) -> u32 {
    waited(call!(event_synchronize(event)))
}

pub unsafe extern "C" fn ctx_synchronize() -> u32 {
    waited(call!(ctx_synchronize()))
}

pub unsafe extern "C" fn ctx_synchronize_v2(context: usize) -> u32 {
    waited(call!(ctx_synchronize_v2(context)))
}

/// Frees unused memory if a wait for work was successful, as the driver does. Returns the code of
/// the wait.
fn waited(code: u32) -> u32 {
    if code == result::SUCCESS {
        settle(true);
    }
    code
}

#[cfg(test)]
mod tests;
