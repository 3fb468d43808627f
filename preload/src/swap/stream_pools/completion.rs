//! Finds GPU work that has ended, and frees the memory that was waiting for it. Makes the driver
//! calls for the decisions of [`super::cache`].
//!
//! The event that shows the end of a piece's work is recorded during the call that frees the piece,
//! in the stream that this call names. At any other time another thread may be capturing that
//! stream, and the event would become a part of the capture. Only one thread at a time queries and
//! destroys events.

use core::sync::atomic::Ordering;

use affinode_cuda_sys::{pool_attribute, result};

use super::super::alloc_wrappers::unmake;
use super::super::backing::strays;
use super::super::contexts::in_context;
use super::super::driver::{self, call};
use super::super::{SWAP, is_in_use, tables};
use super::cache::{CompletionMark, FreePiece, PendingFree, StreamPool};
use super::stream::Stream;
use crate::sys;

/// Runs `body` in the relaxed capture mode. The driver calls of `body` then do not invalidate a
/// capture of a stream by this thread or another thread.
pub fn relaxed<R>(body: impl FnOnce() -> R) -> R {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    driver::exchange_capture_mode(&mut mode);
    let result = body();
    driver::exchange_capture_mode(&mut mode);
    result
}

/// Records the stream's current work in an event, and returns the mark of this point. Reuses the
/// event of `before` if it has one. `None`: a driver call failed.
pub fn mark(stream: Stream, before: CompletionMark) -> Option<CompletionMark> {
    let context = stream.context()?;
    let mut mark = before;
    if before.event == 0 {
        const NO_TIMES: u32 = 2;
        let mut event = 0;
        let code =
            relaxed(|| in_context(context, || call!(event_create(&raw mut event, NO_TIMES))));
        if code != result::SUCCESS {
            return None;
        }
        mark = CompletionMark { event, context };
    }
    if call!(event_record(mark.event, stream.0)) != result::SUCCESS {
        SWAP.unused_lock.hold(|| forget(mark));
        return None;
    }
    Some(mark)
}

/// Destroys the event of a mark. The caller must hold
/// [`SwapState::unused_lock`](super::super::SwapState).
pub fn forget(mark: CompletionMark) {
    if mark.event != 0 {
        in_context(mark.context, || call!(event_destroy(mark.event)));
    }
}

fn has_happened(mark: CompletionMark) -> bool {
    mark.event == 0
        || in_context(mark.context, || call!(event_query(mark.event))) == result::SUCCESS
}

/// Waits until the GPU no longer uses a freed piece, then frees its memory. Used if the cache had
/// no memory to store the piece.
pub fn give_back_after(one: &FreePiece) {
    relaxed(|| {
        in_context(one.mark.context, || call!(event_synchronize(one.mark.event)));
        SWAP.unused_lock.hold(|| give_back(one));
    });
}

/// Unmaps and frees the memory of an unused piece, and destroys its event. The caller must hold
/// `unused_lock`.
fn give_back(one: &FreePiece) {
    if one.piece.may_stray() {
        strays();
    }
    unmake(&one.piece);
    forget(one.mark);
}

/// Queries the events of unused pieces, and marks the pieces whose work has ended. The caller must
/// hold `unused_lock`.
fn look() {
    let mut busy = PendingFree::default();
    let mut from = 0;
    while let Some(one) = tables(|tables| tables.cache.waiting(from, &busy)) {
        from = one.since + 1;
        if has_happened(one.mark) {
            tables(|tables| tables.cache.has_ended(one.since));
        } else {
            busy.add(&one);
        }
    }
}

/// Frees the unused pieces that have no pool. With `pools`, also frees what each pool holds above
/// its threshold. True: pieces are left that a later call may free. The caller must hold
/// `unused_lock`.
fn give_back_surplus(pools: bool) -> bool {
    while let Some(one) = tables(|tables| tables.cache.take_loose()) {
        give_back(&one);
    }
    let mut from = 0;
    while pools && let Some(pool) = tables(|tables| tables.cache.pool_from(from)) {
        from = pool.handle + 1;
        if tables(|tables| tables.cache.has_of(pool.number)) {
            let threshold = attribute(pool.handle, pool_attribute::RELEASE_THRESHOLD);
            trim(&pool, threshold.unwrap_or(0));
        }
    }
    tables(|tables| tables.cache.waits() || (!pools && !tables.cache.is_empty()))
}

/// Frees unused memory of a pool until the pool holds at most `keep_bytes`, including the driver's
/// part of the pool. The caller must hold `unused_lock`.
fn trim(pool: &StreamPool, keep_bytes: u64) {
    let drivers = attribute(pool.handle, pool_attribute::RESERVED).unwrap_or(0);
    let keep = keep_bytes.saturating_sub(drivers);
    while let Some(one) = tables(|tables| tables.cache.take_surplus(pool.number, keep)) {
        give_back(&one);
    }
}

/// Queries an attribute of a pool. `None`: the driver's call failed.
pub fn attribute(pool: usize, which: u32) -> Option<u64> {
    let mut value = 0_u64;
    let code = call!(pool_get_attribute(pool, which, (&raw mut value).cast()));
    (code == result::SUCCESS).then_some(value)
}

/// Finds ended work, and frees the unused memory that a pool holds above `keep_bytes`.
pub fn trim_to(pool: &StreamPool, keep_bytes: u64) {
    relaxed(|| {
        SWAP.unused_lock.hold(|| {
            look();
            trim(pool, keep_bytes);
        });
    });
}

/// Records that memory was freed. The next call of [`settle`] then checks which work has ended.
pub fn unsettle() {
    SWAP.unsettled.store(1, Ordering::Release);
}

/// Frees the unused pieces that need not be kept. Does nothing if no piece was freed since the last
/// call and no piece still waits for work. `waited` is true if the calling function has waited for
/// work. In this case pieces of pools are freed too, as the driver does.
///
/// If another thread is freeing pieces now, this call frees nothing, and the next call frees the
/// pieces. This call must not wait for the other thread: that thread may be ending a context, whose
/// work may need the calling thread to continue.
pub fn settle(waited: bool) {
    if SWAP.unsettled.load(Ordering::Relaxed) == 0 {
        return;
    }
    relaxed(|| {
        SWAP.unused_lock.hold_if_free(|| {
            // The flag is reset before the check, so that a free during the check is not missed.
            SWAP.unsettled.store(0, Ordering::Release);
            look();
            if give_back_surplus(waited) {
                unsettle();
            }
        });
    });
}

/// Frees all unused pieces whose work has ended, because device memory ran out. If there are none,
/// waits until the work of a piece has ended. True: memory was freed, so the allocation can be
/// tried again.
pub fn make_room() -> bool {
    /// Maximum time to wait for the end of work, in microseconds. Work that takes longer may itself
    /// be waiting for the thread that waits here.
    const MAX_US: u64 = 10_000_000;
    const BETWEEN_US: u64 = 500;
    if !is_in_use() {
        return false;
    }
    let until_us = sys::now_us() + MAX_US;
    loop {
        let (given, waits) = relaxed(|| {
            SWAP.unused_lock.hold(|| {
                look();
                let mut given = false;
                while let Some(one) = tables(|tables| tables.cache.take_ended()) {
                    give_back(&one);
                    given = true;
                }
                (given, tables(|tables| tables.cache.waits()))
            })
        });
        if given || !waits || sys::now_us() > until_us {
            return given;
        }
        sys::sleep_us(BETWEEN_US);
    }
}

/// Frees all unused pieces. May be called only when all work has ended and no call is in the
/// driver.
pub fn clear() {
    SWAP.unused_lock.hold(|| {
        while let Some(one) = tables(|tables| tables.cache.take_any()) {
            give_back(&one);
        }
    });
}

/// Waits for the work before each mark in a context that is about to end, and destroys the marks'
/// events. The caller must hold `unused_lock`.
pub fn end_marks(context: usize) {
    relaxed(|| {
        while let Some((since, mark)) = tables(|tables| tables.cache.take_mark(context)) {
            in_context(context, || call!(event_synchronize(mark.event)));
            forget(mark);
            tables(|tables| tables.cache.has_ended(since));
        }
        forget_marks_of_allocations(context);
    });
}

/// Frees the unused pieces of a context that has ended. `before` is the time of its end. The caller
/// must hold `unused_lock`.
pub fn context_ends(context: usize, before: u64) {
    tables(|tables| {
        tables.cache.context_ends(context, before);
        let marks = tables.allocations.iter_mut().map(|allocation| &mut allocation.mark);
        marks
            .filter(|mark| mark.context == context)
            .for_each(|mark| *mark = CompletionMark::default());
    });
    while let Some(one) = tables(|tables| tables.cache.take_of_context(context, before)) {
        give_back(&one);
    }
}

/// Removes all unused pieces and marks of a context that may be about to end. Frees a piece only if
/// its work has ended. The memory of the others stays allocated, because the context may continue
/// and use it. The caller must hold `unused_lock`.
pub fn abandon(context: usize) {
    relaxed(|| {
        look();
        while let Some(one) = tables(|tables| tables.cache.take_in(context)) {
            if one.ended {
                give_back(&one);
            }
        }
        forget_marks_of_allocations(context);
    });
}

/// Destroys the events that allocations have in a context. The caller must hold `unused_lock`.
fn forget_marks_of_allocations(context: usize) {
    let next = || {
        tables(|tables| {
            let mut marks = tables.allocations.iter_mut().map(|one| &mut one.mark);
            marks.find(|mark| mark.is_in(context)).map(core::mem::take)
        })
    };
    while let Some(mark) = next() {
        forget(mark);
    }
}
