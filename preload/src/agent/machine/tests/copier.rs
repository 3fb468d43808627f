//! Tests of offloads in which a copier copies the memory during the checkpoint, or fails to copy
//! it.

use super::*;

const ALL_BYTES: u64 = 1 << 30;
const EXPORTED_BYTES: u64 = 3 << 28;
const COPY_OUT: Action = Action::CopyOut {
    vram_bytes: ALL_BYTES,
    how: CopyOptions {
        keep: false,
        then_checkpoint: true,
        check: false,
        host_pool: false,
        release_early: false,
    },
};

/// Returns a process that has exported memory to a copier in a CopyOut, and its machine.
fn exported(copier_offloads: bool) -> (Fake, OrderMachine) {
    let mut host = Fake::new();
    (host.can_copy, host.hands, host.with_copier) = (true, EXPORTED_BYTES, copier_offloads);
    let mut machine = running(&mut host);
    for action in [CLOSE, LOCK, COPY_OUT] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0), "{action:?}");
    }
    assert_eq!((machine.phase(), host.exported), (Phase::CopiedOut, EXPORTED_BYTES));
    (host, machine)
}

#[test]
fn copier_is_awaited_after_the_checkpoint() {
    let (mut host, mut machine) = exported(true);
    assert_eq!(machine.execute_order(&mut host, CHECKPOINT), (Outcome::Done, 0));
    assert_eq!((machine.phase(), host.exported, host.announced), (Phase::Checkpointed, 0, true));
}

#[test]
fn uncopied_export_is_taken_back() {
    let (mut host, mut machine) = exported(false);
    assert_eq!(machine.execute_order(&mut host, CHECKPOINT), (Outcome::NotCopied, 0));
    assert_eq!(
        (machine.phase(), host.announced),
        (Phase::Checkpointed, false),
        "no copier has the content"
    );
    let other = Action::RestoreOnGpu { from: 0, to: 1 };
    assert_eq!(
        machine.execute_order(&mut host, other).0,
        Outcome::Unreachable,
        "the content is on this GPU"
    );
    for action in [Action::Restore, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.copied_out, host.exported), (Phase::Open, false, 0));
}

#[test]
fn self_restore_needs_room_for_the_rest_only() {
    let (mut host, mut machine) = exported(false);
    machine.execute_order(&mut host, CHECKPOINT);
    host.room = false;
    assert!(!machine.restore_self(&mut host));
    assert_eq!(host.asked_room, ALL_BYTES - EXPORTED_BYTES);
    host.room = true;
    assert!(machine.restore_self(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
}

#[test]
fn restore_before_checkpoint_takes_export_back() {
    let (mut host, mut machine) = exported(true);
    assert_eq!(machine.execute_order(&mut host, Action::Restore), (Outcome::Done, 0));
    assert_eq!((machine.phase(), host.exported), (Phase::Closed, 0));
}
