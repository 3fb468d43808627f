//! The shared counters, a page of atomics that this process maps and the controller reads. The
//! protocol defines the layout. This module adds the types.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use affinode_proto::wire::counters::{
    Gate, NOT_WANTED, PAGE_BYTES, PAGE_MAGIC, SLOT_BYTES, SLOT_COUNT, SLOTS_OFFSET, header, slot,
};
use affinode_proto::wire::{Hazards, Phase, ProcessFlags, WIRE_VERSION, call_ring};

use crate::call_recorder::{CallRing, CallSampler};
use crate::sys;

/// Counters of one thread.
///
/// Only the thread that owns a slot writes the slot, so the fast path uses plain increments. All
/// threads that own no slot share slot 0. They write it with atomic increments.
#[repr(C, align(64))]
pub struct ThreadSlot {
    pub inflight: AtomicU32,
    pub last_hook: AtomicU32,
    pub calls: AtomicU64,
    pub polls: AtomicU64,
    pub owner: SlotOwner,
    /// Decides which calls of this slot are recorded in the ring buffer for the call trace. This
    /// field and the following ones are private to the library, because the last bytes of a slot
    /// have no meaning in the protocol.
    pub pick: CallSampler,
    /// Number of calls in progress in the driver that may allocate device memory.
    pub allocating: AtomicU32,
    /// Number of threads that wait at the gate and own no slot. Only used in slot 0.
    waiting: AtomicU32,
    /// The thread's wait at the gate is counted until this time. A waiting thread renews its wait,
    /// which sets a later time. Several threads share slot 0, where the field has the time of the
    /// last renewal by any of them.
    waits_until_us: AtomicU64,
}

/// The owner of a slot, as one word. The lower half is the owner's thread id, or 0 while the slot
/// is free. The upper half is the number of times that a thread has claimed the slot.
///
/// A thread claims a slot by one compare-and-exchange of the whole word. It can claim a free slot,
/// and the slot of a thread that has ended. If the owner's id is that of the claiming thread, the
/// owner has ended and its id is used again. The upper half distinguishes an owner from a later
/// owner with the same id, so two threads never claim the same slot.
#[repr(transparent)]
pub struct SlotOwner(AtomicU64);

impl SlotOwner {
    /// The owner's thread id, or 0 while the slot is free.
    pub fn tid(&self) -> u32 {
        self.seen() as u32
    }

    fn seen(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Makes thread `tid` the owner if the word still has the value `seen`. Returns whether it did.
    fn take(&self, seen: u64, tid: u32) -> bool {
        let taken = (seen >> 32).wrapping_add(1) << 32 | u64::from(tid);
        self.0.compare_exchange(seen, taken, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// Time, in microseconds, for which a thread's wait at the gate is counted if the thread does not
/// renew the wait.
const WAIT_COUNTS_US: u64 = 3_000_000;

/// The shared memory that contains all counters of a process. Its size is at least one page.
#[repr(C, align(4096))]
pub struct CounterPage {
    magic: AtomicU64,
    version: AtomicU32,
    slot_count: AtomicU32,
    pub phase: AtomicU32,
    /// Number of chunks of offloaded content that are in a disk file.
    pub disk_chunks: AtomicU32,
    pub kept_bytes: AtomicU64,
    /// Cancels a copy out. The controller writes the gate's generation (the number of times that
    /// the gate was closed) to this field. The copy out of that generation then stops. With the bit
    /// [`NOT_WANTED`], the offload has been given up. Without it, host memory is short.
    turn_back: AtomicU64,
    /// Bytes of host memory that the copy out in progress still has to touch. The kernel allocates
    /// memory only when it is touched, so these bytes do not yet count as used.
    pub filling_bytes: AtomicU64,
    /// Current epoch of VRAM allowances (amounts that this process may still allocate). The
    /// controller changes the epoch to recall all earlier allowances: only an allowance with the
    /// current epoch is valid.
    pub vram_epoch: AtomicU64,
    /// Total bytes of the allocations in progress that the container's VRAM limit has admitted.
    pub vram_pending: AtomicU64,
    pub gate: AtomicU32,
    /// The sampling rate of recorded calls: about one of this many calls is recorded. 0: no calls
    /// are recorded. The field is next to the gate, so that the thunk (the assembly code of each
    /// hook) checks both by one comparison.
    pub one_in: AtomicU32,
    /// 1 while the gate also holds nested calls (calls made inside another call). The agent sets it
    /// after it has read zero in every count of calls in progress. Private to the library.
    sealed: AtomicU32,
    free1: [u8; 52],
    waiters: AtomicU32,
    hazards: AtomicU32,
    pub generation: AtomicU64,
    free2: [u8; 16],
    pub swappable_bytes: AtomicU64,
    pub copied_out_bytes: AtomicU64,
    notes: AtomicU32,
    /// Time that the hook adds to each call, in picoseconds. 0 if it was not measured.
    pub call_cost_ps: AtomicU32,
    /// Total time that callers have waited at the gate, in microseconds.
    pub held_us: AtomicU64,
    pub ring: CallRing,
    pub slots: [ThreadSlot; SLOT_COUNT],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<CounterPage>() == PAGE_BYTES);
    assert!(size_of::<ThreadSlot>() == SLOT_BYTES);
    assert!(offset_of!(CounterPage, magic) == header::MAGIC);
    assert!(offset_of!(CounterPage, version) == header::VERSION);
    assert!(offset_of!(CounterPage, slot_count) == header::SLOT_COUNT);
    assert!(offset_of!(CounterPage, phase) == header::PHASE);
    assert!(offset_of!(CounterPage, disk_chunks) == header::DISK_CHUNKS);
    assert!(offset_of!(CounterPage, kept_bytes) == header::KEPT_BYTES);
    assert!(offset_of!(CounterPage, turn_back) == header::TURN_BACK);
    assert!(offset_of!(CounterPage, filling_bytes) == header::FILLING_BYTES);
    assert!(offset_of!(CounterPage, vram_epoch) == header::VRAM_EPOCH);
    assert!(offset_of!(CounterPage, vram_pending) == header::VRAM_PENDING);
    assert!(offset_of!(CounterPage, gate) == header::GATE);
    assert!(offset_of!(CounterPage, waiters) == header::WAITERS);
    assert!(offset_of!(CounterPage, hazards) == header::HAZARDS);
    assert!(offset_of!(CounterPage, generation) == header::GENERATION);
    assert!(offset_of!(CounterPage, one_in) == call_ring::SAMPLE_EVERY);
    // The thunk compares the gate and the sampling rate as one word.
    assert!(call_ring::SAMPLE_EVERY == header::GATE + 4);
    assert!(offset_of!(CounterPage, ring) == call_ring::CLAIMED);
    assert!(offset_of!(CounterPage, swappable_bytes) == header::SWAPPABLE_BYTES);
    assert!(offset_of!(CounterPage, copied_out_bytes) == header::COPIED_OUT_BYTES);
    assert!(offset_of!(CounterPage, notes) == header::NOTES);
    assert!(offset_of!(CounterPage, call_cost_ps) == header::CALL_COST_PS);
    assert!(offset_of!(CounterPage, held_us) == header::HELD_US);
    assert!(offset_of!(CounterPage, slots) == SLOTS_OFFSET);
    assert!(offset_of!(ThreadSlot, inflight) == slot::INFLIGHT);
    assert!(offset_of!(ThreadSlot, last_hook) == slot::LAST_HOOK);
    assert!(offset_of!(ThreadSlot, calls) == slot::CALLS);
    assert!(offset_of!(ThreadSlot, polls) == slot::POLLS);
    assert!(offset_of!(ThreadSlot, owner) == slot::OWNER_TID);
};

#[cfg(test)]
impl ThreadSlot {
    /// Makes thread `tid` the owner of this slot in a test.
    pub fn own_for_test(&self, tid: u32) {
        assert!(self.owner.take(self.owner.seen(), tid));
    }
}

impl CounterPage {
    /// Writes the header of a new page.
    pub fn initialise(&self) {
        self.version.store(WIRE_VERSION, Ordering::Relaxed);
        self.slot_count.store(SLOT_COUNT as u32, Ordering::Relaxed);
        self.magic.store(PAGE_MAGIC, Ordering::Release);
    }

    /// Returns slot 0, which all threads without a slot of their own share.
    pub fn shared_slot(&self) -> &ThreadSlot {
        let [shared, ..] = &self.slots;
        shared
    }

    /// Claims a slot for thread `tid`. Returns `None` if living threads own all slots.
    pub fn claim(&self, tid: u32) -> Option<&ThreadSlot> {
        let [_, own @ ..] = &self.slots;
        let take = |may: &dyn Fn(u32) -> bool| {
            own.iter().find(|slot| {
                let seen = slot.owner.seen();
                may(seen as u32) && slot.owner.take(seen, tid)
            })
        };
        // An ended thread had the same id as this thread. This thread reuses its slot, unless a
        // third thread takes the slot first.
        let slot = take(&|owner| owner == tid)
            .or_else(|| take(&|owner| owner == 0))
            .or_else(|| take(&|owner| !sys::thread_lives(owner)))?;
        // Reset the count, because an earlier owner that was cancelled inside a call has not
        // subtracted that call.
        slot.inflight.store(0, Ordering::SeqCst);
        slot.allocating.store(0, Ordering::SeqCst);
        slot.waits_until_us.store(0, Ordering::SeqCst);
        Some(slot)
    }

    /// Whether a counter is zero in all slots except those of dead threads. `count` selects the
    /// counter.
    ///
    /// The caller must first execute a barrier on all threads. A thread that passed the gate before
    /// the barrier has first published itself as the owner of its slot, and then its count. So if
    /// the slot has the same dead owner before and after the count is read, the count belongs to no
    /// living thread.
    pub fn drained(&self, count: impl Fn(&ThreadSlot) -> &AtomicU32) -> bool {
        self.slots.iter().all(|slot| {
            let seen = slot.owner.seen();
            let owner = seen as u32;
            count(slot).load(Ordering::SeqCst) == 0
                || (owner != 0 && !sys::thread_lives(owner) && slot.owner.seen() == seen)
        })
    }

    /// Records that a thread of this slot begins to wait at the gate. A waiting thread renews its
    /// wait once a second ([`CounterPage::renew_wait`]). A thread can stop waiting without a call
    /// of [`Self::end_wait`]: by a jump out of a signal handler, by an exception or by its end. Its
    /// wait is then no longer counted after [`WAIT_COUNTS_US`].
    pub fn begin_wait(&self, slot: &ThreadSlot, now_us: u64) {
        if slot.owner.tid() == 0 {
            slot.waiting.fetch_add(1, Ordering::SeqCst);
        }
        self.renew_wait(slot, now_us);
        self.count_waiters(now_us);
    }

    /// Extends the time for which a thread's wait at the gate is counted. Returns true if that time
    /// had already passed, so that the wait was not counted.
    pub fn renew_wait(&self, slot: &ThreadSlot, now_us: u64) -> bool {
        slot.waits_until_us.swap(now_us.saturating_add(WAIT_COUNTS_US), Ordering::SeqCst) <= now_us
    }

    /// Ends a thread's wait at the gate, which [`Self::begin_wait`] began.
    pub fn end_wait(&self, slot: &ThreadSlot, now_us: u64) {
        if slot.owner.tid() == 0 {
            slot.waiting.fetch_sub(1, Ordering::SeqCst);
        } else {
            slot.waits_until_us.store(0, Ordering::SeqCst);
        }
        self.count_waiters(now_us);
    }

    /// Counts the callers that wait at the gate, and publishes the number for the controller. If
    /// several threads count at the same time, an outdated number may be published last. So each
    /// thread counts again after it has published.
    pub fn count_waiters(&self, now_us: u64) -> u32 {
        self.write_waiters(|| self.waits_that_count(now_us))
    }

    fn write_waiters(&self, mut count: impl FnMut() -> u32) -> u32 {
        // A further round is needed only if a wait has begun or ended meanwhile. The thread that
        // began or ended the wait counts the callers too.
        const MAX_ROUNDS: u32 = 64;
        let mut counted = count();
        for _ in 0..MAX_ROUNDS {
            self.waiters.store(counted, Ordering::SeqCst);
            let after = count();
            if after == counted {
                break;
            }
            counted = after;
        }
        counted
    }

    fn waits_that_count(&self, now_us: u64) -> u32 {
        let waits = |slot: &&ThreadSlot| slot.waits_until_us.load(Ordering::SeqCst) > now_us;
        let many = |slot: &ThreadSlot| match slot.owner.tid() {
            0 => slot.waiting.load(Ordering::SeqCst),
            _ => 1,
        };
        self.slots.iter().filter(waits).map(many).sum()
    }

    /// Counts the callers at the gate again, and returns whether at least one waits.
    pub fn has_waiters(&self) -> bool {
        self.count_waiters(sys::now_us()) > 0
    }

    /// Whether the published number of callers at the gate is above 0. The callers are not counted
    /// again, so the number may be too high.
    pub fn may_have_waiters(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// The hazards known so far: properties of this process that make a checkpoint unsafe.
    pub fn hazards(&self) -> Hazards {
        Hazards(self.hazards.load(Ordering::SeqCst))
    }

    /// Adds hazards to the known ones. Returns true if at least one of them is new.
    pub fn add_hazards(&self, hazards: Hazards) -> bool {
        let before = self.hazards.fetch_or(hazards.0, Ordering::SeqCst);
        before & hazards.0 != hazards.0
    }

    /// Sets or clears a flag of this process. The controller reads these flags.
    pub fn note(&self, what: ProcessFlags, is_so: bool) {
        if is_so {
            self.notes.fetch_or(what.0, Ordering::Relaxed);
        } else {
            self.notes.fetch_and(!what.0, Ordering::Relaxed);
        }
    }

    /// Sets the state of the gate. If more calls may pass in the new state, wakes the waiting
    /// callers.
    pub fn set_gate(&self, gate: Gate) {
        self.gate.store(gate as u32, Ordering::SeqCst);
        if gate != Gate::Closed {
            sys::futex_wake_all(&self.gate);
        }
    }

    /// Whether the gate also holds nested calls (calls made inside another call).
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::SeqCst) != 0
    }

    /// Sets whether the gate also holds nested calls. Wakes the waiting callers, which then check
    /// the gate again.
    pub fn set_sealed(&self, sealed: bool) {
        self.sealed.store(u32::from(sealed), Ordering::SeqCst);
        if !sealed {
            sys::futex_wake_all(&self.gate);
        }
    }

    /// Publishes the current phase of a move, which the controller reads.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u32, Ordering::Release);
    }

    /// Whether the controller has cancelled the copy out in progress. The controller does so when
    /// host memory becomes short at a limit above the container's own, which this process cannot
    /// see, and when the offload was given up.
    pub fn is_turned_back(&self) -> bool {
        let generation = self.turn_back.load(Ordering::Relaxed) & !NOT_WANTED;
        self.phase.load(Ordering::Relaxed) == Phase::CopyingOut as u32
            // The gate was closed at least once before any copy, so 0 is never the generation of a
            // copy-out.
            && generation != 0
            && generation == self.generation.load(Ordering::Relaxed)
    }

    /// Whether the copy out was cancelled because its offload was given up, and not because host
    /// memory is short. Only meaningful if [`Self::is_turned_back`] is true.
    pub fn is_not_wanted(&self) -> bool {
        self.turn_back.load(Ordering::Relaxed) & NOT_WANTED != 0
    }

    /// Whether all work on the GPU has ended and no new work can begin. This is true from the
    /// driver's lock of the process until calls pass the gate again. Only meaningful while the gate
    /// is closed.
    pub fn is_finished(&self) -> bool {
        const FINISHED: [Phase; 8] = [
            Phase::Locked,
            Phase::Checkpointing,
            Phase::Checkpointed,
            Phase::Restoring,
            Phase::Unlocking,
            Phase::CopyingOut,
            Phase::CopiedOut,
            Phase::CopyingIn,
        ];
        let phase = self.phase.load(Ordering::Acquire);
        FINISHED.iter().any(|finished| *finished as u32 == phase)
    }

    /// Sleeps until the gate changes, for at most 5 ms. Does not wake the agent.
    pub fn wait_a_moment(&self) {
        const MOMENT_MS: u64 = 5;
        let gate = self.gate.load(Ordering::SeqCst);
        if gate != Gate::Open as u32 {
            sys::futex_wait(&self.gate, gate, MOMENT_MS);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    impl CounterPage {
        /// Cancels the copy out of this generation in a test, as the controller does.
        pub fn turn_back_for_test(&self, generation: u64) {
            self.turn_back.store(generation, Ordering::Relaxed);
        }
    }

    /// Creates a page of counters for a test. The page is not the page of any process.
    pub fn page() -> Box<CounterPage> {
        // SAFETY: all fields are integers, for which zero is a value.
        let page: Box<CounterPage> = unsafe { Box::new(core::mem::zeroed()) };
        page.initialise();
        page
    }

    #[test]
    fn the_controller_reads_what_is_written() {
        let page = page();
        page.shared_slot().calls.store(3, Ordering::Relaxed);
        page.add_hazards(Hazards::MPS);
        // SAFETY: the slice has as many bytes as the page.
        let bytes =
            unsafe { core::slice::from_raw_parts((&raw const *page).cast::<u8>(), PAGE_BYTES) };
        let got = affinode_proto::wire::counters::CounterSnapshot::decode(bytes).unwrap();
        assert_eq!((got.calls, got.hazards), (3, Hazards::MPS));
    }

    #[test]
    fn slots_of_dead_threads_are_reused() {
        let page = page();
        let own = sys::gettid();
        let dead = std::thread::spawn(sys::gettid).join().unwrap();
        while sys::thread_lives(dead) {
            std::thread::yield_now();
        }
        let first = page.claim(own).unwrap();
        assert!(core::ptr::eq(first, page.claim(own).unwrap()), "an heir's");
        for slot in &page.slots[2..] {
            slot.own_for_test(own);
        }
        assert!(page.claim(own + 1).is_none(), "all slots belong to living threads");
        page.slots[7].own_for_test(dead);
        page.slots[7].inflight.store(1, Ordering::Relaxed);
        assert!(page.drained(|s| &s.inflight), "counts of ended threads are ignored");
        let taken = page.claim(own + 1).unwrap();
        assert!(core::ptr::eq(taken, &page.slots[7]));
        assert_eq!(taken.inflight.load(Ordering::Relaxed), 0);
        first.inflight.store(1, Ordering::Relaxed);
        assert!(!page.drained(|s| &s.inflight));
    }

    #[test]
    fn work_is_finished_from_the_lock_on() {
        let page = page();
        let unfinished = [Phase::Open, Phase::Closing, Phase::Closed, Phase::Locking];
        for phase in (0..u32::from(u8::MAX)).filter_map(Phase::from_u32) {
            page.set_phase(phase);
            assert_eq!(page.is_finished(), !unfinished.contains(&phase), "{phase:?}");
        }
    }

    #[test]
    fn drained_looks_at_every_slot() {
        let page = page();
        page.slots[1..].iter().for_each(|slot| slot.own_for_test(sys::gettid()));
        for slot in &page.slots {
            slot.inflight.store(1, Ordering::Relaxed);
            assert!(!page.drained(|slot| &slot.inflight));
            assert!(page.drained(|slot| &slot.allocating));
            slot.inflight.store(0, Ordering::Relaxed);
            assert!(page.drained(|slot| &slot.inflight));
        }
    }

    /// If two threads try to claim the slot of a dead owner, only one of them may get it. One
    /// thread has found the owner dead and is then stopped. The other thread has the same id as the
    /// dead owner. The test runs both orders of the two claims.
    #[test]
    fn slot_of_dead_owner_goes_to_one_thread() {
        const DEAD: u32 = 11;
        const OTHER: u32 = 12;
        let page = page();
        let owner = &page.slots[1].owner;
        for [first, second] in [[DEAD, OTHER], [OTHER, DEAD]] {
            page.slots[1].own_for_test(DEAD);
            let seen = owner.seen();
            assert!(owner.take(seen, first));
            assert!(!owner.take(seen, second), "{first} has it");
            assert_eq!(owner.tid(), first);
        }
        // A thread that inherits an id must also take the slot anew.
        page.slots[1].own_for_test(DEAD);
        let seen = owner.seen();
        assert!(core::ptr::eq(page.claim(DEAD).unwrap(), &page.slots[1]));
        assert!(!owner.take(seen, OTHER));
    }

    /// An outdated number of waiting callers must not stay published. One thread counts the
    /// callers. Before it publishes the number, another thread ends its wait and publishes a newer
    /// number.
    #[test]
    fn older_count_of_waiters_does_not_stay() {
        let page = page();
        let mut counts = [2, 1, 0, 0].into_iter();
        assert_eq!(page.write_waiters(|| counts.next().unwrap()), 0);
        assert_eq!((page.waiters.load(Ordering::SeqCst), counts.next()), (0, None));
        let mut counts = [1, 1].into_iter();
        assert_eq!(page.write_waiters(|| counts.next().unwrap()), 1);
        assert!(page.may_have_waiters());
    }

    #[test]
    fn waits_count_until_they_end_or_lapse() {
        let page = page();
        let told = |page: &CounterPage| page.waiters.load(Ordering::SeqCst);
        let (own, shared) = (page.claim(5).unwrap(), page.shared_slot());
        page.begin_wait(own, 10);
        page.begin_wait(shared, 10);
        page.begin_wait(shared, 10);
        assert_eq!((told(&page), page.count_waiters(20)), (3, 3));
        page.end_wait(shared, 20);
        assert_eq!(told(&page), 2);
        // A wait that was never ended must no longer be counted after its time, until it is
        // renewed.
        assert_eq!(page.count_waiters(10 + WAIT_COUNTS_US), 0);
        assert!(!page.may_have_waiters());
        assert!(page.renew_wait(own, 10 + WAIT_COUNTS_US), "the wait no longer counted");
        assert!(!page.renew_wait(own, 11 + WAIT_COUNTS_US));
        assert_eq!(page.count_waiters(11 + WAIT_COUNTS_US), 1);
        page.end_wait(own, 12 + WAIT_COUNTS_US);
        assert_eq!(told(&page), 0);
        page.end_wait(shared, 12 + WAIT_COUNTS_US);
        // A thread that inherits a slot must not count as waiting.
        page.begin_wait(own, 10);
        page.claim(5).unwrap();
        assert_eq!(page.count_waiters(11), 0);
    }
}
