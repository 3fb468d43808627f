//! What follows a release of device memory. The device wipes it, and that it has is taken note of by
//! the next request for memory, whoever makes it: 13 to 20 ms after 60 GiB (H200, 580.159), for which
//! a return would wait. So a little is asked for in between, and given back at once.
//!
//! ```text
//! here ──parked──> Wiping ──WIPED_AFTER, nobody is promised memory──> Noted
//!   ^                 │ home, or on to a checkpoint                     │
//!   └─────────────────┴────────────────────────────────────────────────┘
//! ```

use affinode_cuda_sys::result;

use super::allocations::{AllocationId, MemoryPlace};
use super::driver::call;
use super::{GRANULE_BYTES, tables};

/// By then 60 GiB are wiped.
const WIPED_AFTER_US: u64 = 200_000;

/// When a little is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubState {
    /// Nothing was released, or it is home again.
    Not,
    /// Then.
    Wiping(u64),
    /// It was.
    Noted,
}

impl ScrubState {
    /// Whether it is time. `parked`: memory has been released and the driver can be called. `held`:
    /// somebody is promised memory, to the last byte perhaps.
    pub fn is_due(&mut self, now_us: u64, parked: bool, held: bool) -> bool {
        *self = match *self {
            _ if !parked => ScrubState::Not,
            ScrubState::Not => ScrubState::Wiping(now_us + WIPED_AFTER_US),
            ScrubState::Wiping(due_us) if now_us >= due_us && !held => {
                *self = ScrubState::Noted;
                return true;
            }
            still => still,
        };
        false
    }

    /// How long nothing is to be done. Who is held is told of its end.
    pub fn patience_ms(&self, now_us: u64) -> u64 {
        match self {
            ScrubState::Wiping(due_us) if *due_us > now_us => (due_us - now_us).div_ceil(1_000),
            _ => u64::MAX,
        }
    }
}

/// Asks for a little where something is parked from. Whether it is there is all the same.
pub fn absorb_scrub_stall() {
    let away = tables(|tables| {
        tables
            .next(AllocationId::FIRST, |piece| piece.place == MemoryPlace::Pool)
            .map(|(_, piece)| *piece)
    });
    let mut handle = 0;
    if let Some(piece) = away
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
    fn what_is_asked_for_is_given_back() {
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
        let mut released = ScrubState::Not;
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
    fn not_while_somebody_is_promised_memory_nor_after_the_return() {
        let mut released = ScrubState::Not;
        assert!(!released.is_due(0, true, false));
        assert!(!released.is_due(300_000, true, true));
        assert_eq!(released.patience_ms(300_000), u64::MAX, "the end of the hold is told");
        assert!(released.is_due(300_001, true, false));
        let mut released = ScrubState::Not;
        assert!(!released.is_due(0, true, false) && !released.is_due(100_000, false, false));
        assert!(!released.is_due(300_000, true, false), "anew");
    }
}
