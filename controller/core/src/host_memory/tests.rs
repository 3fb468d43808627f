use proptest::prelude::*;

use super::*;

fn key(n: u8) -> Key {
    Key::parse(&format!("{n:032x}")).unwrap()
}

fn pool(group: Option<&str>, free_bytes: u64, need_bytes: u64) -> MemoryPool {
    let place = group.map_or(MemoryPlace::Node, |path| MemoryPlace::Cgroup(path.into()));
    MemoryPool { place, free_bytes, need_bytes }
}

fn node(free_bytes: u64, need_bytes: u64) -> Vec<MemoryPool> {
    vec![pool(None, free_bytes, need_bytes)]
}

fn promised(judged: Result<(), MemoryShortage>) -> Option<u64> {
    match judged {
        Err(MemoryShortage::Promised { promised_bytes, .. }) => Some(promised_bytes),
        _ => None,
    }
}

#[test]
fn same_memory_is_promised_once() {
    let mut ledger = HostLedger::default();
    assert_eq!(ledger.judge(&key(1), &node(10, 6), 0, 0), Ok(()));
    ledger.promise(&key(1), node(10, 6), 0);
    assert_eq!(promised(ledger.judge(&key(2), &node(10, 6), 0, 0)), Some(6));
    assert_eq!(ledger.judge(&key(2), &node(10, 4), 0, 0), Ok(()));
}

#[test]
fn every_group_counts_for_itself() {
    let mut ledger = HostLedger::default();
    let of =
        |own: &str| vec![pool(None, 100, 3), pool(Some("/pod"), 4, 3), pool(Some(own), 100, 3)];
    ledger.promise(&key(1), of("/pod/a"), 0);
    let judged = ledger.judge(&key(2), &of("/pod/b"), 0, 0);
    let Err(MemoryShortage::Promised { pool, promised_bytes: 3 }) = judged else {
        panic!("{judged:?}")
    };
    assert_eq!(pool.name(), "/pod");
    let elsewhere = vec![pool_of_other_pod()];
    assert_eq!(ledger.judge(&key(2), &elsewhere, 0, 0), Ok(()));
}

fn pool_of_other_pod() -> MemoryPool {
    pool(Some("/other"), 3, 3)
}

#[test]
fn real_shortage_is_told_from_a_promised_one() {
    let mut ledger = HostLedger::default();
    ledger.promise(&key(1), node(10, 6), 0);
    let short = ledger.judge(&key(2), &node(5, 6), 0, 0);
    assert!(matches!(short, Err(MemoryShortage::Short { .. })), "{short:?}");
}

#[test]
fn stale_reading_still_counts_a_released_promise() {
    let mut ledger = HostLedger::default();
    ledger.promise(&key(1), node(10, 6), 0);
    // The pending reading was requested at time 5. The offload of the first container ended at time
    // 7.
    ledger.settle(7, || Some(5), |_| false);
    assert_eq!(promised(ledger.judge(&key(2), &node(10, 6), 5, 8)), Some(6));
    assert_eq!(ledger.judge(&key(2), &node(10, 6), 8, 8), Ok(()), "a reading of after");
    ledger.settle(8, || None, |_| false);
    assert!(ledger.is_empty());
}

#[test]
fn later_promise_waits_for_the_earlier() {
    let mut ledger = HostLedger::default();
    ledger.promise(&key(1), node(8, 4), 0);
    ledger.promise(&key(2), node(8, 4), 0);
    // Another program has taken 1 byte in the meantime. One of the two offloads must continue.
    assert_eq!(ledger.judge(&key(1), &node(7, 4), 1, 1), Ok(()));
    assert_eq!(promised(ledger.judge(&key(2), &node(7, 4), 1, 1)), Some(4));
    ledger.begin_move(&key(2));
    assert_eq!(promised(ledger.judge(&key(1), &node(7, 4), 1, 1)), Some(4), "offload 2 has begun");
}

#[test]
fn promise_that_never_ends_lapses() {
    let mut ledger = HostLedger::default();
    ledger.promise(&key(1), node(10, 6), 0);
    ledger.begin_move(&key(1));
    let judged = |now| ledger.judge(&key(2), &node(10, 6), now, now);
    assert_eq!(promised(judged(MAX_PROMISE_MS)), Some(6));
    assert_eq!(judged(MAX_PROMISE_MS + 1), Ok(()));
}

/// Model of a node with one memory pool, in which containers use their promised memory step by
/// step.
#[derive(Default)]
struct MemoryModel {
    taken: u64,
    /// The offloads in progress. Each entry contains the container, the number of bytes promised to
    /// it, and the number of bytes that it uses already.
    moving: Vec<(u8, u64, u64)>,
    /// The readings in progress: container, time of the request, number of free bytes that the
    /// reading shows.
    readings: Vec<(u8, Millis, u64)>,
}

proptest! {
    /// Promised memory always fits, whatever the order of requests, readings, uses and reports is.
    #[test]
    fn promised_memory_always_fits(steps in proptest::collection::vec((0_u8..6, 0_u8..5, 1_u64..500), 1..200)) {
        const TOTAL: u64 = 1_000;
        let mut ledger = HostLedger::default();
        let mut model = MemoryModel::default();
        for (now, (who, what, bytes)) in (1..).zip(steps) {
            let is_moving = model.moving.iter().any(|(n, ..)| *n == who);
            match what {
                // A survey is requested. It reads at once, and its result is delivered later.
                0 if !is_moving && model.readings.iter().all(|(n, ..)| *n != who) => {
                    model.readings.push((who, now, TOTAL - model.taken));
                }
                1 => if let Some(at) = model.readings.iter().position(|(n, ..)| *n == who) {
                    let (_, asked, free) = model.readings.remove(at);
                    if ledger.judge(&key(who), &node(free, bytes), asked, now).is_ok() {
                        ledger.promise(&key(who), node(free, bytes), now);
                        ledger.begin_move(&key(who));
                        model.moving.push((who, bytes, 0));
                    }
                },
                // The container uses a part of the memory that was promised to it.
                2 | 3 => if let Some((_, all, touched)) = model.moving.iter_mut().find(|(n, ..)| *n == who) {
                    let more = bytes.min(*all - *touched);
                    *touched += more;
                    model.taken += more;
                },
                // The offload has ended. A restore releases the memory at some time.
                _ => if let Some(at) = model.moving.iter().position(|(n, all, touched)| *n == who && all == touched) {
                    model.moving.remove(at);
                } else if model.moving.is_empty() {
                    model.taken = 0;
                },
            }
            let oldest = model.readings.iter().map(|(_, asked, _)| *asked).min();
            ledger.settle(now, || oldest, |k| model.moving.iter().any(|(n, ..)| key(*n) == *k));
            prop_assert!(model.taken <= TOTAL, "the offloads took more memory than there is");
            let owed: u64 = model.moving.iter().map(|(_, all, touched)| all - touched).sum();
            prop_assert!(model.taken + owed <= TOTAL, "the promised memory does not fit");
        }
    }
}
