//! Tests of the order of messages. The copier copies memory back into VRAM (a fill) only after the
//! controller's grant and the process's Restoring. It accepts a message only in the stages to which
//! the message belongs.

use std::os::fd::AsFd;

use super::*;

#[test]
fn neither_grant_nor_restore_alone_begins_a_fill() {
    let (mut testbed, mut agent, _) = reach(Stage::Held);
    testbed.fill(1, COPIED_OUT_BYTES);
    testbed.settle().unwrap();
    assert_eq!((agent.words(), fake::with(|fake| fake.made_bytes())), (vec![], 0), "a grant");
    agent.say(ToCopier::Restoring, None);
    testbed.settle().unwrap();
    assert_eq!(agent.words(), [FromCopier::Begin]);

    let (mut testbed, mut agent, _) = reach(Stage::Held);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    assert_eq!((agent.words(), fake::with(|fake| fake.made_bytes())), (vec![], 0), "a restore");
    testbed.fill(1, COPIED_OUT_BYTES);
    testbed.settle().unwrap();
    assert_eq!(agent.words().first(), Some(&FromCopier::Begin));
}

#[test]
fn grant_of_one_process_fills_no_other() {
    let (mut testbed, mut agent, file) = reach(Stage::Held);
    let mut other = testbed.attach(2, COPIED_OUT_BYTES, 0);
    other.leave(&pieces(&UNITS), 0, &file);
    testbed.settle().unwrap();
    other.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restoring, None);
    testbed.fill(2, COPIED_OUT_BYTES);
    testbed.settle().unwrap();
    assert_eq!((agent.words(), other.words()), (vec![], vec![FromCopier::Begin]));
    assert_eq!(fake::with(|fake| fake.made_bytes()), COPIED_OUT_BYTES);
}

#[test]
fn grant_before_all_is_registered_is_no_fill() {
    let (mut testbed, mut agent, _) = reach(Stage::Listed);
    testbed.fill(1, COPIED_OUT_BYTES);
    agent.say(ToCopier::Restoring, None);
    assert_ended(&mut testbed, &mut agent, "its memory is not registered yet");
    assert!(fake::with(|fake| !fake.calls().contains(&"mem_create")));
}

/// Sends each message, with and without a descriptor, at each stage. A message that the copier does
/// not accept ends the session of its process, and no other session.
#[test]
fn message_in_a_wrong_stage_ends_the_process() {
    use Stage::*;
    let messages = [
        ToCopier::Prefaulted { bytes: UNIT, uuid: fake::UUID },
        copied_out(UNIT, 1),
        one_of_the_list(Piece { bytes: 2 * UNIT, rdma: false }),
        ToCopier::CopyOut,
        ToCopier::Checkpointed,
        ToCopier::Restoring,
        ToCopier::Restored,
        ToCopier::Mapped { chunk: 0, taken: true },
        ToCopier::Mapped { chunk: 0, taken: false },
    ];
    for stage in STAGES {
        for message in messages {
            for with_descriptor in [false, true] {
                let is_taken = match (message, with_descriptor) {
                    (ToCopier::Prefaulted { .. }, true) => stage == New,
                    (ToCopier::CopiedOut { .. }, true) => stage == New,
                    (ToCopier::CopiedOut { .. }, false) => stage == Prepared,
                    (ToCopier::Chunks { .. }, false) => stage == Listing,
                    (ToCopier::CopyOut, true) => matches!(stage, Listed | Taking | Taken),
                    (ToCopier::Checkpointed, false) => matches!(stage, Listed | Taken),
                    (ToCopier::Restoring, false) => stage == Held,
                    (ToCopier::Restored, false) => stage == Filling,
                    _ => false,
                };
                let (mut testbed, mut agent, file) = reach(stage);
                let memory = fake::made_by_another(COPIED_OUT_BYTES as usize, 1).unwrap();
                let memory_of_piece =
                    |units| fake::made_by_another(units * UNIT as usize, 1).unwrap();
                let descriptor = match message {
                    ToCopier::CopyOut if stage == Taking => memory_of_piece(2),
                    ToCopier::CopyOut if matches!(stage, Listed | Taken) => memory_of_piece(1),
                    ToCopier::CopyOut => memory,
                    _ => file.as_fd().try_clone_to_owned().unwrap(),
                };
                agent.say(message, with_descriptor.then_some(&descriptor));
                let why =
                    format!("{message:?}, with a descriptor: {with_descriptor}, at {stage:?}");
                if is_taken {
                    testbed.settle().unwrap();
                    assert!(!agent.is_hung_up(), "{why}");
                } else {
                    assert_ended(&mut testbed, &mut agent, &why);
                }
            }
        }
    }
}

#[test]
fn restore_is_announced_once() {
    let (mut testbed, mut agent, _) = reach(Stage::Held);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restoring, None);
    assert_ended(&mut testbed, &mut agent, "restoring twice");
    let (mut testbed, mut agent, _) = reach(Stage::Filling);
    agent.say(ToCopier::Restored, None);
    agent.say(ToCopier::Restored, None);
    assert_ended(&mut testbed, &mut agent, "restored twice");
}

#[test]
fn packet_that_is_no_frame_ends_the_process() {
    for packet in [&[0_u8; 1][..], &[0; 127], &[0; 128], &[0xff; 128]] {
        let (mut testbed, mut agent, _) = reach(Stage::Held);
        agent.say_packet(packet);
        assert_ended(&mut testbed, &mut agent, "no frame");
        assert_serves(&mut testbed);
    }
}

/// Checks that a process that sends messages without pause does not delay the other processes.
#[test]
fn frames_of_one_process_are_read_in_portions() {
    let (mut testbed, mut agent, _) = reach(Stage::Listing);
    // Every message is accepted, except the one that exceeds the announced list.
    let mut list = testbed.attach(2, 4096 * UNIT, 0);
    list.say(copied_out(100 * UNIT, 100), Some(&content_file(&pattern(100 * UNIT, 1))));
    for _ in 0..100 {
        list.say(one_of_the_list(Piece { bytes: UNIT, rdma: false }), None);
    }
    testbed.turn().unwrap();
    list.say(ToCopier::Checkpointed, None);
    agent.say(ToCopier::Checkpointed, None);
    testbed.turn().unwrap();
    assert!(agent.is_hung_up(), "it is received, whatever the other has sent");
    testbed.settle().unwrap();
    assert!(!list.is_hung_up());
}
