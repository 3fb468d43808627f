//! Records a sample of CUDA calls in a ring of shared memory while an operator watches calls. This
//! module is the writing side. The ring is a part of the counters, the memory that this process
//! shares with the controller (layout: [`affinode_proto::wire::call_ring`]).
//!
//! ```text
//! thunk: gate is open (0), one_in is 0 ──────────────────> call, not recorded
//!        gate is open (0), one_in is not 0: skip -= 1
//!                          skip is 0 or more ────────────> call, not recorded
//!                          skip is below 0 ──> slow path: begin ──> call ──> end
//! ```
//!
//! `one_in` is the sampling rate: about one of `one_in` calls is recorded, and 0 means none. `skip`
//! is the number of calls until the next recorded call. After each recorded call, it is set to a
//! new random number. With a fixed number, a program whose calls repeat in a rhythm would always be
//! recorded at the same call. Recording takes no lock, makes no system call and never waits. If the
//! ring is full, the call is counted as dropped.

use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use affinode_cuda_sys::size;
use affinode_proto::wire::call_ring::{self, RECORD_BYTES, RECORDS, RING_OFFSET, record};
use affinode_proto::wire::counters::SLOTS_OFFSET;

use crate::counters::{CounterPage, ThreadSlot};
use crate::{libc, sys};

/// Minimum number of calls that a thread skips after it has found the ring full.
const PAUSE: u32 = 63;

/// Sampling state of one slot of the counters: decides which calls of the slot are recorded. The
/// threads that write the slot's counters also write this state.
#[repr(C)]
pub struct CallSampler {
    /// Number of calls before the next recorded call. The thunk counts it down.
    pub skip: AtomicU32,
    /// State of the random number generator.
    draw: AtomicU32,
    /// Sum of the slot's counters of calls and polls, as it was when a call of the slot was last
    /// recorded.
    told: AtomicU64,
}

/// The ring buffer of recorded calls, in the layout that the protocol defines.
#[repr(C, align(64))]
pub struct CallRing {
    claimed: AtomicU64,
    limit: AtomicU64,
    dropped: AtomicU64,
    free: [u8; RING_OFFSET - call_ring::DROPPED - 8],
    records: [RecordSlot; RECORDS],
}

#[repr(C)]
struct RecordSlot {
    sequence: AtomicU32,
    hook: AtomicU16,
    result: AtomicU16,
    stands_for: AtomicU32,
    thread: AtomicU32,
    duration_ns: AtomicU64,
    bytes: AtomicU64,
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<CallRing>() == SLOTS_OFFSET - call_ring::CLAIMED);
    assert!(call_ring::CLAIMED + offset_of!(CallRing, limit) == call_ring::LIMIT);
    assert!(call_ring::CLAIMED + offset_of!(CallRing, dropped) == call_ring::DROPPED);
    assert!(call_ring::CLAIMED + offset_of!(CallRing, records) == RING_OFFSET);
    assert!(size_of::<RecordSlot>() == RECORD_BYTES);
    assert!(offset_of!(RecordSlot, sequence) == record::SEQUENCE);
    assert!(offset_of!(RecordSlot, hook) == record::HOOK);
    assert!(offset_of!(RecordSlot, result) == record::RESULT);
    assert!(offset_of!(RecordSlot, stands_for) == record::STANDS_FOR);
    assert!(offset_of!(RecordSlot, thread) == record::THREAD);
    assert!(offset_of!(RecordSlot, duration_ns) == record::DURATION_NS);
    assert!(offset_of!(RecordSlot, bytes) == record::BYTES);
};

/// Data of a CUDA call that has returned and is to be recorded.
pub struct CallTimer<'a> {
    /// The number of the hook.
    pub hook: u32,
    /// The driver's result code.
    pub result: u32,
    /// The call's arguments in registers.
    pub arguments: &'a [u64; 6],
    /// Start time of the call, as [`begin`] returned it.
    pub began_ns: u64,
}

impl CallRing {
    /// Claims the next free record of the ring and returns its number. Returns `None` if the ring
    /// is full of unread records.
    fn claim(&self) -> Option<u64> {
        let limit = self.limit.load(Ordering::Relaxed);
        let mut number = self.claimed.load(Ordering::Relaxed);
        while number < limit {
            let (next, order) = (number.wrapping_add(1), Ordering::Relaxed);
            match self.claimed.compare_exchange_weak(number, next, order, order) {
                Ok(_) => return Some(number),
                Err(other) => number = other,
            }
        }
        None
    }
}

/// Sets the sampling rate: about one of `one_in` calls is recorded from now on. 0 stops the
/// recording. `read` is the number of records that the reader has read, so they may be overwritten.
/// Only the agent calls this function.
pub fn watch(page: &CounterPage, one_in: u32, read: u64) {
    let before = page.one_in.load(Ordering::Relaxed);
    if one_in == 0 {
        page.one_in.store(0, Ordering::Relaxed);
        return;
    }
    page.ring.limit.store(read.saturating_add(RECORDS as u64), Ordering::Relaxed);
    if before == 0 || one_in < before {
        for slot in &page.slots {
            if before == 0 {
                slot.pick.told.store(total(slot), Ordering::Relaxed);
            }
            // A thread that counts down at this moment may overwrite the new value. Its next record
            // then comes later.
            slot.pick.skip.store(0, Ordering::Relaxed);
        }
    }
    // Limits `one_in`, because the countdown starts at random numbers of up to twice `one_in`.
    page.one_in.store(one_in.min(1 << 24), Ordering::Relaxed);
}

/// Decides whether a call on the slow path is recorded. Returns its start time in nanoseconds, or 0
/// if it is not recorded.
pub fn begin(page: &CounterPage, slot: &ThreadSlot) -> u64 {
    if page.one_in.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    let skip = &slot.pick.skip;
    // If the value is below 0, the thunk has already counted this call.
    let left = skip.load(Ordering::Relaxed).cast_signed();
    if left > 0 {
        skip.store((left - 1).cast_unsigned(), Ordering::Relaxed);
        return 0;
    }
    now_ns().max(1)
}

/// Writes the record of a call into the ring. The call has returned, but still counts as in
/// progress.
pub fn end(page: &CounterPage, slot: &ThreadSlot, call: &CallTimer) {
    let duration_ns = now_ns().saturating_sub(call.began_ns);
    let one_in = page.one_in.load(Ordering::Relaxed);
    let total = total(slot);
    let stands_for = total.wrapping_sub(slot.pick.told.swap(total, Ordering::Relaxed));
    let skip = draw(&slot.pick, one_in);
    let ring = &page.ring;
    let Some(number) = ring.claim() else {
        ring.dropped.fetch_add(stands_for, Ordering::Relaxed);
        slot.pick.skip.store(skip.max(PAUSE), Ordering::Relaxed);
        return;
    };
    slot.pick.skip.store(skip, Ordering::Relaxed);
    let Some(record) = ring.records.get((number % RECORDS as u64) as usize) else {
        return;
    };
    let hook = call.hook;
    record.hook.store(hook.try_into().unwrap_or(u16::MAX), Ordering::Relaxed);
    record.result.store(call.result.try_into().unwrap_or(u16::MAX), Ordering::Relaxed);
    record.stands_for.store(stands_for.try_into().unwrap_or(u32::MAX), Ordering::Relaxed);
    let owner = slot.owner.tid();
    let thread = if owner == 0 { sys::gettid() } else { owner };
    record.thread.store(thread, Ordering::Relaxed);
    record.duration_ns.store(duration_ns, Ordering::Relaxed);
    record.bytes.store(size::of_call(hook, call.arguments), Ordering::Relaxed);
    record.sequence.store((number as u32).wrapping_add(1), Ordering::Release);
}

fn total(slot: &ThreadSlot) -> u64 {
    slot.calls.load(Ordering::Relaxed).wrapping_add(slot.polls.load(Ordering::Relaxed))
}

/// Returns a random number of calls to skip: from 0 to less than twice `one_in`, `one_in - 1` on
/// average.
fn draw(pick: &CallSampler, one_in: u32) -> u32 {
    let mut x = pick.draw.load(Ordering::Relaxed) | 1;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    pick.draw.store(x, Ordering::Relaxed);
    let choices = u64::from(one_in.saturating_mul(2).saturating_sub(1).max(1));
    ((u64::from(x) * choices) >> 32) as u32
}

fn now_ns() -> u64 {
    // If libc has no clock function, use the kernel's clock.
    libc::monotonic_ns().unwrap_or_else(|| sys::now_us() * 1_000)
}

#[cfg(test)]
mod tests {
    use affinode_proto::wire::call_ring::CallRingReader;
    use affinode_proto::wire::counters::PAGE_BYTES;

    use super::*;
    use crate::counters::tests::page;

    fn bytes(page: &CounterPage) -> &[u8; PAGE_BYTES] {
        // SAFETY: a page has this size; the test writes it on this thread alone.
        unsafe { &*(&raw const *page).cast() }
    }

    /// Simulates what the thunk does for one call. Returns true if the call takes the slow path.
    fn call(page: &CounterPage, slot: &ThreadSlot, hook: u32) -> bool {
        slot.calls.fetch_add(1, Ordering::Relaxed);
        if page.one_in.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let left = slot.pick.skip.fetch_sub(1, Ordering::Relaxed).cast_signed() - 1;
        if left >= 0 {
            return false;
        }
        let began_ns = begin(page, slot);
        assert_ne!(began_ns, 0);
        end(page, slot, &CallTimer { hook, result: 0, arguments: &[0; 6], began_ns });
        true
    }

    #[test]
    fn nothing_is_recorded_unless_somebody_watches() {
        let page = page();
        let slot = page.claim(sys::gettid()).unwrap();
        assert!(!call(&page, slot, 3));
        assert_eq!(begin(&page, slot), 0);
        let mut reader = CallRingReader::at_present(bytes(&page));
        reader.take(bytes(&page), |record| panic!("{record:?}"));
        watch(&page, 1, 0);
        assert!(call(&page, slot, 3));
        watch(&page, 0, 0);
        assert!(!call(&page, slot, 3));
    }

    #[test]
    fn records_stand_for_every_call() {
        let page = page();
        let slot = page.claim(sys::gettid()).unwrap();
        slot.polls.store(500, Ordering::Relaxed);
        let mut reader = CallRingReader::at_present(bytes(&page));
        let (mut sum, mut taken, mut slow) = (0, 0, 0);
        const CALLS: u64 = 100_000;
        for n in 0..CALLS {
            if n % 1_000 == 0 {
                watch(&page, 50, reader.read());
            }
            slow += u64::from(call(&page, slot, 7));
            if n % 1_000 == 999 {
                let news = reader.take(bytes(&page), |record| {
                    assert_eq!((record.hook, record.thread), (7, sys::gettid()));
                    sum += u64::from(record.stands_for);
                    taken += 1;
                });
                assert_eq!((news.dropped, news.torn), (0, 0));
            }
        }
        assert_eq!(taken, slow);
        let left = total(slot) - slot.pick.told.load(Ordering::Relaxed);
        assert_eq!(sum + left, CALLS, "calls before the recording are not counted");
        assert!((1_500..2_500).contains(&taken), "about one call in 50 is recorded: {taken}");
    }

    #[test]
    fn a_full_ring_is_counted_and_hardly_looked_at() {
        let page = page();
        let slot = page.claim(sys::gettid()).unwrap();
        watch(&page, 1, 0);
        let slow = (0..100_000).filter(|_| call(&page, slot, 7)).count();
        assert!(slow < RECORDS + 100_000 / PAUSE as usize, "{slow} calls took the slow path");
        let mut reader = CallRingReader::default();
        let (mut sum, mut taken) = (0, 0);
        let news = reader.take(bytes(&page), |record| {
            sum += u64::from(record.stands_for);
            taken += 1;
        });
        assert_eq!((taken, sum), (RECORDS, RECORDS as u64));
        let left = total(slot) - slot.pick.told.load(Ordering::Relaxed);
        assert_eq!(sum + news.dropped + left, 100_000);
        // The reader has read the records, so the ring has free space again.
        watch(&page, 1, reader.read());
        slot.pick.skip.store(0, Ordering::Relaxed);
        assert!(call(&page, slot, 8));
        reader.take(bytes(&page), |record| assert_eq!(record.hook, 8));
        assert_eq!(reader.read(), RECORDS as u64 + 1);
    }

    #[test]
    fn a_rhythm_does_not_hide_a_function() {
        let page = page();
        let slot = page.claim(sys::gettid()).unwrap();
        let mut reader = CallRingReader::default();
        let mut seen = [0_u64; 4];
        for n in 0..40_000_u32 {
            if n % 500 == 0 {
                watch(&page, 16, reader.read());
            }
            call(&page, slot, n % 4);
            reader.take(bytes(&page), |record| {
                seen[usize::from(record.hook)] += u64::from(record.stands_for);
            });
        }
        assert!(seen.iter().all(|count| (8_000..12_000).contains(count)), "{seen:?}");
    }
}
