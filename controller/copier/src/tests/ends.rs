//! Tests of what the copier releases when a process or the controller ends. No object of that
//! process, or of the copier, may remain.

use super::*;

#[test]
fn process_that_dies_at_any_stage_leaves_nothing() {
    for stage in STAGES {
        for copies_wait in [false, true] {
            let (mut testbed, mut agent, _) = reach(stage);
            if copies_wait {
                fake::with(fake::Fake::copies_wait);
            }
            // The process's last message of this stage may not have arrived yet.
            if stage == Stage::Taking {
                take(&agent, &pieces(&UNITS)[1..]);
            }
            agent.hang_up();
            testbed.settle().unwrap();
            assert_left(&mut testbed, &format!("{stage:?}"));
            assert_serves(&mut testbed);
        }
    }
}

#[test]
fn attached_again_process_replaces_old_session() {
    for stage in STAGES {
        let (mut testbed, mut agent, file) = reach(stage);
        testbed.take_reports();
        let mut again = testbed.attach(1, COPIED_OUT_BYTES, 0);
        testbed.settle().unwrap();
        assert!(agent.is_hung_up() && !again.is_hung_up());
        let left = CopierReport::Detached { process: 1 };
        assert!(!testbed.take_reports().contains(&left), "the controller knows");
        again.leave(&pieces(&UNITS), 0, &file);
        testbed.settle().unwrap();
        assert_eq!(
            testbed.take_reports().last(),
            Some(&CopierReport::Registered { process: 1, bytes: COPIED_OUT_BYTES }),
            "{stage:?}"
        );
        again.hang_up();
        testbed.settle().unwrap();
        assert_left(&mut testbed, &format!("{stage:?}"));
    }
}

#[test]
fn attach_without_a_socket_ends_the_old_process() {
    let (mut testbed, mut agent, _) = reach(Stage::Held);
    testbed.order(CopierOrder::Attach { process: 1, most_bytes: 0, domain: 0 }, None);
    testbed.settle().unwrap();
    assert!(agent.is_hung_up());
    testbed.assert_nothing_is_left();
}

#[test]
fn copier_without_its_controller_leaves_nothing() {
    for stage in STAGES {
        let (mut testbed, mut agent, _) = reach(stage);
        testbed.end();
        assert!(agent.is_hung_up());
        testbed.assert_nothing_is_left();
    }
}

#[test]
fn copier_ends_when_its_controller_hangs_up() {
    let (mut testbed, _agent, _) = reach(Stage::Held);
    assert!(testbed.runs());
    testbed.hang_up();
    assert_eq!(testbed.turn().unwrap(), None);
    assert!(!testbed.runs());
}

#[test]
fn copier_ends_on_invalid_controller_frame() {
    let (mut testbed, _agent, _) = reach(Stage::Held);
    testbed.order_bytes(&[7; 128]);
    assert!(matches!(testbed.turn(), Err(CopierError::Frame(_))));
    testbed.assert_nothing_is_left();
}

#[test]
fn filled_process_that_stays_is_ended() {
    let (mut testbed, mut agent, _) = reach(Stage::Filled);
    assert_eq!(agent.words().last(), Some(&FromCopier::Filled));
    testbed.wait(9 * SECOND);
    assert_eq!(testbed.settle().unwrap(), Some(SessionStep::Later));
    assert!(!agent.is_hung_up(), "it is waited for");
    testbed.wait(2 * SECOND);
    assert_ended(&mut testbed, &mut agent, "it keeps the memory of others waiting");
}

/// A process exits while the copier copies the memory of another process back into VRAM. The copier
/// must unregister the memory of the exited process only after the copies. The driver executes one
/// call at a time, and to unregister memory takes as long as to copy it.
#[test]
fn memory_of_the_dead_waits_for_a_fill() {
    let (mut testbed, mut agent, file) = reach(Stage::Held);
    let mut other = testbed.attach(2, COPIED_OUT_BYTES, 0);
    advance(&mut testbed, &other, &file, Stage::Filling);
    agent.hang_up();
    testbed.settle().unwrap();
    assert!(testbed.take_reports().contains(&CopierReport::Detached { process: 1 }));
    assert_eq!(fake::with(|fake| fake.left().registrations), 2, "both are registered still");
    other.hang_up();
    testbed.settle().unwrap();
    assert_eq!(testbed.take_reports().last(), Some(&CopierReport::Released));
    testbed.assert_nothing_is_left();
}

#[test]
fn memory_of_the_dead_goes_while_others_are_held() {
    let (mut testbed, mut agent, file) = reach(Stage::Held);
    let mut other = testbed.attach(2, COPIED_OUT_BYTES, 0);
    advance(&mut testbed, &other, &file, Stage::Held);
    testbed.take_reports();
    other.hang_up();
    testbed.settle().unwrap();
    assert_eq!(
        testbed.take_reports(),
        [CopierReport::Detached { process: 2 }, CopierReport::Released]
    );
    assert_eq!(fake::with(|fake| fake.left().registrations), 1);
    assert!(!agent.is_hung_up());
}

#[test]
fn nothing_is_registered_while_a_proof_is_made() {
    for message in [None, Some(ToCopier::Checkpointed)] {
        let mut testbed = Testbed::new();
        let agent = testbed.attach(1, COPIED_OUT_BYTES, 0);
        let file = content_file(&pattern(COPIED_OUT_BYTES, 1));
        testbed.order(CopierOrder::HoldVram { on: true }, None);
        match message {
            None => {
                agent.say(
                    ToCopier::Prefaulted { bytes: COPIED_OUT_BYTES, uuid: fake::UUID },
                    Some(&file),
                );
            }
            Some(_) => agent.leave(&pieces(&UNITS), 0, &file),
        }
        testbed.settle().unwrap();
        assert_eq!(fake::with(|fake| fake.registered_bytes()), 0, "it takes VRAM");
        testbed.order(CopierOrder::HoldVram { on: false }, None);
        testbed.settle().unwrap();
        assert_eq!(fake::with(|fake| fake.registered_bytes()) as u64, COPIED_OUT_BYTES);
    }
}

#[test]
fn fill_goes_on_while_a_proof_is_made() {
    let (mut testbed, mut agent, _) = reach(Stage::Held);
    testbed.order(CopierOrder::HoldVram { on: true }, None);
    testbed.fill(1, COPIED_OUT_BYTES);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    assert_eq!(agent.words().last(), Some(&FromCopier::Filled));
}

#[test]
fn registration_waits_for_a_fill() {
    let (mut testbed, _agent, file) = reach(Stage::Filling);
    let other = testbed.attach(2, COPIED_OUT_BYTES, 0);
    other.leave(&pieces(&UNITS), 0, &file);
    testbed.settle().unwrap();
    assert_eq!(fake::with(|fake| fake.left().registrations), 1);
    fake::run_copies();
}

/// The driver must notice that the GPU has finished clearing (scrubbing) released memory. Therefore
/// the copier makes one small allocation after the memory was released. It must not make this
/// allocation during a proof of free VRAM or a registration.
#[test]
fn wiped_memory_is_taken_note_of_later() {
    let count =
        || fake::with(|fake| fake.calls().iter().filter(|call| **call == "mem_create").count());
    let (mut testbed, _agent, _) = reach(Stage::Held);
    assert_eq!(count(), 0);
    testbed.order(CopierOrder::HoldVram { on: true }, None);
    testbed.wait(SECOND);
    testbed.settle().unwrap();
    assert_eq!(count(), 0, "a proof is made");
    testbed.order(CopierOrder::HoldVram { on: false }, None);
    testbed.settle().unwrap();
    assert_eq!(count(), 1);
    assert_eq!(fake::with(|fake| fake.left().handles), 0);
    testbed.wait(SECOND);
    testbed.settle().unwrap();
    assert_eq!(count(), 1, "once");
}
