//! Avoids a stall of the driver after device memory was freed. The device scrubs (clears) freed
//! memory. The driver notices the end of the scrub only at the next allocation, and this allocation
//! is slow: after a release of 60 GiB it takes 13 to 20 ms longer (H200, driver 580.159). To keep
//! this delay out of a restore, the agent makes a small allocation before the restore, and frees it
//! at once.
//!
//! ```text
//! None ──copied out──> Scrubbing ──SCRUBBED_AFTER_US, allocations are not held──> Done
//!   ^                      │ resident, or on to a checkpoint                        │
//!   └──────────────────────┴────────────────────────────────────────────────────────┘
//! ```

use affinode_cuda_sys::result;

use super::allocations::{AllocationId, MemoryPlace};
use super::driver::call;
use super::{GRANULE_BYTES, tables};

/// Time after which the device has scrubbed (cleared) 60 GiB of freed memory, in microseconds.
const SCRUBBED_AFTER_US: u64 = 200_000;

/// State of the small allocation that the agent makes after device memory was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubState {
    /// No memory was freed, or the process is resident again or checkpointed.
    None,
    /// Memory was freed. The value is the time at which the allocation is due, in microseconds.
    Scrubbing(u64),
    /// The allocation that was due has been made.
    Done,
}

impl ScrubState {
    /// Updates the state, and returns whether the agent must make the small allocation now.
    /// `parked` is true if memory is copied out and the driver can be called. `held` is true if
    /// allocations are paused. The controller has then granted VRAM to another process, possibly
    /// all free VRAM.
    pub fn is_due(&mut self, now_us: u64, parked: bool, held: bool) -> bool {
        *self = match *self {
            _ if !parked => ScrubState::None,
            ScrubState::None => ScrubState::Scrubbing(now_us + SCRUBBED_AFTER_US),
            ScrubState::Scrubbing(due_us) if now_us >= due_us && !held => {
                *self = ScrubState::Done;
                return true;
            }
            still => still,
        };
        false
    }

    /// Time until the agent must make the small allocation, in milliseconds. `u64::MAX`: no
    /// allocation is due, or allocations are paused. The end of the pause wakes the agent.
    pub fn patience_ms(&self, now_us: u64) -> u64 {
        match self {
            ScrubState::Scrubbing(due_us) if *due_us > now_us => (due_us - now_us).div_ceil(1_000),
            _ => u64::MAX,
        }
    }
}

/// Makes a small allocation on a device from which memory was copied out, and frees it. Failures
/// are ignored.
pub fn absorb_scrub_stall() {
    let offloaded = tables(|tables| {
        tables
            .next(AllocationId::FIRST, |piece| piece.place == MemoryPlace::Pool)
            .map(|(_, piece)| *piece)
    });
    let mut handle = 0;
    if let Some(piece) = offloaded
        && call!(mem_create(&raw mut handle, GRANULE_BYTES, &raw const piece.property, 0))
            == result::SUCCESS
    {
        call!(mem_release(handle));
    }
}

#[cfg(test)]
mod tests {
    use affinode_cuda_sys::MemAllocationProp;

    use super::super::allocations::{Allocation, AllocationPiece};
    use super::super::fake_driver::{CONTEXT, DEVICE, Fake};
    use super::super::{backing::property_on, locked, prefault::tests::SHARED};
    use super::*;

    #[test]
    fn small_allocation_is_freed() {
        let _own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fake = Fake::new();
        let property: MemAllocationProp = property_on(DEVICE);
        let piece = AllocationPiece {
            address: 1 << 40,
            bytes: 1 << 21,
            property,
            ..AllocationPiece::default()
        };
        let piece = AllocationPiece { context: CONTEXT, place: MemoryPlace::Pool, ..piece };
        let allocation = Allocation { piece, ..Allocation::default() };
        assert!(tables(|tables| tables.insert(allocation)));
        fake.fail("cuMemCreate", 1);
        let before = fake.held();
        absorb_scrub_stall();
        assert_eq!(fake.held(), before);
        assert!(fake.is_still_to_fail(), "asked once");
        absorb_scrub_stall();
        assert!(!fake.is_still_to_fail(), "asked, and refused");
        assert_eq!(fake.held(), before);
        locked(|table| table.remove_at(1 << 40)).unwrap();
    }

    #[test]
    fn a_little_is_asked_for_once_after_each_release() {
        let mut released = ScrubState::None;
        assert!(!released.is_due(0, false, false));
        assert_eq!(released.patience_ms(0), u64::MAX);
        assert!(!released.is_due(1_000, true, false));
        assert_eq!(released.patience_ms(1_000), 200);
        assert!(!released.is_due(200_999, true, false));
        assert_eq!(released.patience_ms(200_999), 1);
        assert!(released.is_due(201_000, true, false));
        assert!(!released.is_due(999_000, true, false), "once");
        assert!(!released.is_due(999_000, false, false));
        assert!(
            !released.is_due(1_000_000, true, false) && released.is_due(1_200_000, true, false)
        );
    }

    #[test]
    fn no_allocation_while_held_or_resident() {
        let mut released = ScrubState::None;
        assert!(!released.is_due(0, true, false));
        assert!(!released.is_due(300_000, true, true));
        assert_eq!(released.patience_ms(300_000), u64::MAX, "the agent wakes when the pause ends");
        assert!(released.is_due(300_001, true, false));
        let mut released = ScrubState::None;
        assert!(!released.is_due(0, true, false) && !released.is_due(100_000, false, false));
        assert!(!released.is_due(300_000, true, false), "anew");
    }
}
