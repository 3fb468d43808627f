//! Tests with a scripted host pool.

use std::os::unix::fs::MetadataExt;

use affinode_proto::wire::message::CopyOptions;

use super::super::addresses;
use super::super::allocations::{Allocation, AllocationPiece, MemoryPlace};
use super::super::backing::{back, property_on, unback};
use super::super::copy::{copy_out, release_copied_out, tidy};
use super::super::copy_in::copy_in;
use super::super::fake_driver::{CONTEXT, DEVICE};
use super::super::host_pool::tests::TestPool;
use super::super::staging::TrimResult;
use super::super::{locked, tables};
use super::*;

const CHUNKS: usize = 2;
const PIECE_BYTES: u64 = CHUNK_BYTES as u64;
const TO_HOST_POOL: CopyOptions = CopyOptions {
    host_pool: true,
    keep: false,
    then_checkpoint: false,
    check: false,
    release_early: false,
};

/// A process with device memory of [`CHUNKS`] chunks, and a host pool that allocates at most this
/// number of chunks.
struct World {
    host: TestPool,
    addresses: Vec<u64>,
}

impl World {
    fn new(chunks: usize) -> World {
        let host = TestPool::connect(chunks, false);
        SWAP.in_use.store(1, Ordering::Release);
        SWAP.host_pool_prefault.set(NOTHING);
        let addresses = (1..=CHUNKS as u64).map(|content| allocate(&host, content)).collect();
        World { host, addresses }
    }

    /// Executes steps of the prefault until it is over.
    fn finish(&self) {
        while go_on() != PrefaultStep::Over {
            std::thread::yield_now();
        }
    }

    fn registered(&self) -> usize {
        self.host.fake.registered().len()
    }

    /// Whether all memory is on the device with its content.
    fn is_resident(&self) -> bool {
        let places = locked(|all| all.iter().map(|one| one.piece.place).collect::<Vec<_>>());
        let contents = self.addresses.iter().map(|address| self.host.fake.read(*address));
        places.iter().all(|place| *place == MemoryPlace::Device)
            && contents.eq((1..=CHUNKS as u64).map(Some))
    }

    /// Frees all unneeded memory, as the agent does. Returns whether none is left.
    fn tidy_all(&self) -> bool {
        while tidy(false) == TrimResult::Part {}
        self.registered() == 0 && self.host.allocated_bytes() == 0
    }
}

fn allocate(host: &TestPool, content: u64) -> u64 {
    let property = property_on(DEVICE);
    let mut piece = AllocationPiece {
        bytes: PIECE_BYTES,
        property,
        context: CONTEXT,
        ..AllocationPiece::default()
    };
    piece.address = addresses::reserve(PIECE_BYTES as usize).unwrap();
    piece.handle = back(&piece).unwrap();
    host.fake.write(piece.address, content);
    let asked_bytes = PIECE_BYTES;
    let allocation = Allocation { piece, asked_bytes, ..Allocation::default() };
    assert!(tables(|tables| tables.insert(allocation)));
    piece.address
}

#[test]
fn copy_out_uses_prefaulted_pages() {
    let mut world = World::new(CHUNKS);
    begin();
    world.finish();
    assert_eq!((world.registered(), world.host.allocated_bytes()), (CHUNKS, 2 * PIECE_BYTES));
    assert_eq!((tidy(false), world.registered()), (TrimResult::Kept, CHUNKS), "they stay");
    // The driver refuses to register more, and the host pool has no more chunks.
    world.host.fake.fail("cuMemHostRegister", 0);
    assert_eq!(copy_out(TO_HOST_POOL, None), Ok(()));
    assert!(!world.is_resident());
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    assert!(world.tidy_all(), "a copy out uses the prefault up");
    assert_eq!(world.host.requests(), CHUNKS, "each chunk was requested once");
}

/// A copy out does not wait until the prefault is complete.
#[test]
fn copy_out_may_begin_in_the_middle() {
    let world = World::new(2 * CHUNKS);
    begin();
    go_on();
    assert_eq!(copy_out(TO_HOST_POOL, None), Ok(()));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    assert!(world.tidy_all());
}

/// If the host pool has too little memory, what the process got is freed.
#[test]
fn incomplete_prefault_keeps_nothing() {
    let world = World::new(CHUNKS - 1);
    begin();
    world.finish();
    assert!(world.tidy_all());
    assert!(world.is_resident());
}

#[test]
fn ended_prefault_keeps_nothing() {
    for is_complete in [false, true] {
        let world = World::new(CHUNKS);
        begin();
        if is_complete {
            world.finish();
        }
        end();
        world.finish();
        assert!(world.tidy_all(), "{is_complete}");
    }
}

/// When another container needs the memory, or the node's memory is short, the pages are freed.
#[test]
fn pages_are_freed_when_memory_is_short() {
    use super::super::host_pressure::tests::TAKEN_BY_OTHERS;
    let world = World::new(2 * CHUNKS);
    begin();
    world.finish();
    while tidy(true) == TrimResult::Part {}
    assert_eq!((world.registered(), world.host.allocated_bytes()), (0, 0));
    begin();
    world.finish();
    assert_eq!(world.registered(), CHUNKS, "it can begin again");
    TAKEN_BY_OTHERS.store(u64::MAX / 2, Ordering::Relaxed);
    let is_free = world.tidy_all();
    begin();
    let has_begun = go_on() != PrefaultStep::Over;
    TAKEN_BY_OTHERS.store(0, Ordering::Relaxed);
    assert_eq!((is_free, has_begun), (true, false));
}

/// The program has freed device memory since the prefault. The offloaded process must not keep the
/// pages that its content does not need.
#[test]
fn copy_out_frees_pages_behind_its_content() {
    let world = World::new(CHUNKS);
    begin();
    world.finish();
    let address = world.addresses[1];
    let freed = locked(|all| all.remove(|one| one.piece.address == address)).unwrap();
    assert!(unback(&freed.piece));
    assert_eq!(copy_out(TO_HOST_POOL, None), Ok(()));
    assert_eq!(world.host.allocated_bytes(), PIECE_BYTES);
    assert_eq!(copy_in(None), Ok(()));
}

/// A checkpoint by the driver alone does not use the memory.
#[test]
fn checkpoint_without_a_copy_frees_the_memory() {
    let world = World::new(CHUNKS);
    begin();
    world.finish();
    release_copied_out(0);
    assert_eq!((world.registered(), world.host.allocated_bytes()), (0, 0));
}

/// A new connection has another file. The helpers must not use the earlier connection any more.
#[test]
fn new_connection_ends_the_prefault() {
    let world = World::new(CHUNKS);
    begin();
    host_pool::meet(None);
    assert!(!PREFAULT.is_busy());
    assert!(!is_on());
    assert!(world.tidy_all());
}

/// The pages must be in the file of the present connection. Pages of an earlier file would be charged
/// to the container, or could not be allocated at all.
#[test]
fn prefault_uses_the_present_file() {
    let mut world = World::new(CHUNKS);
    begin();
    world.finish();
    let earlier = world.host.reconnect(CHUNKS);
    begin();
    world.finish();
    assert_eq!(world.host.allocated_bytes(), CHUNKS as u64 * PIECE_BYTES);
    assert_eq!(earlier.metadata().unwrap().blocks(), 0, "nothing is in the earlier file");
    assert_eq!(copy_out(TO_HOST_POOL, None), Ok(()));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// The agent must not wait for a context that is ending.
#[test]
fn prefault_does_not_wait_for_an_ending_context() {
    let world = World::new(CHUNKS);
    let (tell, told) = std::sync::mpsc::channel();
    let told = SWAP.contexts_lock.hold(|| {
        std::thread::spawn(move || {
            begin();
            let _ = tell.send(is_on());
        });
        told.recv_timeout(std::time::Duration::from_secs(60))
    });
    assert_eq!(told, Ok(false));
    begin();
    assert!(is_on(), "the next order begins it");
    end();
    world.finish();
}
