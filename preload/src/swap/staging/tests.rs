use std::io::Read;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;

use super::super::fake_driver::{CONTEXT, Fake};
use super::super::prefault::tests::{SHARED, forked};
use super::*;

/// Returns a pool of ten chunks, all of which are marked as resident.
fn kept() -> StagingPool {
    const CHUNKS: usize = 10;
    let bytes = CHUNKS * CHUNK_BYTES;
    let start = sys::map_private(bytes).unwrap() as usize;
    (0..CHUNKS).for_each(|chunk| PREFAULT.resident.set(chunk, true));
    let mut pool = StagingPool { start, bytes, ..StagingPool::none() };
    pool.set_keeps(true);
    pool.learn(digests(bytes / SLOT_BYTES));
    pool
}

/// A table of digests that all differ.
fn digests(many: usize) -> DigestTable {
    let mut digests = DigestTable::unknown(many).unwrap();
    for (n, digest) in digests.all_mut().iter_mut().enumerate() {
        *digest = Digest::of_address(1 + n as u64);
    }
    digests
}

#[test]
fn retained_copy_is_freed_when_memory_is_short() {
    let _own = SHARED.lock();
    let mut pool = kept();
    assert_eq!(pool.tidy(false, |_| false), TrimResult::Kept);
    assert_eq!(pool.kept_bytes(), 10 * CHUNK_BYTES as u64);
    for left in [9, KEPT_CHUNKS] {
        assert_eq!(pool.tidy(false, |_| true), TrimResult::Part);
        assert_eq!(pool.kept_bytes(), (left * CHUNK_BYTES) as u64);
    }
    assert_eq!(
        pool.tidy(false, |_| false),
        TrimResult::All,
        "the pool is no longer retained, although host memory is free"
    );
    let found = digests(pool.bytes / SLOT_BYTES);
    let gone = KEPT_CHUNKS * CHUNK_BYTES;
    pool.set_keeps(true);
    let stored = |offset| pool.stored(offset, SLOT_BYTES, Some(&found));
    assert_eq!(stored(gone), (StoredChunk::Anew, SLOT_BYTES));
    assert_eq!(stored(gone - SLOT_BYTES), (StoredChunk::Already, SLOT_BYTES));
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
}

#[test]
fn forked_child_does_not_wait_for_helpers() {
    let _own = SHARED.lock();
    forked();
    let mut pool = StagingPool::none();
    pool.end();
    assert!(pool.begin(HUGE_PAGE_BYTES, 1, StagingPlace::Own));
    pool.end();
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
}

#[test]
fn skipped_chunks_are_freed() {
    let _own = SHARED.lock();
    let mut pool = kept();
    let mut found = digests(pool.bytes / SLOT_BYTES);
    const IN_CHUNK: usize = CHUNK_BYTES / SLOT_BYTES;
    found.all_mut()[IN_CHUNK - 9..2 * IN_CHUNK].fill(Digest::ZERO);
    PREFAULT.empty.clear();
    assert_eq!(pool.leave_out(&mut found), (9 + IN_CHUNK as u64) * SLOT_BYTES as u64);
    assert!(PREFAULT.empty.has(1) && !PREFAULT.empty.has(0) && !pool.leaves_out());
    let at = (IN_CHUNK - 9) * SLOT_BYTES;
    assert_eq!(pool.stored(at, pool.bytes, Some(&found)), (StoredChunk::Nowhere, 9 * SLOT_BYTES));
    pool.learn(found);
    assert!(pool.leaves_out());
    assert_eq!(pool.kept_bytes(), 9 * CHUNK_BYTES as u64);
    assert_eq!(pool.left_out(at, pool.bytes), (true, 9 * SLOT_BYTES));
    assert_eq!(pool.left_out(0, pool.bytes), (false, at));
    // The next copy-out copies the pool as a whole.
    pool.forget(0, pool.bytes);
    assert!(!pool.leaves_out());
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
    PREFAULT.empty.clear();
}

#[test]
fn a_large_pool_has_room_to_grow_in_whole_chunks() {
    let least = KEPT_CHUNKS * CHUNK_BYTES;
    assert_eq!(with_room_to_grow(least - SLOT_BYTES), least - SLOT_BYTES);
    assert_eq!(with_room_to_grow(least), least + CHUNK_BYTES);
    assert_eq!(with_room_to_grow(least + SLOT_BYTES), least + 2 * CHUNK_BYTES);
    assert_eq!(with_room_to_grow(MAX_BYTES), MAX_BYTES);
}

#[test]
fn runs_end_at_changes_and_at_the_chunk() {
    let _own = SHARED.lock();
    let mut pool = kept();
    let mut found = digests(pool.bytes / SLOT_BYTES);
    let run = |pool: &StagingPool, slot: usize, found: Option<&DigestTable>| {
        let (stored, bytes) = pool.stored(slot * SLOT_BYTES, pool.bytes, found);
        (stored == StoredChunk::Already, bytes / SLOT_BYTES)
    };
    const IN_CHUNK: usize = CHUNK_BYTES / SLOT_BYTES;
    assert_eq!(run(&pool, 1, Some(&found)), (true, IN_CHUNK - 1));
    assert_eq!(run(&pool, 1, None), (false, IN_CHUNK - 1));
    found.all_mut()[5] = Digest::of_address(0xbad);
    assert_eq!(run(&pool, 0, Some(&found)), (true, 5));
    assert_eq!(run(&pool, 5, Some(&found)), (false, 1));
    pool.forget(6 * SLOT_BYTES, 2 * SLOT_BYTES);
    assert_eq!(run(&pool, 5, Some(&found)), (false, 3));
    assert_eq!(run(&pool, 8, Some(&found)), (true, IN_CHUNK - 8));
    // Two unknown digests do not count as equal.
    found.all_mut()[6] = Digest::UNKNOWN;
    assert_eq!(run(&pool, 6, Some(&found)), (false, 2));
    pool.set_keeps(false);
    assert_eq!(run(&pool, 0, Some(&found)), (false, IN_CHUNK), "nothing is retained");
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
}

#[test]
fn its_pages_are_brought_in_near_the_device() {
    let _own = SHARED.lock();
    let _driver = Fake::new();
    let mut pool = StagingPool::none();
    assert!(pool.begin(HUGE_PAGE_BYTES, CONTEXT, StagingPlace::Own));
    pool.end();
    assert_eq!(PREFAULT.near(), numa::processors_of(0).unwrap_or([0; 128]));
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
}

/// A tainted pool must not be used again, because a copier that has the pool's file may still be
/// writing to it.
#[test]
fn tainted_pool_is_not_used_again() {
    let _own = SHARED.lock();
    let mut pool = kept();
    pool.taint();
    assert_eq!(
        pool.tidy(true, |_| false),
        TrimResult::Part,
        "a tainted pool is neither retained nor prefaulted"
    );
    let (start, bytes) = (pool.start, pool.bytes);
    assert!(pool.begin(HUGE_PAGE_BYTES, 1, StagingPlace::Own));
    pool.end();
    assert!(pool.start != start && pool.bytes < bytes && !pool.is_tainted());
    assert!(pool.known().is_empty(), "no digest is known");
    let fresh = pool.start;
    assert!(pool.begin(HUGE_PAGE_BYTES, 1, StagingPlace::Own));
    pool.end();
    assert_eq!(pool.start, fresh, "the fresh pool is used again");
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
}

#[test]
fn copier_is_left_before_its_pages_are_freed() {
    let _own = SHARED.lock();
    let discards: fn(&mut StagingPool) =
        |pool| assert_eq!(pool.tidy(true, |_| true), TrimResult::Part);
    let replaces: fn(&mut StagingPool) = |pool| {
        pool.taint();
        assert!(pool.begin(HUGE_PAGE_BYTES, 1, StagingPlace::Own));
        pool.end();
    };
    for gives_back in [discards, replaces] {
        let mut pool = kept();
        let (copier, ours) = UnixStream::pair().unwrap();
        fds::COPIER.set(TrackedFd::note(ours.into_raw_fd()).unwrap());
        prefault_ahead::tests::told(pool.bytes as u64);
        gives_back(&mut pool);
        assert!(fds::COPIER.get().is_none());
        assert_eq!((&copier).read(&mut [0]).unwrap(), 0, "the connection is closed");
        prefault_ahead::tests::told_nothing();
        fds::POOL.close();
        // SAFETY: the pool has mapped this range, and nothing uses it any more.
        unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
        PREFAULT.resident.clear();
    }
}

/// If a copy overwrites only a part of a slot, the digest of this slot must be removed. Copies
/// begin or end inside a slot if the size of a piece is not a multiple of the slot size.
#[test]
fn partial_copy_forgets_the_digests_it_touches() {
    let _own = SHARED.lock();
    let mut pool = kept();
    pool.forget(SLOT_BYTES / 2, SLOT_BYTES);
    let known = pool.known().iter().take(3).map(|slot| *slot != Digest::UNKNOWN);
    assert_eq!(known.collect::<Vec<_>>(), [false, false, true]);
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
}

fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let range = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        let ends = [from, to].map(|end| usize::from_str_radix(end, 16).unwrap());
        Some(ends[0]..ends[1])
    };
    maps.lines().filter_map(range).any(|range| range.contains(&address))
}

#[test]
fn registered_addresses_stay_mapped() {
    let _own = SHARED.lock();
    for is_held in [false, true] {
        let fake = Fake::new();
        let mut pool = StagingPool::none();
        assert!(pool.begin(HUGE_PAGE_BYTES, CONTEXT, StagingPlace::Own));
        pool.ready(0);
        pool.end();
        let (start, bytes) = (pool.start, pool.bytes);
        assert_eq!(fake.registered(), [start]);
        if is_held {
            fake.fail("cuMemHostUnregister", 0);
        }
        pool.taint();
        assert!(pool.begin(HUGE_PAGE_BYTES, CONTEXT, StagingPlace::Own));
        pool.end();
        assert_eq!(fake.registered().len(), usize::from(is_held));
        // If the addresses were released, other memory could be there already.
        assert!(!is_held || is_mapped(start));
        // SAFETY: the pools have mapped these ranges, and nothing uses them any more.
        unsafe {
            sys::unmap_private(pool.start as *mut u8, pool.bytes);
            if is_held {
                sys::unmap_private(start as *mut u8, bytes);
            }
        }
        PREFAULT.resident.clear();
    }
}

/// A copy must wait for the pages of its chunk. A helper that touches pages writes zeros, which
/// could destroy content that was copied there.
#[test]
fn copy_waits_for_the_pages_of_a_chunk() {
    let _own = SHARED.lock();
    let _fake = Fake::new();
    let mut pool = kept();
    pool.registered.set(0, true);
    PREFAULT.resident.set(0, false);
    PREFAULT.end();
    pool.ready(0);
    assert!(PREFAULT.resident.has(0));
    // SAFETY: the pool has mapped this range, and nothing uses it any more.
    unsafe { sys::unmap_private(pool.start as *mut u8, pool.bytes) };
    PREFAULT.resident.clear();
}
