//! A copier that copies beside the checkpoint, or does not.

use super::*;

const ALL_BYTES: u64 = 1 << 30;
const HANDED_BYTES: u64 = 3 << 28;
const PARK: Action = Action::CopyOut {
    vram_bytes: ALL_BYTES,
    how: CopyOptions { keep: false, then_checkpoint: true, check: false },
};

/// After a Park that has handed something over.
fn handed(copier_offloads: bool) -> (Fake, OrderMachine) {
    let mut host = Fake::new();
    (host.carries, host.hands, host.with_copier) = (true, HANDED_BYTES, copier_offloads);
    let mut machine = running(&mut host);
    for action in [CLOSE, LOCK, PARK] {
        assert_eq!(machine.carry_out(&mut host, action), (Outcome::Done, 0), "{action:?}");
    }
    assert_eq!((machine.phase(), host.handed), (Phase::CopiedOut, HANDED_BYTES));
    (host, machine)
}

#[test]
fn copier_is_awaited_after_the_checkpoint() {
    let (mut host, mut machine) = handed(true);
    assert_eq!(machine.carry_out(&mut host, CHECKPOINT), (Outcome::Done, 0));
    assert_eq!((machine.phase(), host.handed, host.announced), (Phase::Checkpointed, 0, true));
}

#[test]
fn uncopied_export_is_taken_back() {
    let (mut host, mut machine) = handed(false);
    assert_eq!(machine.carry_out(&mut host, CHECKPOINT), (Outcome::NotCopied, 0));
    assert_eq!((machine.phase(), host.announced), (Phase::Checkpointed, false), "no copier has it");
    let other = Action::RestoreOnGpu { from: 0, to: 1 };
    assert_eq!(machine.carry_out(&mut host, other).0, Outcome::Unreachable, "it is on this GPU");
    for action in [Action::Restore, Action::Open] {
        assert_eq!(machine.carry_out(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.parked, host.handed), (Phase::Open, false, 0));
}

#[test]
fn self_restore_needs_room_for_the_rest_only() {
    let (mut host, mut machine) = handed(false);
    machine.carry_out(&mut host, CHECKPOINT);
    host.room = false;
    assert!(!machine.bring_back(&mut host));
    assert_eq!(host.asked_room, ALL_BYTES - HANDED_BYTES);
    host.room = true;
    assert!(machine.bring_back(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
}

#[test]
fn restore_before_checkpoint_takes_export_back() {
    let (mut host, mut machine) = handed(true);
    assert_eq!(machine.carry_out(&mut host, Action::Restore), (Outcome::Done, 0));
    assert_eq!((machine.phase(), host.handed), (Phase::Closed, 0));
}
