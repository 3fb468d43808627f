//! When a container was last in use. A counter that moved, or a call in progress,
//! is use; poll calls by themselves are not: an idle framework polls.

use affinode_proto::wire::page::PageSnapshot;

/// Whether the newer of two readings shows use since the older one.
#[must_use]
pub fn moved(older: Option<&PageSnapshot>, newer: &PageSnapshot) -> bool {
    newer.inflight > 0 || newer.waiters > 0 || older.is_none_or(|older| older.calls != newer.calls)
}

#[cfg(test)]
mod tests {
    use affinode_proto::wire::{Hazards, Phase};

    use super::*;

    fn page(calls: u64, polls: u64, inflight: u64) -> PageSnapshot {
        PageSnapshot {
            phase: Phase::Open,
            waiters: 0,
            hazards: Hazards(0),
            generation: 0,
            allocated_bytes: 0,
            allocations: 0,
            carried_bytes: 0,
            parked_bytes: 0,
            notes: affinode_proto::wire::Notes::default(),
            calls,
            polls,
            inflight,
            last_hook: 0,
        }
    }

    #[test]
    fn calls_and_calls_in_progress_count_and_polls_do_not() {
        assert!(moved(None, &page(0, 0, 0)));
        assert!(moved(Some(&page(1, 0, 0)), &page(2, 0, 0)));
        assert!(moved(Some(&page(1, 0, 1)), &page(1, 0, 1)));
        assert!(!moved(Some(&page(1, 5, 0)), &page(1, 900, 0)));
    }
}
