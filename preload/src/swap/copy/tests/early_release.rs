//! Copies out that free VRAM piece by piece, and copies in that wait for VRAM.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::atomic::AtomicBool,
};

use affinode_proto::wire::message::{AgentMessage, FRAME_BYTES};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};

use super::super::super::early_release::tests::PASSED_US;
use super::super::super::host_pressure::tests::{TAKEN_BY_OTHERS, all_but};
use super::super::super::prefault::{CHUNK_BYTES, PREFAULT, is_turned_back, tests::HELD_CHUNK};
use super::*;
use crate::{
    fds::{self, TrackedFd},
    sys,
};

/// The controller's end of the agent's connection.
pub struct Controller(OwnedFd);

impl Controller {
    pub fn connect() -> Controller {
        let (theirs, ours) =
            socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)
                .unwrap();
        let ours = std::os::fd::IntoRawFd::into_raw_fd(ours);
        fds::SOCKET.set(TrackedFd::note(ours).unwrap());
        Controller(theirs)
    }

    /// Number of messages that have arrived. All must be `Releasing`.
    fn count_releasing(&self) -> usize {
        let mut frame = [0; FRAME_BYTES];
        let mut next = || recv(self.0.as_raw_fd(), &mut frame, MsgFlags::MSG_DONTWAIT);
        let mut count = 0;
        while next() == Ok(FRAME_BYTES) {
            count += 1;
        }
        assert!(count == 0 || AgentMessage::decode(&frame) == Ok(AgentMessage::Releasing));
        count
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        fds::SOCKET.close();
    }
}

fn early() -> CopyOptions {
    CopyOptions { release_early: true, ..options(false, false) }
}

fn places(world: &World) -> Vec<MemoryPlace> {
    world.pieces().iter().map(|piece| piece.place).collect()
}

/// The fake driver panics if a piece is unmapped before its copy has ended.
#[test]
fn pieces_are_released_as_they_are_copied() {
    // With many queries that find the copies running, only the wait for the last copies ends them.
    for running in [0, 1, 2, 1_000] {
        let world = World::new();
        let controller = Controller::connect();
        world.fake.run_for(running);
        assert_eq!((copy_out(early(), None), world.is_copied_out()), (Ok(()), true), "{running}");
        assert_eq!((controller.count_releasing(), world.fake.events()), (1, 0), "{running}");
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{running}");
    }
}

#[test]
fn nothing_is_released_early_unless_ordered() {
    let world = World::new();
    let controller = Controller::connect();
    world.fake.fail("cuMemcpyDtoHAsync_v2", PIECES);
    assert_eq!(copy_out(options(false, false), None), Err(result::OUT_OF_MEMORY));
    assert!(world.is_resident() && controller.count_releasing() == 0);
}

/// If the driver fails after pieces were released, these pieces are copied out and the others are on
/// the device. Nothing is lost.
#[test]
fn failure_after_a_release_leaves_a_part() {
    for which in 0..PIECES {
        let world = World::new();
        let controller = Controller::connect();
        // Before the copies, the digests make one call of this function.
        world.fake.fail("cuMemcpyDtoHAsync_v2", 1 + which);
        assert_eq!(copy_out(early(), None), Err(result::OUT_OF_MEMORY));
        // Pieces are released from the second one on.
        let released = if which < 2 { 0 } else { which };
        let mut expected = vec![MemoryPlace::Pool; released];
        expected.resize(PIECES, MemoryPlace::Device);
        assert_eq!((places(&world), is_copied_out()), (expected, released > 0), "{which}");
        assert_eq!(controller.count_releasing(), usize::from(released > 0));
        assert_eq!((world.fake.events(), world.fake.held()), (0, held(PIECES - released)));
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{which}");
        assert_eq!((copy_out(early(), None), world.is_copied_out()), (Ok(()), true), "{which}");
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{which}");
    }
}

/// Without a controller no process waits for the VRAM, so nothing is released before all is copied.
#[test]
fn nothing_is_released_without_a_controller() {
    let world = World::new();
    world.fake.fail("cuMemcpyDtoHAsync_v2", PIECES);
    assert_eq!(copy_out(early(), None), Err(result::OUT_OF_MEMORY));
    assert!(world.is_resident() && !is_copied_out());
    let gone = Controller::connect();
    let socket = fds::SOCKET.get().unwrap();
    sys::shut_down(socket);
    world.fake.fail("cuMemcpyDtoHAsync_v2", PIECES);
    assert_eq!(copy_out(early(), None), Err(result::OUT_OF_MEMORY));
    assert!(world.is_resident() && !is_copied_out());
    drop(gone);
}

/// Without events the memory is released at the end.
#[test]
fn copy_without_events_releases_at_the_end() {
    for call in ["cuEventCreate", "cuEventRecord"] {
        for which in 0..PIECES {
            let world = World::new();
            let _controller = Controller::connect();
            world.fake.fail(call, which);
            assert_eq!((copy_out(early(), None), world.is_copied_out()), (Ok(()), true), "{call}");
            assert_eq!(world.fake.events(), 0, "{call}");
            assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{call}");
        }
    }
}

/// Without host memory the copy out fails before anything is released.
#[test]
fn nothing_is_released_before_pages_are_there() {
    let world = World::new();
    let controller = Controller::connect();
    TAKEN_BY_OTHERS.store(u64::MAX / 2, Ordering::Relaxed);
    let ended = copy_out(early(), None);
    TAKEN_BY_OTHERS.store(0, Ordering::Relaxed);
    assert_eq!(ended, Err(NO_HOST_MEMORY));
    assert!(world.is_resident() && controller.count_releasing() == 0);
}

/// Whether the release of the last copy out began while pages were missing.
static WAS_EARLY: AtomicBool = AtomicBool::new(false);

fn note_pages() {
    WAS_EARLY.store(HELD_CHUNK.load(Ordering::Acquire) != usize::MAX, Ordering::Release);
}

/// Copies out. The helpers get only the pages of the first chunk before the copy waits for another one.
/// `at_release` runs when the release begins.
fn copy_out_with_late_pages(world: &World, at_release: fn()) -> Result<(), u32> {
    HELD_CHUNK.store(1, Ordering::Release);
    world.fake.at_query(at_release);
    copy_out(early(), None)
}

/// A process whose content fills three chunks, with two pieces in each.
fn large() -> World {
    let world = World::with(6, CHUNK_BYTES as u64 / 2);
    WAS_EARLY.store(false, Ordering::Release);
    world
}

/// Memory is released while pages are missing if the node has much memory and the copy is soon over.
#[test]
fn pieces_are_released_while_pages_are_missing() {
    let world = large();
    let controller = Controller::connect();
    assert_eq!(
        (copy_out_with_late_pages(&world, note_pages), world.is_copied_out()),
        (Ok(()), true)
    );
    assert!(WAS_EARLY.load(Ordering::Acquire), "it waited for all pages");
    assert_eq!((controller.count_releasing(), world.fake.events()), (1, 0));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// The node has the memory that is missing, but not twice as much.
#[test]
fn scarce_host_memory_delays_the_release() {
    let world = large();
    let controller = Controller::connect();
    TAKEN_BY_OTHERS.store(all_but(5 << 28), Ordering::Relaxed);
    let ended = copy_out_with_late_pages(&world, note_pages);
    TAKEN_BY_OTHERS.store(0, Ordering::Relaxed);
    assert_eq!((ended, world.is_copied_out()), (Ok(()), true));
    assert!(!WAS_EARLY.load(Ordering::Acquire));
    assert_eq!(controller.count_releasing(), 1);
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// Other processes take the host memory after the release has begun. The process is partly copied out,
/// and nothing is lost.
#[test]
fn shortage_after_a_release_leaves_a_part() {
    let world = large();
    let controller = Controller::connect();
    let ended = copy_out_with_late_pages(&world, || {
        TAKEN_BY_OTHERS.store(u64::MAX / 2, Ordering::Relaxed);
    });
    TAKEN_BY_OTHERS.store(0, Ordering::Relaxed);
    assert_eq!(ended, Err(NO_HOST_MEMORY));
    assert!(is_copied_out() && !world.is_copied_out() && controller.count_releasing() == 1);
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    assert_eq!((copy_out(early(), None), world.is_copied_out()), (Ok(()), true));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// The controller may cancel a copy out while the message that it frees memory is on its way. The
/// copy out then continues, also if pages are missing.
#[test]
fn copy_that_releases_is_not_cancelled() {
    use affinode_proto::wire::{Phase, counters::NOT_WANTED};
    for (world, has_pages) in [(World::new as fn() -> World, true), (large, false)] {
        let world = world();
        let controller = Controller::connect();
        crate::process::with_page(|page| {
            assert_eq!((copy_out(early(), None), copy_in(None)), (Ok(()), Ok(())));
            while tidy(true) == TrimResult::Part {}
            page.set_phase(Phase::CopyingOut);
            page.generation.store(3, Ordering::Relaxed);
            // The first event is queried only after the release has begun.
            let cancel: fn() = || {
                note_pages();
                process::page().unwrap().turn_back_for_test(3 | NOT_WANTED);
            };
            assert_eq!(copy_out_with_late_pages(&world, cancel), Ok(()));
            assert!(world.is_copied_out() && (has_pages || WAS_EARLY.load(Ordering::Acquire)));
            assert!(page.is_turned_back() && controller.count_releasing() == 2);
            assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
        });
    }
}

/// The first pieces are zero, so they take no time. The copy of the others is not soon over, and nothing
/// is released before their pages are present.
#[test]
fn pieces_without_content_do_not_count_as_fast() {
    // The copy of two of six pieces took 0.9 s, or that of one of three 1.1 s.
    for (zero_pieces, passed_us, is_early) in [(0, 900_000, true), (3, 1_100_000, false)] {
        let world = large();
        let controller = Controller::connect();
        for piece in world.pieces().iter().take(zero_pieces) {
            for address in (piece.address..piece.address + piece.bytes).step_by(digest::SLOT_BYTES)
            {
                world.fake.write(address, 0);
            }
        }
        PASSED_US.store(passed_us, Ordering::Relaxed);
        HELD_CHUNK.store(if is_early { 1 } else { 2 }, Ordering::Release);
        world.fake.at_query(note_pages);
        let ended = copy_out(early(), None);
        PASSED_US.store(1_000, Ordering::Relaxed);
        assert_eq!(ended, Ok(()));
        assert_eq!(WAS_EARLY.load(Ordering::Acquire), is_early, "{zero_pieces}");
        assert!(controller.count_releasing() <= 1);
    }
}

/// A copy out that may release memory and has not done so can still be given up.
#[test]
fn commitment_ends_without_a_release() {
    use affinode_proto::wire::{Phase, counters::NOT_WANTED};
    let world = large();
    let _controller = Controller::connect();
    crate::process::with_page(|page| {
        // The event of the first group is not reached when the release may begin. Then the copy is given
        // up.
        page.generation.store(4, Ordering::Relaxed);
        page.set_phase(Phase::CopyingOut);
        world.fake.run_for(1);
        let cancel: fn() = || {
            process::page().unwrap().turn_back_for_test(4 | NOT_WANTED);
            HELD_CHUNK.store(usize::MAX, Ordering::Release);
        };
        assert_eq!(copy_out_with_late_pages(&world, cancel), Err(GIVEN_UP));
        assert!(world.is_resident());
    });
}

/// A copy out that was given up before releases nothing early.
#[test]
fn given_up_copy_is_not_committed() {
    use affinode_proto::wire::{Phase, counters::NOT_WANTED};
    let _world = large();
    crate::process::with_page(|page| {
        assert!(PREFAULT.commit());
        page.set_phase(Phase::CopyingOut);
        page.generation.store(3, Ordering::Relaxed);
        page.turn_back_for_test(3 | NOT_WANTED);
        assert!(!is_turned_back(), "a copy that goes on is not cancelled");
        PREFAULT.revoke();
        assert!(is_turned_back());
        assert!(!PREFAULT.commit());
        assert!(is_turned_back());
        page.turn_back_for_test(3);
        assert!(is_turned_back(), "host memory is short");
    });
}

#[test]
fn copy_in_waits_for_vram_if_ordered() {
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuCtxSetLimit"] {
        let world = World::new();
        world.fake.hold_primary();
        assert_eq!(copy_out(options(false, false), None), Ok(()));
        world.fake.fail(call, 0);
        assert_eq!((copy_in(None), world.is_copied_out()), (Err(result::OUT_OF_MEMORY), true));
        for which in [0, 0] {
            world.fake.fail(call, which);
        }
        assert_eq!(
            (copy_in(Some(sys::now_us() + 10_000_000)), world.is_resident()),
            (Ok(()), true),
            "{call}"
        );
        assert!(!world.fake.is_still_to_fail(), "{call}");
    }
}

/// The copy in stops to wait in time, and allocates nothing afterwards.
#[test]
fn copy_in_does_not_wait_beyond_its_time() {
    let world = World::new();
    assert_eq!(copy_out(options(false, false), None), Ok(()));
    assert_eq!(copy_in(Some(sys::now_us())), Err(result::OUT_OF_MEMORY));
    assert!(world.is_copied_out());
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// The pieces of a process are in several contexts. Whether a stream of one of them can be created
/// must be known before any memory is released.
#[test]
fn pieces_of_several_contexts_are_released() {
    const OTHER: usize = 0x78;
    let in_two_contexts = || {
        let world = World::new();
        let [.., last] = world.pieces()[..] else { panic!("three pieces") };
        tables(|tables| {
            let piece = tables.piece(AllocationId::Allocation(last.address)).unwrap();
            piece.context = OTHER;
        });
        world
    };
    let world = in_two_contexts();
    let controller = Controller::connect();
    assert_eq!((copy_out(early(), None), world.is_copied_out()), (Ok(()), true));
    assert_eq!((controller.count_releasing(), world.fake.events()), (1, 0));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    // The connection belongs to the test that holds the lock of the world.
    drop(controller);
    drop(world);
    let mut failed = 0;
    for which in 0..6 {
        let world = in_two_contexts();
        let controller = Controller::connect();
        world.fake.fail("cuStreamCreate", which);
        let ended = copy_out(early(), None);
        let told = controller.count_releasing();
        if ended.is_err() {
            failed += 1;
            assert!(world.is_resident() && told == 0, "{which}");
        }
    }
    assert!(failed >= 2, "{failed}");
}
