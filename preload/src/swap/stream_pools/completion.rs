//! When work has ended, and what is done then: the effects of what [`super::cache`] decides.
//!
//! One thread at a time looks at events and ends them. An event is recorded by the call that frees, in
//! the stream that it names: at any other time that stream may be another thread's to capture.

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

/// Runs `body` so that what it asks harms no capture, of this thread or another.
pub fn relaxed<R>(body: impl FnOnce() -> R) -> R {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    driver::exchange_capture_mode(&mut mode);
    let result = body();
    driver::exchange_capture_mode(&mut mode);
    result
}

/// Marks what a stream has to do by now, by an event of its context that may be there already.
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

/// Ends an event. The lock is held.
pub fn forget(mark: CompletionMark) {
    if mark.event != 0 {
        in_context(mark.context, || call!(event_destroy(mark.event)));
    }
}

fn has_happened(mark: CompletionMark) -> bool {
    mark.event == 0
        || in_context(mark.context, || call!(event_query(mark.event))) == result::SUCCESS
}

/// Waits for the mark of what cannot even be noted, and gives it back.
pub fn give_back_after(one: &FreePiece) {
    relaxed(|| {
        in_context(one.mark.context, || call!(event_synchronize(one.mark.event)));
        SWAP.unused_lock.hold(|| give_back(one));
    });
}

/// Gives memory back that nobody uses. The lock is held.
fn give_back(one: &FreePiece) {
    if one.piece.may_stray() {
        strays();
    }
    unmake(&one.piece);
    forget(one.mark);
}

/// Learns what has ended. The lock is held.
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

/// Gives back what is of no pool, and with `pools` what is more than each is to keep: whether there is
/// more to be done at the next wait. The lock is held.
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

/// Gives back what a pool has beyond some bytes, with what the driver has for it. The lock is held.
fn trim(pool: &StreamPool, keep_bytes: u64) {
    let drivers = attribute(pool.handle, pool_attribute::RESERVED).unwrap_or(0);
    let keep = keep_bytes.saturating_sub(drivers);
    while let Some(one) = tables(|tables| tables.cache.take_surplus(pool.number, keep)) {
        give_back(&one);
    }
}

/// What the driver says of a pool.
pub fn attribute(pool: usize, which: u32) -> Option<u64> {
    let mut value = 0_u64;
    let code = call!(pool_get_attribute(pool, which, (&raw mut value).cast()));
    (code == result::SUCCESS).then_some(value)
}

/// Gives back what a pool has beyond some bytes and nobody uses any more.
pub fn trim_to(pool: &StreamPool, keep_bytes: u64) {
    relaxed(|| {
        SWAP.unused_lock.hold(|| {
            look();
            trim(pool, keep_bytes);
        });
    });
}

/// Something was freed: calls look again.
pub fn unsettle() {
    SWAP.unsettled.store(1, Ordering::Release);
}

/// Gives back what is to be given back, where something was freed since, or still waits: of pools
/// once work was `waited` for, as the driver does. While another thread is at it, the next call does:
/// that thread may end a context, whose work may want for what this one does.
pub fn settle(waited: bool) {
    if SWAP.unsettled.load(Ordering::Relaxed) == 0 {
        return;
    }
    relaxed(|| {
        SWAP.unused_lock.hold_if_free(|| {
            SWAP.unsettled.store(0, Ordering::Release);
            look();
            if give_back_surplus(waited) {
                unsettle();
            }
        });
    });
}

/// Device memory was short: gives back all that nobody uses any more, or else the first for whose
/// work it can wait. True: it is worth another try.
pub fn make_room() -> bool {
    /// Work that takes longer may wait for this thread.
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

/// Everything has ended, and no call is in the driver: gives all of it back.
pub fn clear() {
    SWAP.unused_lock.hold(|| {
        while let Some(one) = tables(|tables| tables.cache.take_any()) {
            give_back(&one);
        }
    });
}

/// What ended with a context that was noted before a moment. The lock is held.
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
