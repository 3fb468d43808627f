//! Handles CUDA contexts: finds the current context, makes calls in another context, and frees the
//! memory of a context that ends.

use core::sync::atomic::{AtomicUsize, Ordering};

use affinode_cuda_sys::result;

use super::alloc_wrappers::release;
use super::allocations::{Allocation, AllocationPiece, AllocationTables, Allocations};
use super::staging::StagingPool;
use super::vmm::blocks;
use super::{
    DEVICES, SWAP, addresses, count, driver::call, loader_lock, local_memory, locked, pending_work,
    stream_pools, tables, with_pool,
};

pub(super) fn current_context() -> Option<usize> {
    let mut context = 0;
    (call!(ctx_get_current(&raw mut context)) == result::SUCCESS).then_some(context)
}

/// Waits for the GPU's work as `cuMemFree` does, by freeing a small allocation of the same context.
/// The wait fails where `cuMemFree` fails: during the capture of a stream or after an error. A
/// `context` of 0 stands for memory that has outlived its context. In this case the function waits
/// for the work of the current context.
pub(super) fn wait_for_work(context: usize) -> u32 {
    const SMALL_BYTES: usize = 256;
    let context = if context == 0 { current_context().unwrap_or(0) } else { context };
    in_context(context, || {
        let mut small = 0;
        match call!(mem_alloc(&raw mut small, SMALL_BYTES)) {
            // Keep the first small allocation: while it exists, the driver keeps the block for
            // small requests.
            result::SUCCESS if keeps_first(context) => {
                let mut second = 0;
                match call!(mem_alloc(&raw mut second, SMALL_BYTES)) {
                    result::SUCCESS => call!(mem_free(second)),
                    _ => call!(ctx_synchronize()),
                }
            }
            result::SUCCESS => call!(mem_free(small)),
            result::OUT_OF_MEMORY => call!(ctx_synchronize()),
            code => code,
        }
    })
}

/// Records that the library keeps its first small allocation in this context, so that the driver
/// keeps its block for small allocations. False: the library already keeps one there, or the list
/// is full.
fn keeps_first(context: usize) -> bool {
    let known = |place: &AtomicUsize| place.load(Ordering::Relaxed) == context;
    let take = |place: &AtomicUsize| {
        place.compare_exchange(0, context, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    !SWAP.anchored.iter().any(known) && SWAP.anchored.iter().any(take)
}

/// Runs `body` while an existing context is current, then makes the previous context current again.
/// Returns the code of `body`, or of the change of the context if this fails.
pub(super) fn in_context(context: usize, body: impl FnOnce() -> u32) -> u32 {
    if current_context() == Some(context) {
        return body();
    }
    match call!(ctx_push_current(context)) {
        result::SUCCESS => {}
        code => return code,
    }
    let code = body();
    let mut popped = 0;
    call!(ctx_pop_current(&raw mut popped));
    code
}

/// Calls `end`, the driver's function that ends a context or releases a reference to it, and
/// returns its code. If `has_ended` then returns true, frees the allocations of the context.
/// `which` returns the context. It is called while no other context can end.
fn ends(
    which: impl FnOnce() -> Option<usize>,
    end: impl FnOnce() -> u32,
    has_ended: impl FnOnce() -> bool,
) -> u32 {
    let (mut context, mut ended, mut before) = (0, false, 0);
    let code = with_pool(|pool| {
        let Some(found) = which() else {
            return end();
        };
        context = found;
        loader_lock::wait_for_load();
        SWAP.unused_lock.hold(|| {
            // Set the time only now: while this thread waited for the lock, another thread may have
            // ended the context.
            before = tables(AllocationTables::now);
            let code = end();
            ended = code == result::SUCCESS && has_ended();
            if ended {
                forget(pool, context, before);
            }
            code
        })
    });
    // Meanwhile another thread may have created a context with the same handle, and memory in it.
    let of_it = |piece: &AllocationPiece| piece.context == context && piece.since < before;
    if ended {
        blocks(|blocks| blocks.context_ends(context, before));
    }
    let of_pool = |allocation: &Allocation| allocation.pool != 0 && of_it(&allocation.piece);
    while ended && let Some(bytes) = locked(|table| outlives(table, of_pool)) {
        count(-(bytes as i64));
    }
    while ended && let Some(one) = locked(|table| table.remove(|a| of_it(&a.piece))) {
        release(&one.piece);
    }
    let opened = || tables(|tables| tables.opened.remove(|o| of_it(&o.allocation.piece)));
    while ended && let Some(one) = opened() {
        release(&one.allocation.piece);
    }
    if ended {
        addresses::let_go();
    }
    code
}

/// Removes a context that ended at the time `before` from all lists of contexts. The caller must
/// hold [`SwapState::unused_lock`](super::SwapState).
fn forget(pool: &mut StagingPool, context: usize, before: u64) {
    pending_work::context_ends(context);
    local_memory::context_ends(context);
    pool.context_ends(context);
    stream_pools::context_ends(context, before);
    forget_anchor(context);
}

/// Records that the library keeps no small allocation in this context.
fn forget_anchor(context: usize) {
    let order = Ordering::Relaxed;
    for place in &SWAP.anchored {
        let _ = place.compare_exchange(context, 0, order, order);
    }
}

/// Handles one allocation that outlives its context. Memory of a pool does so (measured, H200,
/// driver 580.159), but no context is left in which the library could copy it. So the function marks
/// the allocation to stay on the device, and sets its context to 0. Returns the number of bytes that
/// are no longer swappable. `None`: `of_it` is true for no allocation.
fn outlives(table: &mut Allocations, of_it: impl Fn(&Allocation) -> bool) -> Option<u64> {
    let piece = &mut table.iter_mut().find(|allocation| of_it(allocation))?.piece;
    piece.context = 0;
    Some(if core::mem::replace(&mut piece.stays, true) { 0 } else { piece.bytes })
}

pub(super) unsafe extern "C" fn ctx_destroy(context: usize) -> u32 {
    ends(|| Some(context), || call!(ctx_destroy(context)), || true)
}

/// Wrapper of `cuCtxAttach`, which adds a reference to the current context. No context may end
/// during the call. Otherwise `ctx_detach` could count the references before this one is recorded.
pub(super) unsafe extern "C" fn ctx_attach(context: *mut usize, flags: u32) -> u32 {
    with_pool(|_| {
        let code = call!(ctx_attach(context, flags));
        if code == result::SUCCESS {
            // SAFETY: the driver has just written the context there.
            SWAP.attached.add(unsafe { *context });
        }
        code
    })
}

/// Wrapper of `cuCtxDetach`, which releases a reference to a context. A context has one reference
/// from its creation, and one from each `cuCtxAttach`. It ends with the last reference.
pub(super) unsafe extern "C" fn ctx_detach(context: usize) -> u32 {
    let is_primary = || primary_contexts().any(|primary| primary == context);
    let is_last = || !SWAP.attached.has(context) && !is_primary();
    if !SWAP.attached.is_complete() && with_pool(|_| is_last()) {
        return detach_unsure(context);
    }
    let has_ended =
        || !SWAP.attached.remove(context) && SWAP.attached.is_complete() && !is_primary();
    ends(|| Some(context), || call!(ctx_detach(context)), has_ended)
}

/// Releases a reference to a context of which a reference may be unrecorded, so that it is unknown
/// whether the context ends. If it exists afterwards, its memory must stay. If not, the library must
/// not make it current again. So the library from now on neither frees its memory nor uses it.
fn detach_unsure(context: usize) -> u32 {
    let mut before = 0;
    let code = with_pool(|pool| {
        loader_lock::wait_for_load();
        SWAP.unused_lock.hold(|| {
            before = tables(AllocationTables::now);
            // These steps use the context, so they come before the end that it may have.
            stream_pools::abandon(context);
            pool.abandon_context(context);
            pending_work::abandon_context(context);
            local_memory::context_ends(context);
            forget_anchor(context);
            call!(ctx_detach(context))
        })
    });
    if code != result::SUCCESS {
        return code;
    }
    let of_it = |piece: &AllocationPiece| piece.context == context && piece.since < before;
    blocks(|blocks| blocks.context_ends(context, before));
    while let Some(bytes) = locked(|table| outlives(table, |one| of_it(&one.piece))) {
        count(-(bytes as i64));
    }
    tables(|tables| {
        let opened = tables.opened.iter_mut().map(|opened| &mut opened.allocation.piece);
        opened.filter(|piece| of_it(piece)).for_each(|piece| piece.context = 0);
    });
    code
}

/// Wrapper of `cuGreenCtxDestroy`. Before the green context ends, the function waits for the work
/// that unused memory of stream pools waits for in it, and destroys the events there.
pub(super) unsafe extern "C" fn green_ctx_destroy(green: usize) -> u32 {
    with_pool(|pool| {
        let mut context = 0;
        if call!(ctx_from_green(&raw mut context, green)) != result::SUCCESS {
            return call!(green_ctx_destroy(green));
        }
        SWAP.unused_lock.hold(|| {
            stream_pools::end_marks(context);
            let before = tables(AllocationTables::now);
            let code = call!(green_ctx_destroy(green));
            if code == result::SUCCESS {
                forget(pool, context, before);
                let of_it = |allocation: &Allocation| allocation.piece.context == context;
                while let Some(bytes) = locked(|table| outlives(table, of_it)) {
                    count(-(bytes as i64));
                }
            }
            code
        })
    })
}

fn is_primary_active(device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    let code = call!(primary_get_state(device, &raw mut flags, &raw mut active));
    code == result::SUCCESS && active != 0
}

/// Returns the device's primary context, if it exists now. No context may end during the call. The
/// function takes and releases a reference to the context. If another thread released its own
/// reference in between, this function would release the last one and end the context.
fn primary_context(device: i32) -> Option<usize> {
    let mut context = 0;
    if !is_primary_active(device)
        || call!(primary_retain(&raw mut context, device)) != result::SUCCESS
    {
        return None;
    }
    call!(primary_release(device));
    Some(context)
}

/// The primary contexts that exist now. No context may end during the call.
pub(super) fn primary_contexts() -> impl Iterator<Item = usize> {
    (0..DEVICES as i32).filter_map(primary_context)
}

pub(super) unsafe extern "C" fn primary_reset(device: i32) -> u32 {
    ends(|| primary_context(device), || call!(primary_reset(device)), || true)
}

pub(super) unsafe extern "C" fn primary_release(device: i32) -> u32 {
    let has_ended = || !is_primary_active(device);
    ends(|| primary_context(device), || call!(primary_release(device)), has_ended)
}

#[cfg(test)]
mod tests;
