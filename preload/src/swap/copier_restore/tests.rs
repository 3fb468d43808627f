use std::io::Read;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::MutexGuard;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::super::allocations::Allocation;
use super::super::backing::{back, property_on};
use super::super::copy::{copy_out, holds_imported};
use super::super::copy_in::copy_in;
use super::super::fake_driver::{CONTEXT, DEVICE, Fake, Held};
use super::super::prefault::tests::{SHARED, forget_all, options};
use super::super::{SWAP, locked};
use super::*;

const PIECE_BYTES: u64 = 8 << 20;
const PIECES: usize = 3;

/// A process that is copied out and has offered its content to a copier.
struct World {
    fake: Fake,
    copier: OwnedFd,
    _own: MutexGuard<'static, ()>,
}

impl World {
    fn new() -> World {
        let own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fake = Fake::new();
        SWAP.in_use.store(1, Ordering::Release);
        for content in 1..=PIECES as u64 {
            let piece = World::piece();
            let handle = back(&piece).unwrap();
            fake.write(piece.address, content);
            let piece = AllocationPiece { handle, ..piece };
            assert!(tables(|tables| tables.insert(Allocation {
                piece,
                asked_bytes: PIECE_BYTES,
                ..Allocation::default()
            })));
        }
        assert_eq!(copy_out(options(false, false), None), Ok(()));
        let (copier, ours) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .unwrap();
        fds::COPIER.set(TrackedFd::note(ours.into_raw_fd()).unwrap());
        OFFERED.store(1, Ordering::Relaxed);
        World { fake, copier, _own: own }
    }

    fn piece() -> AllocationPiece {
        let (bytes, property) = (PIECE_BYTES, property_on(DEVICE));
        let mut piece =
            AllocationPiece { bytes, property, context: CONTEXT, ..AllocationPiece::default() };
        let code = call!(mem_address_reserve(&raw mut piece.address, bytes as usize, 0, 0, 0));
        assert_eq!(code, result::SUCCESS);
        piece
    }

    fn says(&self, message: FromCopier, memory: Option<i32>) {
        sys::send(self.copier.as_raw_fd(), &message.encode(), memory).unwrap();
    }

    /// Plays the part of the copier: fills the memory of a piece, and sends it to the process.
    fn fills(&self, index: usize) {
        let piece = World::piece();
        let handle = back(&piece).unwrap();
        self.fake.write(piece.address, index as u64 + 1);
        let mut fd = -1_i32;
        let code = call!(mem_export((&raw mut fd).cast(), handle, POSIX_DESCRIPTOR, 0));
        assert_eq!(code, result::SUCCESS);
        assert!(unback(&AllocationPiece { handle, ..piece }));
        call!(mem_address_free(piece.address, piece.bytes as usize));
        self.says(FromCopier::Block { index: index as u32 }, Some(fd));
        sys::close(fd);
    }

    fn pieces(&self) -> Vec<AllocationPiece> {
        locked(|allocations| allocations.iter().map(|one| one.piece).collect())
    }

    /// Whether all memory is on the device, at the same addresses with the same contents, and the
    /// process holds no other object of the driver.
    fn is_resident(&self) -> bool {
        let right = |(n, piece): (usize, &AllocationPiece)| {
            piece.place == MemoryPlace::Device
                && self.fake.read(piece.address) == Some(n as u64 + 1)
        };
        let usual =
            Held { handles: PIECES, mappings: PIECES, ranges: PIECES, descriptors: 0, streams: 0 };
        self.pieces().iter().enumerate().all(right)
            && self.fake.held() == usual
            && fds::COPIER.get().is_none()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        hang_up();
        forget_all();
    }
}

#[test]
fn filled_memory_is_imported_without_a_copy() {
    let world = World::new();
    world.says(FromCopier::Begin, None);
    (0..PIECES).for_each(|index| world.fills(index));
    world.says(FromCopier::Filled, None);
    world.fake.fail("cuMemcpyHtoDAsync_v2", 0);
    assert_eq!((copy_in(None), world.is_resident(), holds_imported()), (Ok(()), true, true));
    assert!(world.fake.is_still_to_fail(), "nothing was copied");
}

/// If a driver call of the import fails for one piece, the content must be copied from the staging
/// pool. This must also succeed if memory cannot be unmapped.
#[test]
fn failed_import_is_copied_from_the_pool() {
    for call in ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"] {
        for (which, unmaps) in (0..PIECES).flat_map(|which| [(which, true), (which, false)]) {
            let world = World::new();
            world.says(FromCopier::Begin, None);
            (0..PIECES).for_each(|index| world.fills(index));
            world.says(FromCopier::Filled, None);
            world.fake.fail(call, which);
            if !unmaps {
                world.fake.fail("cuMemUnmap", 0);
            }
            assert_eq!(copy_in(None), Ok(()), "{call}, {which}, {unmaps}");
            assert!(world.is_resident(), "{call}, {which}, {unmaps}: {:?}", world.fake.held());
        }
    }
}

/// If the copier stops after any number of pieces, or sends an unexpected message, the process must
/// be restored without it.
#[test]
fn stopped_copier_is_not_needed() {
    for filled in 0..=PIECES {
        for odd in [None, Some(FromCopier::Copied), Some(FromCopier::Block { index: 7 })] {
            let world = World::new();
            world.says(FromCopier::Begin, None);
            (0..filled).for_each(|index| world.fills(index));
            odd.into_iter().for_each(|odd| world.says(odd, None));
            sys::shut_down(world.copier.as_raw_fd());
            assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{filled}, {odd:?}");
            assert!(!holds_imported());
        }
    }
}

#[test]
fn process_without_offer_does_not_import() {
    let _own = SHARED.lock();
    let (mut copier, own) = UnixStream::pair().unwrap();
    fds::COPIER.set(TrackedFd::note(own.into_raw_fd()).unwrap());
    assert!(!import_from_copier());
    let mut said = Vec::new();
    copier.read_to_end(&mut said).unwrap();
    assert!(
        said.is_empty() && fds::COPIER.get().is_none(),
        "the connection is closed without a message"
    );
}
