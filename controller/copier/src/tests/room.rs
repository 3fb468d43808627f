//! Tests of the VRAM that the copier leaves free for the driver's restore. A restore without enough
//! VRAM loses the process.

use super::*;

/// Starts a fill (a copy back into VRAM) on a GPU with this many bytes of free VRAM.
fn filling_with(free_bytes: u64) -> (Testbed, Agent) {
    let (mut testbed, agent, _) = reach(Stage::Held);
    fake::with(|fake| {
        fake.others_use(VRAM_BYTES - free_bytes);
        fake.must_leave(REST_BYTES + MARGIN_BYTES);
    });
    testbed.fill(1, COPIED_OUT_BYTES);
    agent.say(ToCopier::Restoring, None);
    testbed.settle().unwrap();
    (testbed, agent)
}

fn made_bytes() -> u64 {
    fake::with(|fake| fake.made_bytes())
}

#[test]
fn room_of_the_restore_is_left_to_the_driver() {
    let kept = REST_BYTES + MARGIN_BYTES;
    for (free_bytes, made) in [
        (kept + COPIED_OUT_BYTES, COPIED_OUT_BYTES),
        (kept + COPIED_OUT_BYTES - 1, UNIT),
        (kept + UNIT, UNIT),
        (kept + UNIT - 1, 0),
        (kept, 0),
        (0, 0),
    ] {
        let (mut testbed, agent) = filling_with(free_bytes);
        assert_eq!(made_bytes(), made, "of {free_bytes} bytes");
        fake::with(|fake| assert!(fake.faults().is_empty(), "{:?}", fake.faults()));
        drop(agent);
        testbed.settle().unwrap();
        testbed.assert_nothing_is_left();
    }
}

#[test]
fn room_that_becomes_free_is_used() {
    let (mut testbed, mut agent) = filling_with(0);
    fake::with(|fake| fake.others_use(0));
    testbed.settle().unwrap();
    assert_eq!(made_bytes(), COPIED_OUT_BYTES);
    assert!(!agent.is_hung_up());
}

#[test]
fn room_of_the_restore_is_used_once_it_is_over() {
    let (mut testbed, mut agent) = filling_with(COPIED_OUT_BYTES);
    assert_eq!(made_bytes(), 0);
    fake::with(|fake| fake.must_leave(0));
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    assert_eq!(made_bytes(), COPIED_OUT_BYTES);
    assert_eq!(agent.words().last(), Some(&FromCopier::Filled));
}

#[test]
fn restored_process_without_room_is_left_alone() {
    let (mut testbed, mut agent) = filling_with(COPIED_OUT_BYTES - 1);
    fake::with(|fake| fake.must_leave(0));
    agent.say(ToCopier::Restored, None);
    assert_ended(&mut testbed, &mut agent, "no room for the last piece");
    fake::with(|fake| fake.others_use(0));
    assert_serves(&mut testbed);
}

#[test]
fn rest_without_bound_is_never_filled_beside() {
    let mut testbed = Testbed::new();
    let agent = testbed.attach(1, COPIED_OUT_BYTES, 0);
    agent.leave(&pieces(&UNITS), u64::MAX, &content_file(&pattern(COPIED_OUT_BYTES, 1)));
    testbed.settle().unwrap();
    testbed.fill(1, COPIED_OUT_BYTES);
    agent.say(ToCopier::Restoring, None);
    testbed.settle().unwrap();
    assert_eq!(made_bytes(), 0);
}

#[test]
fn fill_that_finds_no_room_in_time_is_given_up() {
    let (mut testbed, mut agent) = filling_with(0);
    testbed.wait(9 * SECOND);
    testbed.settle().unwrap();
    assert!(!agent.is_hung_up(), "it is waited for");
    testbed.wait(2 * SECOND);
    assert_ended(&mut testbed, &mut agent, "too late");
}
