use std::collections::{BTreeMap, BTreeSet};

use super::*;

const MIB: u64 = 1 << 20;
const POOL: StreamPool = StreamPool {
    handle: 70,
    number: 7,
    device: 0,
    left: false,
    used: SizeClass { bytes: 0, high: 0 },
    reserved: SizeClass { bytes: 0, high: 0 },
};

fn allocation(address: u64, bytes: u64) -> Allocation {
    let piece = AllocationPiece { address, bytes, context: 7, ..AllocationPiece::default() };
    Allocation { piece, asked_bytes: bytes, pool: POOL.number, mark: CompletionMark::default() }
}

fn unused(since: u64, stream: u64, of: &Allocation) -> FreePiece {
    let mark = CompletionMark { event: since as usize, context: 7 };
    FreePiece { since, piece: of.piece, pool: of.pool, stream, mark, ended: false }
}

/// Returns a cache with one unused piece for each entry of `freed`, which contains the piece's size
/// in MiB and its stream. The pieces are made and freed in this order, at the times 1, 2 and so on.
fn cache(freed: &[(u64, u64)]) -> PoolCache {
    let mut cache = PoolCache::empty();
    assert!(cache.add_pool(POOL));
    for (since, (mib, stream)) in (1..).zip(freed) {
        let of = allocation(since << 30, mib * MIB);
        cache.made(&of);
        assert!(cache.put(&of, unused(since, *stream, &of)));
    }
    cache
}

fn want(mib: u64, stream: u64, of_others: bool) -> PieceRequest {
    PieceRequest { pool: POOL.number, stream, context: 7, bytes: mib * MIB, of_others }
}

fn take(cache: &mut PoolCache, want: PieceRequest) -> Option<u64> {
    cache.take(&want, want.bytes).map(|one| one.since)
}

#[test]
fn stream_gets_best_fit_it_freed_last() {
    let mut cache = cache(&[(8, 1), (10, 1), (8, 1), (8, 2), (12, 1)]);
    assert_eq!(take(&mut cache, want(8, 1, true)), Some(3));
    assert_eq!(take(&mut cache, want(8, 1, true)), Some(1));
    assert_eq!(
        take(&mut cache, want(8, 1, true)),
        Some(2),
        "a piece may be up to a quarter too large"
    );
    assert_eq!(
        take(&mut cache, want(8, 1, true)),
        None,
        "one piece is a third too large, the other is of another stream"
    );
    assert_eq!(take(&mut cache, PieceRequest { pool: 8, ..want(8, 2, true) }), None);
    assert_eq!(take(&mut cache, want(10, 2, true)), None, "every piece is too small");
    assert_eq!(
        take(&mut cache, PieceRequest { context: 8, ..want(6, 2, true) }),
        None,
        "the stream with the same id belongs to another context"
    );
    assert_eq!(take(&mut cache, want(6, 2, true)), Some(4));
}

#[test]
fn other_streams_get_ended_pieces_if_allowed() {
    let mut cache = cache(&[(8, 1), (10, 2)]);
    assert_eq!(take(&mut cache, want(8, 3, true)), None);
    cache.has_ended(1);
    assert_eq!(take(&mut cache, want(8, 3, false)), None);
    assert_eq!(
        take(&mut cache, want(8, 2, true)),
        Some(2),
        "a piece of the same stream comes first"
    );
    assert_eq!(take(&mut cache, want(8, 2, true)), Some(1));
}

#[test]
fn nothing_of_a_busy_stream_is_asked_about() {
    let mut cache = cache(&[(2, 10), (2, 20), (2, 10), (2, 20)]);
    let since = |one: Option<FreePiece>| one.map(|one| one.since);
    let mut busy = PendingFree::default();
    assert_eq!(since(cache.waiting(0, &busy)), Some(1));
    busy.add(&cache.waiting(1, &busy).unwrap());
    assert_eq!(since(cache.waiting(2, &busy)), Some(2));
    assert_eq!(since(cache.waiting(3, &busy)), Some(4));
    busy.add(&cache.waiting(2, &busy).unwrap());
    assert_eq!(since(cache.waiting(0, &busy)), None);
    assert!(cache.waits());
}

#[test]
fn pool_left_to_the_driver_gives_nothing() {
    let mut cache = cache(&[(8, 1), (8, 1)]);
    assert!(
        cache.learn_pool(StreamPool { number: 8, ..POOL }),
        "another thread has added the pool before"
    );
    assert_eq!(cache.pool(POOL.handle).map(|pool| pool.number), Some(POOL.number));
    assert!(cache.can_copy(POOL.number) && !cache.can_copy(8));
    assert_eq!(take(&mut cache, want(8, 1, true)), Some(2));
    assert_eq!(cache.leave(POOL.handle, 9), Some(POOL.number));
    assert!(!cache.can_copy(POOL.number));
    assert_eq!(take(&mut cache, want(8, 1, true)), None);
    assert_eq!(cache.leave(90, 9), Some(9));
    assert!(cache.learn_pool(StreamPool { handle: 90, number: 10, ..POOL }) && !cache.can_copy(9));
}

/// A busy stream must not count as busy for other streams. Streams of two contexts may have the
/// same id, and the default streams of threads have no id.
#[test]
fn a_busy_stream_says_nothing_about_others() {
    let mut cache = cache(&[(2, 10), (2, NO_STREAM), (2, NO_STREAM)]);
    let of = allocation(50 << 30, 2 * MIB);
    let mark = CompletionMark { event: 9, context: 8 };
    assert!(cache.put(&of, FreePiece { mark, ..unused(9, 10, &of) }));
    let (mut busy, mut from, mut asked) = (PendingFree::default(), 0, Vec::new());
    while let Some(one) = cache.waiting(from, &busy) {
        (from, _) = (one.since + 1, asked.push(one.since));
        busy.add(&one);
    }
    assert_eq!(asked, [1, 2, 3, 9]);
}

#[test]
fn a_pool_keeps_what_it_is_to_keep() {
    let mut cache = cache(&[(8, 1), (8, 1), (8, 1)]);
    let held = allocation(99 << 30, 4 * MIB);
    cache.made(&held);
    for since in 1..=2 {
        cache.has_ended(since);
    }
    let mut surplus = |keep| cache.take_surplus(POOL.number, keep * MIB).map(|one| one.since);
    assert_eq!(surplus(28), None);
    assert_eq!(surplus(27), Some(1));
    assert_eq!(surplus(20), None);
    assert_eq!(surplus(0), Some(2));
    assert_eq!(surplus(0), None, "the work of this piece has not ended");
    let pool = cache.pool(POOL.handle).unwrap();
    assert_eq!(pool.reserved, SizeClass { bytes: 12 * MIB, high: 28 * MIB });
    assert_eq!(pool.used, SizeClass { bytes: 4 * MIB, high: 8 * MIB });
    cache.forget_highs(POOL.handle, |pool| &mut pool.reserved);
    assert_eq!(cache.pool(POOL.handle).unwrap().reserved.high, 12 * MIB);
    cache.ends(&held);
    assert_eq!(cache.pool(POOL.handle).unwrap().used.bytes, 0);
}

#[test]
fn piece_without_pool_is_freed_when_ended() {
    let mut cache = cache(&[(8, 1), (8, 1)]);
    let alone = Allocation { pool: 0, ..allocation(50 << 30, 2 * MIB) };
    assert!(cache.put(&alone, unused(9, 1, &alone)));
    for since in [2, 9] {
        cache.has_ended(since);
    }
    let since = |one: Option<FreePiece>| one.map(|one| one.since);
    assert_eq!([since(cache.take_loose()), since(cache.take_loose())], [Some(9), None]);
    assert_eq!(cache.remove_pool(POOL.handle).map(|pool| pool.number), Some(POOL.number));
    // The next pool with the same handle is another pool.
    assert!(cache.add_pool(StreamPool { number: 8, ..POOL }));
    assert_eq!(take(&mut cache, PieceRequest { pool: 8, ..want(8, 1, true) }), None);
    assert_eq!([since(cache.take_loose()), since(cache.take_loose())], [Some(2), None]);
    assert_eq!(cache.handle_of(7), 0);
    assert_eq!((cache.handle_of(8), cache.handle_of(0)), (POOL.handle, 0));
}

#[test]
fn pinned_piece_leaves_its_pool() {
    let mut cache = cache(&[]);
    let held = allocation(1 << 30, 8 * MIB);
    cache.made(&held);
    assert!(cache.put(&held, FreePiece { pool: 0, ..unused(1, 1, &held) }));
    let pool = cache.pool(POOL.handle).unwrap();
    assert_eq!((pool.used.bytes, pool.reserved.bytes), (0, 0));
    assert_eq!(take(&mut cache, want(8, 1, true)), None);
}

#[test]
fn a_context_ends_its_own_and_the_work_in_it() {
    let mut cache = cache(&[(2, 10), (2, 20)]);
    let of = allocation(50 << 30, 2 * MIB);
    let other = CompletionMark { event: 9, context: 8 };
    assert!(cache.put(&of, FreePiece { mark: other, ..unused(5, 10, &of) }));
    let piece = AllocationPiece { context: 8, ..of.piece };
    assert!(cache.put(&of, FreePiece { piece, ..unused(6, 10, &of) }));
    assert!(cache.put(&of, unused(8, 10, &of)));
    cache.context_ends(7, 8);
    assert_eq!(cache.waiting(0, &PendingFree::default()).map(|one| one.since), Some(5));
    let mut taken = || cache.take_of_context(7, 8).map(|one| (one.since, one.mark.event));
    for expected in [(1, 0), (2, 0)] {
        assert_eq!(taken(), Some(expected));
    }
    assert_eq!(
        taken(),
        None,
        "the other pieces are used by another context's work, or belong to a later context"
    );
    assert_eq!(cache.take_ended().map(|one| one.since), Some(6));
    cache.has_ended(5);
    assert_eq!(cache.take_ended().map(|one| (one.since, one.mark)), Some((5, other)));
    assert_eq!(cache.take_any().map(|one| one.since), Some(8));
    assert!(cache.is_empty() && !cache.waits());
}

/// State that the model expects of a piece: in use, or freed in a stream. The GPU no longer uses a
/// freed piece once the stream has ended its first `after` parts of work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Used,
    Freed { stream: u64, after: u64, told: bool },
}

/// Compares the cache with a list of all pieces, while random programs run on streams whose work
/// ends at any time.
#[test]
fn pieces_are_reused_once_after_their_work() {
    for seed in 1..200_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut below = |most: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % most
        };
        let mut cache = PoolCache::empty();
        let pools = [POOL, StreamPool { handle: 80, number: 9, ..POOL }];
        assert!(pools.iter().all(|pool| cache.add_pool(*pool)));
        let mut model: BTreeMap<u64, (Allocation, Is)> = BTreeMap::new();
        let mut submitted = [0_u64; 3];
        let mut ended = [0_u64; 3];
        let mut now = 0;
        for _ in 0..400 {
            now += 1;
            let stream = below(3);
            let place = stream as usize;
            match below(8) {
                0..=2 => {
                    let pool = pools[below(2) as usize].number;
                    let bytes = (1 + below(12)) * 2 * MIB;
                    let want =
                        PieceRequest { pool, stream, context: 7, bytes, of_others: below(2) == 0 };
                    if let Some(one) = cache.take(&want, bytes) {
                        let (mut of, was) = model[&one.piece.address];
                        let Is::Freed { stream: freed_in, after, told } = was else {
                            panic!("{one:?} is in use");
                        };
                        let over = told && ended[freed_in as usize] >= after;
                        assert!(freed_in == stream || (over && want.of_others), "{one:?}");
                        assert_eq!((of.pool, of.piece), (pool, one.piece));
                        assert!(bytes <= of.piece.bytes && bytes * 4 >= of.piece.bytes * 3);
                        of.asked_bytes = bytes;
                        model.insert(one.piece.address, (of, Is::Used));
                    } else {
                        let fits = |(of, is): &(Allocation, Is)| {
                            of.pool == pool
                                && of.piece.bytes == bytes
                                && matches!(is, Is::Freed { stream: s, .. } if *s == stream)
                        };
                        assert!(!model.values().any(fits), "a piece that fits was not found");
                        let of = Allocation { pool, ..allocation(now << 30, bytes) };
                        cache.made(&of);
                        model.insert(of.piece.address, (of, Is::Used));
                    }
                }
                3..=4 => {
                    let used: Vec<u64> = model
                        .iter()
                        .filter(|(_, (_, is))| *is == Is::Used)
                        .map(|(address, _)| *address)
                        .collect();
                    if used.is_empty() {
                        continue;
                    }
                    let address = used[below(used.len() as u64) as usize];
                    let (of, is) = model.get_mut(&address).unwrap();
                    assert!(cache.put(of, unused(now, stream, of)));
                    submitted[place] += 1;
                    *is = Is::Freed { stream, after: submitted[place], told: false };
                }
                5 => ended[place] += below(submitted[place] - ended[place] + 1),
                6 => {
                    let (mut busy, mut from) = (PendingFree::default(), 0);
                    while let Some(one) = cache.waiting(from, &busy) {
                        from = one.since + 1;
                        let (_, is) = model.get_mut(&one.piece.address).unwrap();
                        let Is::Freed { stream, after, told } = is else { panic!("{one:?}") };
                        if ended[*stream as usize] >= *after {
                            *told = true;
                            cache.has_ended(one.since);
                        } else {
                            busy.add(&one);
                        }
                    }
                }
                _ => {
                    let keep = below(40) * MIB;
                    let pool = pools[below(2) as usize];
                    while let Some(one) = cache.take_surplus(pool.number, keep) {
                        let (of, is) = model.remove(&one.piece.address).unwrap();
                        let Is::Freed { stream, after, told: true } = is else { panic!("{of:?}") };
                        assert!(ended[stream as usize] >= after && of.pool == pool.number);
                    }
                }
            }
            for pool in &pools {
                let of_it = || model.values().filter(|(of, _)| of.pool == pool.number);
                let reserved: u64 = of_it().map(|(of, _)| of.piece.bytes).sum();
                let in_use = of_it().filter(|(_, is)| *is == Is::Used);
                let used: u64 = in_use.map(|(of, _)| of.asked_bytes).sum();
                let said = cache.pool(pool.handle).unwrap();
                assert_eq!((said.reserved.bytes, said.used.bytes), (reserved, used));
            }
        }
        let freed: BTreeSet<u64> = model
            .iter()
            .filter(|(_, (_, is))| *is != Is::Used)
            .map(|(address, _)| *address)
            .collect();
        let left: BTreeSet<u64> =
            std::iter::from_fn(|| cache.take_any()).map(|one| one.piece.address).collect();
        assert_eq!(left, freed, "seed {seed}");
    }
}
