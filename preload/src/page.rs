//! The shared page as the process itself sees it: mapped, with atomics in place.
//! The layout is the protocol's; this module only gives it types.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use affinode_proto::wire::page::{
    Gate, PAGE_BYTES, PAGE_MAGIC, SLOT_BYTES, SLOT_COUNT, SLOTS_OFFSET, header, slot,
};
use affinode_proto::wire::{Hazards, Notes, Phase, WIRE_VERSION, calls};

use crate::calls::{Pick, Ring};
use crate::sys;

/// Counters of one thread, or of all threads without an own one (slot 0).
///
/// An owned slot is written by its thread alone, with plain increments; slot 0 with
/// atomic ones.
#[repr(C, align(64))]
pub struct Slot {
    pub inflight: AtomicU32,
    pub last_hook: AtomicU32,
    pub calls: AtomicU64,
    pub polls: AtomicU64,
    pub owner: AtomicU32,
    /// Calls inside the driver that may take device memory. Private to the library: the
    /// protocol leaves the rest of a slot free.
    pub allocating: AtomicU32,
    /// How calls of this slot are picked for the ring. As private.
    pub pick: Pick,
    free: [u8; 16],
}

/// The whole page.
#[repr(C, align(4096))]
pub struct Page {
    magic: AtomicU64,
    version: AtomicU32,
    slot_count: AtomicU32,
    pub phase: AtomicU32,
    free0: [u8; 4],
    pub kept_bytes: AtomicU64,
    free3: [u8; 32],
    pub gate: AtomicU32,
    /// Beside the gate: one comparison sees both.
    pub one_in: AtomicU32,
    free1: [u8; 56],
    pub waiters: AtomicU32,
    hazards: AtomicU32,
    pub generation: AtomicU64,
    free2: [u8; 16],
    pub carried_bytes: AtomicU64,
    pub parked_bytes: AtomicU64,
    notes: AtomicU32,
    /// What the hook adds to a call, in picoseconds; 0: not known.
    pub call_cost_ps: AtomicU32,
    /// How long callers waited at the gate, all together.
    pub held_us: AtomicU64,
    pub ring: Ring,
    pub slots: [Slot; SLOT_COUNT],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Page>() == PAGE_BYTES);
    assert!(size_of::<Slot>() == SLOT_BYTES);
    assert!(offset_of!(Page, magic) == header::MAGIC);
    assert!(offset_of!(Page, version) == header::VERSION);
    assert!(offset_of!(Page, slot_count) == header::SLOT_COUNT);
    assert!(offset_of!(Page, phase) == header::PHASE);
    assert!(offset_of!(Page, kept_bytes) == header::KEPT_BYTES);
    assert!(offset_of!(Page, gate) == header::GATE);
    assert!(offset_of!(Page, waiters) == header::WAITERS);
    assert!(offset_of!(Page, hazards) == header::HAZARDS);
    assert!(offset_of!(Page, generation) == header::GENERATION);
    assert!(offset_of!(Page, one_in) == calls::ONE_IN);
    // The thunk compares both as one word.
    assert!(calls::ONE_IN == header::GATE + 4);
    assert!(offset_of!(Page, ring) == calls::CLAIMED);
    assert!(offset_of!(Page, carried_bytes) == header::CARRIED_BYTES);
    assert!(offset_of!(Page, parked_bytes) == header::PARKED_BYTES);
    assert!(offset_of!(Page, notes) == header::NOTES);
    assert!(offset_of!(Page, call_cost_ps) == header::CALL_COST_PS);
    assert!(offset_of!(Page, held_us) == header::HELD_US);
    assert!(offset_of!(Page, slots) == SLOTS_OFFSET);
    assert!(offset_of!(Slot, inflight) == slot::INFLIGHT);
    assert!(offset_of!(Slot, last_hook) == slot::LAST_HOOK);
    assert!(offset_of!(Slot, calls) == slot::CALLS);
    assert!(offset_of!(Slot, polls) == slot::POLLS);
    assert!(offset_of!(Slot, owner) == slot::OWNER_TID);
};

impl Page {
    /// Writes the header of a page that was just made.
    pub fn initialise(&self) {
        self.version.store(WIRE_VERSION, Ordering::Relaxed);
        self.slot_count.store(SLOT_COUNT as u32, Ordering::Relaxed);
        self.magic.store(PAGE_MAGIC, Ordering::Release);
    }

    /// The slot of threads that have none.
    pub fn shared_slot(&self) -> &Slot {
        let [shared, ..] = &self.slots;
        shared
    }

    /// A slot of its own for thread `tid`; `None` when all belong to living threads.
    pub fn claim(&self, tid: u32) -> Option<&Slot> {
        let [_, own @ ..] = &self.slots;
        let take = |slot: &&Slot, owner: u32| {
            slot.owner.compare_exchange(owner, tid, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        // Another thread had our id, and ended: its slot is ours by right.
        let heir = own.iter().find(|s| s.owner.load(Ordering::Relaxed) == tid);
        let slot = heir.or_else(|| own.iter().find(|slot| take(slot, 0))).or_else(|| {
            own.iter().find(|slot| {
                let owner = slot.owner.load(Ordering::Relaxed);
                !sys::thread_lives(owner) && take(slot, owner)
            })
        })?;
        // A thread that was cancelled inside a call left its count behind.
        slot.inflight.store(0, Ordering::SeqCst);
        slot.allocating.store(0, Ordering::SeqCst);
        Some(slot)
    }

    /// Whether a count is zero in all slots, those of dead threads left out.
    ///
    /// Sound after a barrier on all threads: whoever has passed the gate before it has
    /// made both the slot's ownership and the count visible, in this order. So a count
    /// under an owner that is dead both before and after belongs to nobody.
    pub fn drained(&self, count: impl Fn(&Slot) -> &AtomicU32) -> bool {
        self.slots.iter().all(|slot| {
            let owner = slot.owner.load(Ordering::SeqCst);
            count(slot).load(Ordering::SeqCst) == 0
                || (owner != 0
                    && !sys::thread_lives(owner)
                    && slot.owner.load(Ordering::SeqCst) == owner)
        })
    }

    /// What is known to make a checkpoint unsafe.
    pub fn hazards(&self) -> Hazards {
        Hazards(self.hazards.load(Ordering::SeqCst))
    }

    /// Adds hazards; true when one of them is new.
    pub fn add_hazards(&self, hazards: Hazards) -> bool {
        let before = self.hazards.fetch_or(hazards.0, Ordering::SeqCst);
        before & hazards.0 != hazards.0
    }

    /// Writes whether something is so.
    pub fn note(&self, what: Notes, is_so: bool) {
        if is_so {
            self.notes.fetch_or(what.0, Ordering::Relaxed);
        } else {
            self.notes.fetch_and(!what.0, Ordering::Relaxed);
        }
    }

    /// Sets the gate, and wakes those who wait when it opens further.
    pub fn set_gate(&self, gate: Gate) {
        self.gate.store(gate as u32, Ordering::SeqCst);
        if gate != Gate::Closed {
            sys::futex_wake_all(&self.gate);
        }
    }

    /// Whether calls are to fail: memory is not what it was.
    pub fn is_damaged(&self) -> bool {
        self.gate.load(Ordering::SeqCst) == Gate::Damaged as u32
    }

    /// Tells readers of the page where the process is.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u32, Ordering::Release);
    }

    /// Whether all work on the GPU has ended, and none can begin: from the driver's lock on,
    /// until calls go through again. Only of meaning while the gate is closed.
    pub fn is_finished(&self) -> bool {
        const FINISHED: [Phase; 8] = [
            Phase::Locked,
            Phase::Checkpointing,
            Phase::Away,
            Phase::Restoring,
            Phase::Unlocking,
            Phase::Parking,
            Phase::Parked,
            Phase::Unparking,
        ];
        let phase = self.phase.load(Ordering::Acquire);
        FINISHED.iter().any(|finished| *finished as u32 == phase)
    }

    /// Sleeps until the gate changes, or a moment. Nobody is told of it.
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

    /// A page of nobody.
    pub fn page() -> Box<Page> {
        // SAFETY: all fields are integers, for which zero is a value.
        let page: Box<Page> = unsafe { Box::new(core::mem::zeroed()) };
        page.initialise();
        page
    }

    #[test]
    fn the_controller_reads_what_is_written() {
        let page = page();
        page.shared_slot().calls.store(3, Ordering::Relaxed);
        page.add_hazards(Hazards::MPS);
        // SAFETY: as many bytes as the page has.
        let bytes =
            unsafe { core::slice::from_raw_parts((&raw const *page).cast::<u8>(), PAGE_BYTES) };
        let got = affinode_proto::wire::page::PageSnapshot::decode(bytes).unwrap();
        assert_eq!((got.calls, got.hazards), (3, Hazards::MPS));
    }

    #[test]
    fn slots_go_to_threads_and_come_back_from_dead_ones() {
        let page = page();
        let own = sys::gettid();
        let dead = std::thread::spawn(sys::gettid).join().unwrap();
        while sys::thread_lives(dead) {
            std::thread::yield_now();
        }
        let first = page.claim(own).unwrap();
        assert!(core::ptr::eq(first, page.claim(own).unwrap()), "an heir's");
        for slot in &page.slots[2..] {
            slot.owner.store(own, Ordering::Relaxed);
        }
        assert!(page.claim(own + 1).is_none(), "all belong to the living");
        page.slots[7].owner.store(dead, Ordering::Relaxed);
        page.slots[7].inflight.store(1, Ordering::Relaxed);
        assert!(page.drained(|s| &s.inflight), "counts of the dead");
        let taken = page.claim(own + 1).unwrap();
        assert!(core::ptr::eq(taken, &page.slots[7]));
        assert_eq!(taken.inflight.load(Ordering::Relaxed), 0);
        first.inflight.store(1, Ordering::Relaxed);
        assert!(!page.drained(|s| &s.inflight));
    }
}
