use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use affinode_cuda_sys::{MemAllocationProp, result};
use affinode_proto::wire::copier::{FromCopier, ToCopier};
use affinode_proto::wire::message::FRAME_BYTES;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::super::allocations::Allocation;
use super::super::backing::property_on;
use super::super::copy::{assign, holds_imported, is_copied_out};
use super::super::fake_driver::{CONTEXT, DEVICE, Fake, Held};
use super::super::prefault::StagingPlace;
use super::super::prefault::tests::{SHARED, forget_all};
use super::super::{SWAP, locked, prefault_ahead};
use super::*;
use crate::fds;
use core::sync::atomic::Ordering;
use std::sync::MutexGuard;

const MIB: u64 = 1 << 20;
const PIECE_BYTES: u64 = 8 * MIB;
const PIECES: usize = 3;
const LATER_US: u64 = u64::MAX;

/// Kind of the memory that the process has at the beginning of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    /// The process can export the memory.
    Exportable,
    /// The memory was created without a handle type for exports, so the process cannot export it.
    Otherwise,
    /// The memory was imported from a copier.
    Imported,
}
use Made::{Exportable, Imported, Otherwise};

/// A process with memory on the device and with a connection to a copier, for tests.
struct World {
    fake: Fake,
    copier: OwnedFd,
    _own: MutexGuard<'static, ()>,
}

impl World {
    fn new(many: usize, made: Made) -> World {
        let own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fake = Fake::new();
        let (copier, ours) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .unwrap();
        fds::COPIER.set(TrackedFd::note(ours.into_raw_fd()).unwrap());
        SWAP.in_use.store(1, Ordering::Release);
        let world = World { fake, copier, _own: own };
        for n in 0..many {
            world.allocate(n as u64, made);
        }
        assign().unwrap();
        assert!(with_pool(|pool| pool.begin(
            (PIECES as u64 * PIECE_BYTES) as usize,
            CONTEXT,
            StagingPlace::Own
        )));
        world
    }

    fn allocate(&self, content: u64, made: Made) {
        let bytes = PIECE_BYTES;
        let mut piece = AllocationPiece {
            bytes,
            property: property_on(DEVICE),
            context: CONTEXT,
            ..AllocationPiece::default()
        };
        let code = call!(mem_address_reserve(&raw mut piece.address, bytes as usize, 0, 0, 0));
        assert_eq!(code, result::SUCCESS);
        // The driver decides by the memory itself whether it can be exported, not by the recorded
        // properties.
        let handle_types = if made == Exportable { piece.property.handle_types } else { 0 };
        let property = MemAllocationProp { handle_types, ..piece.property };
        piece.handle = back(&AllocationPiece { property, ..piece }).unwrap();
        match made {
            Exportable => {}
            Otherwise => piece.property = property,
            Imported => piece.imported = true,
        }
        self.fake.write(piece.address, content);
        assert!(tables(|tables| tables.insert(Allocation {
            piece,
            asked_bytes: bytes,
            ..Allocation::default()
        })));
    }

    fn hand_over(&self) -> Result<bool, u32> {
        with_pool(|pool| export_to_copier(pool, PIECES as u64 * PIECE_BYTES))
    }

    fn says(&self, message: FromCopier) {
        crate::sys::send(self.copier.as_raw_fd(), &message.encode(), None).unwrap();
    }

    /// Plays the part of the copier: receives all messages and closes their descriptors. Returns
    /// the number of exported pieces.
    fn hears(&self) -> usize {
        let (mut taken, mut frame) = (0, [0; FRAME_BYTES]);
        while let Ok((FRAME_BYTES, descriptor)) =
            crate::sys::receive(self.copier.as_raw_fd(), &mut frame)
        {
            let is_take = matches!(ToCopier::decode(&frame), Ok(ToCopier::CopyOut));
            assert_eq!(is_take, descriptor.is_some_and(|taken| self.has_come(&taken)));
            taken += usize::from(is_take);
        }
        taken
    }

    fn has_come(&self, descriptor: &Descriptor) -> bool {
        // SAFETY: the descriptor is open for as long as it is borrowed.
        self.fake.has_exported(unsafe { BorrowedFd::borrow_raw(descriptor.number()) })
    }

    fn pieces(&self) -> Vec<AllocationPiece> {
        locked(|allocations| allocations.iter().map(|one| one.piece).collect())
    }

    fn places(&self) -> Vec<MemoryPlace> {
        self.pieces().iter().map(|piece| piece.place).collect()
    }

    /// Whether all memory is on the device, at the same addresses with the same contents, and the
    /// process holds no other object of the driver.
    fn is_resident(&self) -> bool {
        let right = |(n, piece): (usize, &AllocationPiece)| {
            piece.place == MemoryPlace::Device
                && piece.shared.is_none()
                && self.fake.read(piece.address) == Some(n as u64)
        };
        self.pieces().iter().enumerate().all(right) && self.fake.held() == usual(PIECES)
    }

    fn has_left_the_copier(&self) -> bool {
        fds::COPIER.get().is_none() && with_pool(|pool| pool.is_tainted())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        copier_restore::hang_up();
        fds::POOL.close();
        for piece in self.pieces() {
            piece.shared.into_iter().for_each(TrackedFd::close);
        }
        forget_all();
    }
}

/// Returns the expected counts of driver objects while this number of pieces is mapped.
fn usual(many: usize) -> Held {
    Held { handles: many, mappings: many, ranges: many, descriptors: 0, streams: 0 }
}

/// Returns the expected counts of driver objects while all pieces are offloaded: only reserved
/// addresses, and this number of descriptors.
fn offloaded(descriptors: usize) -> Held {
    Held { handles: 0, mappings: 0, ranges: PIECES, descriptors, streams: 0 }
}

#[test]
fn export_is_held_by_descriptors_until_copied() {
    for made in [Exportable, Otherwise, Imported] {
        let world = World::new(PIECES, made);
        assert_eq!(world.hand_over(), Ok(true));
        assert_eq!(world.hears(), PIECES);
        assert_eq!((world.places(), bytes()), ([MemoryPlace::Handed; PIECES].into(), 24 * MIB));
        assert_eq!(world.fake.held(), offloaded(PIECES), "{made:?}");
        world.says(FromCopier::Copied);
        assert!(settle());
        assert_eq!((world.places(), bytes()), ([MemoryPlace::Pool; PIECES].into(), 0));
        assert_eq!(world.fake.held(), offloaded(0), "no reference to the memory is left");
        assert!(!with_pool(|pool| pool.is_tainted()) && fds::COPIER.get().is_some());
    }
}

/// A pool with shared chunks must not be offered to another copier. The pool's file has holes in
/// place of these chunks, and another copier would restore zeros from them.
#[test]
fn shared_chunks_are_offered_to_no_other_copier() {
    for shared in [false, true] {
        let world = World::new(PIECES, Exportable);
        assert_eq!(world.hand_over(), Ok(true));
        world.says(FromCopier::Copied);
        assert!(settle());
        world.hears();
        with_pool(|pool| {
            pool.say_shared(0, shared);
            copier_restore::offer(pool, PIECES as u64 * PIECE_BYTES);
            pool.say_shared(0, false);
        });
        assert_eq!(
            fds::COPIER.get().is_none(),
            shared,
            "the connection is closed if chunks are shared"
        );
    }
}

/// If the copier closes the connection before it reports the end of its copy, the memory must be
/// restored from the device. This also applies if the copier has sent another message before.
#[test]
fn uncopied_export_is_restored_from_the_device() {
    for (made, said) in
        [(Exportable, None), (Imported, None), (Exportable, Some(FromCopier::Ready))]
    {
        let world = World::new(PIECES, made);
        assert_eq!(world.hand_over(), Ok(true));
        world.hears();
        if let Some(said) = said {
            world.says(said);
        }
        crate::sys::shut_down(world.copier.as_raw_fd());
        assert!(!settle(), "{said:?}");
        assert_eq!(world.places(), [MemoryPlace::Handed; PIECES]);
        assert!(is_copied_out() && world.has_left_the_copier());
        assert_eq!(world.fake.held(), offloaded(PIECES));
        assert_eq!(restore_from_copier(), Ok(()));
        assert!(world.is_resident(), "{:?} {:?}", world.pieces(), world.fake.held());
        assert!(holds_imported(), "the memory is imported, so a checkpoint would lose the process");
    }
}

#[test]
fn abandoned_offload_taints_the_pool() {
    let world = World::new(PIECES, Exportable);
    assert_eq!(world.hand_over(), Ok(true));
    assert_eq!(restore_from_copier(), Ok(()));
    assert!(world.has_left_the_copier());
    world.hears();
    assert!(world.is_resident() && holds_imported());
}

/// Makes each driver call of the export fail at each piece. No memory may be lost, and no object
/// may be left over.
#[test]
fn failed_export_leaves_all_on_the_device() {
    let always = ["cuMemExportToShareableHandle"];
    let copies = [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuStreamCreate",
        "cuMemcpyDtoDAsync_v2",
        "cuStreamSynchronize",
        "cuMemExportToShareableHandle",
    ];
    for (made, calls) in
        [(Exportable, &always[..]), (Otherwise, &copies[..]), (Imported, &copies[..])]
    {
        for (call, which) in calls.iter().flat_map(|call| (0..PIECES).map(move |n| (call, n))) {
            let world = World::new(PIECES, made);
            world.fake.fail(call, which);
            assert_eq!(world.hand_over(), Ok(false), "{call}, {which}");
            assert!(!world.fake.is_still_to_fail(), "{call}, {which}");
            assert_eq!(world.hears(), which);
            assert!(world.is_resident(), "{call}, {which}: {:?}", world.fake.held());
            assert!(
                world.has_left_the_copier(),
                "the copier is connected and may write to the pool: {call}, {which}"
            );
            assert_eq!(holds_imported(), made == Imported || which > 0);
        }
    }
}

/// If exported memory cannot be mapped again at the first attempt, its descriptors must be kept for
/// the next attempt.
#[test]
fn failed_take_back_is_repeated() {
    for call in ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"] {
        for which in 0..PIECES {
            let world = World::new(PIECES, Exportable);
            assert_eq!(world.hand_over(), Ok(true));
            world.fake.fail(call, which);
            assert_eq!(restore_from_copier(), Err(result::OUT_OF_MEMORY), "{call}, {which}");
            let handed = PIECES - which;
            assert_eq!(bytes(), handed as u64 * PIECE_BYTES);
            world.hears();
            assert_eq!(
                world.fake.held(),
                Held { ranges: PIECES, descriptors: handed, ..usual(which) }
            );
            assert_eq!(restore_from_copier(), Ok(()));
            assert!(world.is_resident(), "{call}, {which}");
        }
    }
}

/// If imported memory could not be released, the process must report that it holds imported memory.
/// The driver could not restore a process that was checkpointed with such memory.
#[test]
fn unreleased_import_is_reported() {
    let world = World::new(1, Exportable);
    assert_eq!(world.hand_over(), Ok(true));
    world.fake.fail("cuMemMap", 0);
    world.fake.fail("cuMemRelease", 0);
    assert_eq!(restore_from_copier(), Err(result::OUT_OF_MEMORY));
    assert!(!world.fake.is_still_to_fail());
    assert_eq!((bytes(), holds_imported()), (PIECE_BYTES, true));
}

#[test]
fn a_piece_that_cannot_be_unmapped_stays() {
    let world = World::new(PIECES, Exportable);
    world.fake.fail("cuMemUnmap", 1);
    assert_eq!(world.hand_over(), Ok(false));
    world.hears();
    assert!(world.is_resident() && world.has_left_the_copier());
}

#[test]
fn export_needs_a_copier_in_time() {
    let world = World::new(PIECES, Imported);
    let mut order = AllocationLayout::of(AllocationPiece::leaves).unwrap();
    let (id, piece) = order.piece(0).unwrap();
    assert!(hand(id, &piece, sys::now_us()).is_none());
    assert!(world.is_resident() && world.hears() == 0);
    copier_restore::hang_up();
    assert!(hand(id, &piece, LATER_US).is_none());
    assert_eq!(world.hand_over(), Ok(false));
    assert!(world.is_resident());
}

/// The wait for a copier that no longer reads its socket must be limited.
#[test]
fn unread_socket_is_awaited_until_deadline() {
    let world = World::new(PIECES, Exportable);
    let socket = fds::COPIER.get().unwrap();
    while crate::sys::send(socket, &ToCopier::Checkpointed.encode(), None).is_ok() {}
    assert!(copier_restore::send_piece(world.copier.as_raw_fd(), sys::now_us()).is_none());
}

/// An export may use at most a quarter of the descriptors that the process may open. The other
/// three quarters are left to the application.
#[test]
fn export_uses_a_quarter_of_the_descriptors() {
    const MANY: usize = 300;
    let world = World::new(MANY, Exportable);
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    for (limit, fits) in [(4 * MANY as u64 - 1, false), (4 * MANY as u64, true)] {
        setrlimit(Resource::RLIMIT_NOFILE, limit.min(hard), hard).unwrap();
        let handed = with_pool(|pool| {
            pool.end();
            // The test reads at once, because a socket buffer has less space than all messages
            // need.
            std::thread::scope(|scope| {
                let handed = scope.spawn(|| export_all(pool, 0).is_some());
                while !handed.is_finished() {
                    world.hears();
                }
                handed.join().unwrap()
            })
        });
        assert_eq!(handed, fits);
    }
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert_eq!(world.fake.held().descriptors, MANY);
}

#[test]
fn copier_is_ready_for_the_announced_bytes() {
    let world = World::new(PIECES, Exportable);
    let own = TrackedFd::note(fds::COPIER.get().unwrap());
    assert!(!prefault_ahead::is_ready(0), "nothing was prefaulted");
    prefault_ahead::tests::told(PIECE_BYTES);
    assert!(!prefault_ahead::is_ready(PIECE_BYTES));
    world.says(FromCopier::Ready);
    assert!(!prefault_ahead::is_ready(PIECE_BYTES + 1));
    assert!(prefault_ahead::is_ready(PIECE_BYTES) && prefault_ahead::is_told());
    assert_eq!(fds::COPIER.owned(), own);
    // The pool's pages are no longer those that the copier has registered.
    prefault_ahead::is_spoilt();
    assert!(
        fds::COPIER.get().is_none() && !prefault_ahead::is_told() && !prefault_ahead::is_ready(0)
    );
}
