use std::sync::MutexGuard;

use super::super::backing::property_on;
use super::super::fake_driver::{CONTEXT, DEVICE, Fake, Held};
use super::super::filling::{FILLING, tests::SHARED};
use super::super::locked;
use super::super::table::{Allocation, Allocations};
use super::*;

const PIECE_BYTES: u64 = 8 << 20;
const PIECES: usize = 3;

/// A process with some memory on the device, and no way to a vault.
struct World {
    fake: Fake,
    _own: MutexGuard<'static, ()>,
}

impl World {
    fn new() -> World {
        let own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let world = World { fake: Fake::new(), _own: own };
        CARRY.in_use.store(1, Ordering::Release);
        for content in 1..=PIECES as u64 {
            let (bytes, property) = (PIECE_BYTES, property_on(DEVICE));
            let mut piece = Piece { bytes, property, context: CONTEXT, ..Piece::default() };
            let code = call!(mem_address_reserve(&raw mut piece.address, bytes as usize, 0, 0, 0));
            assert_eq!(code, result::SUCCESS);
            piece.handle = back(&piece).unwrap();
            world.fake.write(piece.address, content);
            assert!(tables(|tables| tables.insert(Allocation {
                piece,
                asked_bytes: bytes,
                ..Allocation::default()
            })));
        }
        world
    }

    fn pieces(&self) -> Vec<Piece> {
        locked(|allocations| allocations.iter().map(|one| one.piece).collect())
    }

    /// On the device, at the same addresses with the same contents, and nothing else held.
    fn is_home(&self) -> bool {
        let right = |(n, piece): (usize, &Piece)| {
            piece.place == Place::Device && self.fake.read(piece.address) == Some(n as u64 + 1)
        };
        self.pieces().iter().enumerate().all(right) && self.fake.held() == held(PIECES)
    }

    fn is_away(&self) -> bool {
        let away = |piece: &Piece| piece.place == Place::Pool;
        self.pieces().iter().all(away) && self.fake.held() == held(0)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        locked(|allocations| *allocations = Allocations::empty());
        with_pool(|pool| {
            pool.end();
            *pool = Pool::none();
        });
        FILLING.resident.clear();
        CARRY.in_use.store(0, Ordering::Release);
    }
}

/// What is held where so many pieces are mapped.
fn held(many: usize) -> Held {
    Held { handles: many, mappings: many, ranges: PIECES, descriptors: 0, streams: 0 }
}

#[test]
fn what_leaves_comes_home_as_it_was() {
    let world = World::new();
    assert_eq!((park(false, false, None), world.is_away()), (Ok(()), true));
    assert_eq!((unpark(), world.is_home()), (Ok(()), true));
}

/// Each of the driver's calls, at each piece.
#[test]
fn of_what_cannot_be_copied_out_nothing_has_left() {
    for call in ["cuStreamCreate", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"] {
        for which in 0..if call == "cuMemcpyDtoHAsync_v2" { PIECES } else { 1 } {
            let world = World::new();
            world.fake.fail(call, which);
            assert_eq!(park(true, false, None), Err(result::OUT_OF_MEMORY), "{call}, {which}");
            assert!(world.is_home() && !is_parked(), "{call}, {which}");
            assert_eq!((park(true, false, None), world.is_away()), (Ok(()), true));
            assert_eq!((unpark(), world.is_home()), (Ok(()), true), "{call}, {which}");
        }
    }
}

#[test]
fn what_cannot_be_brought_home_is_in_the_pool_and_comes_later() {
    let each_piece = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync_v2"];
    let once = ["cuStreamCreate", "cuStreamSynchronize"];
    let calls = each_piece.iter().flat_map(|call| (0..PIECES).map(move |which| (*call, which)));
    for (call, which) in calls.chain(once.map(|call| (call, 0))) {
        let world = World::new();
        assert_eq!(park(false, false, None), Ok(()));
        world.fake.fail(call, which);
        assert_eq!(unpark(), Err(result::OUT_OF_MEMORY), "{call}, {which}");
        assert!(!world.fake.is_still_to_fail() && world.is_away(), "{call}, {which}");
        assert_eq!((unpark(), world.is_home()), (Ok(()), true), "{call}, {which}");
    }
}

/// And the same where what was mapped cannot be unmapped again.
#[test]
fn what_cannot_be_unmapped_again_is_filled_the_next_time() {
    for call in ["cuMemSetAccess", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"] {
        for (which, unmap) in [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)] {
            let world = World::new();
            assert_eq!(park(false, false, None), Ok(()));
            world.fake.fail(call, if call == "cuStreamSynchronize" { 0 } else { which });
            world.fake.fail("cuMemUnmap", unmap);
            assert_eq!(unpark(), Err(result::OUT_OF_MEMORY), "{call}, {which}, {unmap}");
            let again = (unpark(), world.is_home());
            assert_eq!(again, (Ok(()), true), "{call}, {which}, {unmap}: {:?}", world.fake.held());
        }
    }
}

/// Its end waits for the work in it, as long as that takes.
#[test]
fn what_is_given_back_in_passing_waits_for_no_context_that_ends() {
    let _world = World::new();
    let (tell, told) = std::sync::mpsc::channel();
    let told = CARRY.contexts_lock.hold(|| {
        std::thread::spawn(move || {
            ahead::tests::filling(PIECE_BYTES);
            let both = (tidy(), ahead::go_on());
            ahead::tests::told_nothing();
            let _ = tell.send(both);
        });
        told.recv_timeout(std::time::Duration::from_secs(60))
    });
    assert_eq!(told, Ok((Tidied::Kept, true)));
}
