//! Tests of processes that announce false sizes. The copier checks announcements against the
//! controller's limits.

use affinode_proto::wire::copier::{MAX_PIECES, PIECES_A_FRAME};
use rustix::fs::SealFlags;

use super::*;

/// Asserts that the copier refuses a message. The process has a limit of 4 units and a file of 8
/// units.
fn refuses(message: ToCopier, why: &str) {
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach(1, 4 * UNIT, 0);
    agent.say(message, Some(&content_file(&pattern(8 * UNIT, 1))));
    assert_ended(&mut testbed, &mut agent, why);
    assert_serves(&mut testbed);
}

#[test]
fn claim_beyond_the_known_vram_is_refused() {
    refuses(copied_out(5 * UNIT, 1), "copied_out");
    refuses(ToCopier::Prefaulted { bytes: 4 * UNIT + 1, uuid: fake::UUID }, "prepared");
    refuses(copied_out(u64::MAX, 1), "all there is");
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach(1, 4 * UNIT, 0);
    agent.leave(&pieces(&[4]), 0, &content_file(&pattern(4 * UNIT, 1)));
    testbed.settle().unwrap();
    assert!(!agent.is_hung_up(), "no more than it may have");
}

#[test]
fn claim_of_another_device_is_refused() {
    let uuid = [1; 16];
    refuses(ToCopier::Prefaulted { bytes: UNIT, uuid }, "prepared");
    refuses(ToCopier::CopiedOut { bytes: UNIT, rest_bytes: 0, pieces: 1, uuid }, "copied_out");
}

#[test]
fn number_of_pieces_is_bounded() {
    let most = MAX_PIECES as u32;
    refuses(copied_out(UNIT, 0), "none");
    refuses(copied_out(UNIT, most + 1), "too many");
    refuses(copied_out(UNIT, u32::MAX), "all there are");
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach(1, 4 * UNIT, 0);
    agent.say(copied_out(UNIT, most), Some(&content_file(&pattern(UNIT, 1))));
    testbed.settle().unwrap();
    assert!(!agent.is_hung_up(), "the most there may be");
}

#[test]
fn pieces_that_are_not_as_announced_are_refused() {
    let piece = |units| Piece { bytes: units * UNIT, rdma: false };
    let none = ToCopier::Chunks { many: 0, words: [1; PIECES_A_FRAME] };
    let empty = ToCopier::Chunks { many: 1, words: [0; PIECES_A_FRAME] };
    let too_many = ToCopier::Chunks { many: 3, words: [1; PIECES_A_FRAME] };
    for (frames, why) in [
        (vec![one_of_the_list(piece(1)), one_of_the_list(piece(1))], "less than was said"),
        (vec![one_of_the_list(piece(2)), one_of_the_list(piece(2))], "more than was said"),
        (vec![none], "none"),
        (vec![empty], "of no size"),
        (vec![too_many], "more pieces than were said"),
    ] {
        let mut testbed = Testbed::new();
        let mut agent = testbed.attach(1, 4 * UNIT, 0);
        agent.say(copied_out(3 * UNIT, 2), Some(&content_file(&pattern(3 * UNIT, 1))));
        for frame in frames {
            agent.say(frame, None);
        }
        assert_ended(&mut testbed, &mut agent, why);
    }
}

#[test]
fn grant_below_the_claim_ends_the_process() {
    for (granted_bytes, fits) in
        [(COPIED_OUT_BYTES, true), (COPIED_OUT_BYTES - 1, false), (0, false)]
    {
        let (mut testbed, mut agent, _) = reach(Stage::Held);
        agent.say(ToCopier::Restoring, None);
        testbed.fill(1, granted_bytes);
        if fits {
            testbed.settle().unwrap();
            assert_eq!(agent.words(), [FromCopier::Begin]);
            assert_eq!(fake::with(|fake| fake.made_bytes()), COPIED_OUT_BYTES);
        } else {
            assert_ended(&mut testbed, &mut agent, "a grant of less");
            let made = fake::with(|fake| fake.calls().contains(&"mem_create"));
            assert!(!made, "memory was made beyond the grant");
        }
    }
}

#[test]
fn early_grant_bounds_a_later_claim() {
    for (granted_bytes, fits) in [(2 * UNIT, true), (2 * UNIT - 1, false), (0, false)] {
        let mut testbed = Testbed::new();
        let mut agent = testbed.attach(1, 4 * UNIT, 0);
        testbed.fill(1, granted_bytes);
        testbed.settle().unwrap();
        agent.leave(&pieces(&[2]), 0, &content_file(&pattern(2 * UNIT, 1)));
        testbed.settle().unwrap();
        agent.say(ToCopier::Restoring, None);
        if fits {
            testbed.settle().unwrap();
            assert_eq!(fake::with(|fake| fake.made_bytes()), 2 * UNIT);
        } else {
            assert_ended(&mut testbed, &mut agent, "claimed more after the grant");
            assert!(fake::with(|fake| !fake.calls().contains(&"mem_create")));
        }
    }
}

#[test]
fn memory_file_that_does_not_fit_is_refused() {
    let content = pattern(3 * UNIT, 1);
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let (pipe, _end) = std::io::pipe().unwrap();
    let pipe = OwnedFd::from(pipe);
    for (file, why) in [
        (memory_file(&content, all.difference(SealFlags::SHRINK)), "it could shrink"),
        (memory_file(&content, all.difference(SealFlags::GROW)), "it could grow"),
        (memory_file(&content, SealFlags::empty()), "no seal"),
        (memory_file(&content[..2 << 20], all), "smaller than what is in it"),
        (std::fs::File::open("/").unwrap().into(), "a folder"),
        (std::fs::File::open("/dev/zero").unwrap().into(), "a device"),
        (std::fs::File::open("/proc/self/maps").unwrap().into(), "a file of the kernel's"),
        (pipe, "a pipe"),
    ] {
        for message in
            [copied_out(3 * UNIT, 1), ToCopier::Prefaulted { bytes: 3 * UNIT, uuid: fake::UUID }]
        {
            let mut testbed = Testbed::new();
            let mut agent = testbed.attach(1, 4 * UNIT, 0);
            agent.say(message, Some(&file));
            assert_ended(&mut testbed, &mut agent, why);
        }
    }
}

#[test]
fn hole_of_a_memory_file_is_not_registered() {
    for hole in [0, 2 * UNIT - 4096, 3 * UNIT - 4096] {
        let mut testbed = Testbed::new();
        let mut agent = testbed.attach(1, 4 * UNIT, 0);
        let file = content_file(&pattern(3 * UNIT, 1));
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, flags, hole, 4096).unwrap();
        agent.leave(&pieces(&[3]), 0, &file);
        assert_ended(&mut testbed, &mut agent, "a page is missing");
        assert!(fake::with(|fake| !fake.calls().contains(&"host_register")));
    }
}

#[test]
fn no_more_is_registered_than_was_claimed() {
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach(1, 4 * UNIT, 0);
    agent.leave(&pieces(&[1]), 0, &content_file(&pattern(8 * UNIT, 1)));
    testbed.settle().unwrap();
    assert_eq!(fake::with(|fake| fake.registered_bytes()) as u64, UNIT);
    assert!(!agent.is_hung_up());
}

#[test]
fn prefaulted_file_bounds_what_is_copied() {
    for (units, fits) in [([1, 2], true), ([1, 1], true), ([2, 2], false)] {
        let mut testbed = Testbed::new();
        let mut agent = testbed.attach(1, 8 * UNIT, 0);
        let file = content_file(&pattern(8 * UNIT, 1));
        agent.say(ToCopier::Prefaulted { bytes: 3 * UNIT, uuid: fake::UUID }, Some(&file));
        agent.copy_out(&pieces(&units), 0, None);
        testbed.settle().unwrap();
        assert_eq!(agent.is_hung_up(), !fits, "{units:?}");
    }
    let (mut testbed, mut agent, file) = reach(Stage::Prepared);
    agent.say(copied_out(COPIED_OUT_BYTES, 2), Some(&file));
    assert_ended(&mut testbed, &mut agent, "two files");
}
