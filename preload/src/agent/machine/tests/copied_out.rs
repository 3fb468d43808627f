//! Tests of processes whose memory the agent copies: copy out, copy in, and their failures.

use super::*;

const COPY_OUT: Action = Action::CopyOut {
    vram_bytes: 1 << 30,
    how: CopyOptions {
        keep: true,
        then_checkpoint: false,
        check: false,
        host_pool: false,
        release_early: false,
    },
};

/// Returns a process with swappable memory that has executed these orders, and its machine.
fn copying(orders: &[Action]) -> (Fake, OrderMachine) {
    let mut host = Fake::new();
    host.can_copy = true;
    let mut machine = running(&mut host);
    for action in orders {
        assert_eq!(machine.execute_order(&mut host, *action), (Outcome::Done, 0), "{action:?}");
    }
    (host, machine)
}

#[test]
fn copied_memory_is_restored_from_both_levels() {
    for orders in [&[CLOSE, LOCK, COPY_OUT][..], &[CLOSE, LOCK, COPY_OUT, CHECKPOINT]] {
        let (mut host, mut machine) = copying(orders);
        let deep = orders.len() == 4;
        let phase = if deep { Phase::Checkpointed } else { Phase::CopiedOut };
        assert_eq!((machine.phase(), host.gate, host.copied_out), (phase, Gate::Closed, true));
        assert_eq!(host.let_go, deep, "registered memory makes a checkpoint slow");
        for action in [Action::Restore, Action::Open] {
            assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
        }
        assert_eq!((machine.phase(), host.gate, host.copied_out), (Phase::Open, Gate::Open, false));
        assert_eq!(host.state, process_state::RUNNING);
    }
}

#[test]
fn copy_out_from_closed_calls_no_checkpoint() {
    let (mut host, mut machine) = copying(&[CLOSE, COPY_OUT]);
    assert_eq!((machine.phase(), host.copied_out), (Phase::CopiedOut, true));
    for action in [Action::Restore, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.copied_out, host.gate), (Phase::Open, false, Gate::Open));
    assert_eq!(host.calls, []);
}

#[test]
fn copy_out_with_running_work_is_busy() {
    let (mut host, mut machine) = copying(&[CLOSE]);
    host.work = GpuWork::Running;
    let busy = (Outcome::Busy, result::NOT_READY);
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), busy);
    host.work = GpuWork::Failed(700);
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), (Outcome::DriverError, 700));
    assert_eq!((machine.phase(), host.copied_out), (Phase::Closed, false));
    assert_eq!(host.calls, []);
    host.work = GpuWork::Failed(result::DEINITIALIZED);
    let ended = (Outcome::DriverError, result::DEINITIALIZED);
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), ended);
    assert_eq!(
        (machine.phase(), host.gate),
        (Phase::Open, Gate::Open),
        "calls pass, because the process ends"
    );
}

#[test]
fn unseen_work_is_awaited_by_the_driver_lock() {
    let (mut host, mut machine) = copying(&[CLOSE]);
    // The driver refuses to lock a client of MPS. This counts as a failed copy only if it would
    // happen again each time.
    for (code, may_end, outcome) in [
        (result::NOT_READY, false, Outcome::Busy),
        (result::NOT_SUPPORTED, true, Outcome::Busy),
        (result::NOT_SUPPORTED, false, Outcome::DriverError),
    ] {
        host.work = GpuWork::Unseen { may_end };
        host.fails = Some((DriverCall::Lock(5_000), code));
        assert_eq!(machine.execute_order(&mut host, COPY_OUT), (outcome, code));
        assert_eq!((machine.phase(), host.copied_out), (Phase::Closed, false));
    }
    host.fails = None;
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), (Outcome::Done, 0));
    assert_eq!((machine.phase(), host.copied_out), (Phase::CopiedOut, true));
}

#[test]
fn failed_copy_out_leaves_process_closed() {
    let (mut host, mut machine) = copying(&[CLOSE, LOCK]);
    host.copy_fails = Some(999);
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), (Outcome::DriverError, 999));
    assert_eq!((machine.phase(), host.copied_out), (Phase::Closed, false));
    assert_eq!(machine.execute_order(&mut host, Action::Open).0, Outcome::Done);
}

/// If a copy out fails because other processes have taken the host memory, the outcome must differ
/// from a driver error.
#[test]
fn copy_without_host_memory_is_told_apart() {
    let (mut host, mut machine) = copying(&[CLOSE, LOCK]);
    host.copy_fails = Some(NO_HOST_MEMORY);
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), (Outcome::NoHostMemory, 0));
    assert_eq!((machine.phase(), host.copied_out), (Phase::Closed, false));
}

#[test]
fn copy_that_was_given_up_is_no_driver_error() {
    let (mut host, mut machine) = copying(&[CLOSE, LOCK]);
    host.copy_fails = Some(GIVEN_UP);
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), (Outcome::GivenUp, 0));
    assert_eq!((machine.phase(), host.copied_out), (Phase::Closed, false));
    assert_eq!(machine.execute_order(&mut host, Action::Open).0, Outcome::Done);
}

#[test]
fn failed_copy_in_stays_copied_out_and_repeats() {
    for orders in [&[CLOSE, LOCK, COPY_OUT][..], &[CLOSE, LOCK, COPY_OUT, CHECKPOINT]] {
        let (mut host, mut machine) = copying(orders);
        host.copy_fails = Some(result::OUT_OF_MEMORY);
        let ended = machine.execute_order(&mut host, Action::Restore);
        assert_eq!(ended, (Outcome::DriverError, result::OUT_OF_MEMORY));
        assert_eq!(
            (machine.phase(), host.gate, host.copied_out),
            (Phase::CopiedOut, Gate::Closed, true)
        );
        assert_eq!(machine.execute_order(&mut host, Action::Open).0, Outcome::WrongPhase);
        host.room = false;
        assert!(!machine.restore_self(&mut host), "the VRAM may be promised to another process");
        host.room = true;
        assert!(
            machine.restore_self(&mut host),
            "the process restores itself without a controller"
        );
        assert_eq!((machine.phase(), host.copied_out), (Phase::Open, false));
    }
}

#[test]
fn failed_checkpoint_stays_copied_out() {
    for failing in [DriverCall::Lock(5_000), DriverCall::Checkpoint] {
        let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT]);
        host.fails = Some((failing, 801));
        assert_eq!(machine.execute_order(&mut host, CHECKPOINT), (Outcome::DriverError, 801));
        let state = (machine.phase(), host.state);
        assert_eq!(state, (Phase::CopiedOut, process_state::RUNNING), "{failing:?}");
        host.fails = None;
        assert!(machine.restore_self(&mut host));
    }
}

#[test]
fn copier_learns_of_restore_before_the_driver() {
    let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT, CHECKPOINT]);
    host.copy_fails = Some(result::OUT_OF_MEMORY);
    assert_eq!(machine.execute_order(&mut host, Action::Restore).0, Outcome::DriverError);
    assert!(!host.with_copier, "the copier's memory would obstruct the next attempt");

    let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT, CHECKPOINT]);
    assert_eq!(machine.execute_order(&mut host, Action::Restore), (Outcome::Done, 0));
    assert!(host.with_copier);
    assert_eq!(machine.execute_order(&mut host, Action::Open), (Outcome::Done, 0));
    assert!(!host.with_copier, "a resident process needs no copier");

    let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT, CHECKPOINT]);
    host.with_copier = true;
    host.room = false;
    assert!(!machine.restore_self(&mut host));
    assert!(!host.with_copier, "the copier would hold the VRAM that the process looks for");
}

#[test]
fn restore_on_other_gpu_leaves_the_copier() {
    let (there, nowhere) =
        (Action::RestoreOnGpu { from: 0, to: 1 }, Action::RestoreOnGpu { from: 0, to: 9 });
    let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT, CHECKPOINT]);
    host.with_copier = true;
    let calls = host.calls.len();
    assert_eq!(machine.execute_order(&mut host, nowhere), (Outcome::Unreachable, 0));
    assert_eq!(
        (machine.phase(), host.calls.len()),
        (Phase::Checkpointed, calls),
        "nothing was done"
    );
    assert!(!host.with_copier, "the copier would hold VRAM that the next attempt needs");

    host.with_copier = true;
    host.now_us = 60_000_000;
    assert_eq!(machine.obey(&mut host, there, 1), (Outcome::Late, 0));
    assert_eq!(machine.obey(&mut host, there, 60_000), (Outcome::Done, 0));
    assert!(!host.with_copier, "the copier would fill memory of the previous GPU");
    assert_eq!(host.calls[calls..], [DriverCall::RestoreOn(0, 1), DriverCall::Unlock]);
    assert_eq!((machine.phase(), host.copied_out), (Phase::Closed, false));
}

#[test]
fn only_offloaded_process_changes_gpu() {
    let there = Action::RestoreOnGpu { from: 0, to: 1 };
    let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT]);
    assert_eq!(
        machine.execute_order(&mut host, there).0,
        Outcome::WrongPhase,
        "the context stays on its GPU"
    );
    assert_eq!(machine.execute_order(&mut host, CHECKPOINT).0, Outcome::Done);
    host.fails = Some((DriverCall::RestoreOn(0, 1), 1));
    assert_eq!(machine.execute_order(&mut host, there), (Outcome::DriverError, 1));
    assert_eq!(machine.phase(), Phase::Checkpointed);
    assert_eq!(
        machine.execute_order(&mut host, Action::Restore),
        (Outcome::Done, 0),
        "a restore on the same GPU"
    );
}

#[test]
fn imported_memory_bars_the_checkpoint() {
    for orders in [&[CLOSE, LOCK][..], &[CLOSE, LOCK, COPY_OUT]] {
        let (mut host, mut machine) = copying(orders);
        host.imported = true;
        let calls = host.calls.len();
        let before = machine.phase();
        assert_eq!(machine.execute_order(&mut host, CHECKPOINT), (Outcome::Imported, 0));
        assert_eq!((machine.phase(), host.calls.len()), (before, calls), "nothing was done");
    }
}

#[test]
fn empty_copy_out_allows_a_checkpoint() {
    let mut host = Fake::new();
    let mut machine = running(&mut host);
    for action in [CLOSE, LOCK, COPY_OUT, CHECKPOINT, Action::Restore, Action::Unlock, Action::Open]
    {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0), "{action:?}");
    }
    assert_eq!(machine.phase(), Phase::Open);
}

const ILLEGAL_ADDRESS: u32 = 700;

#[test]
fn lost_context_of_parked_process_is_handed_over() {
    for orders in [&[CLOSE, LOCK, COPY_OUT][..], &[CLOSE, LOCK, COPY_OUT, CHECKPOINT]] {
        let (mut host, mut machine) = copying(orders);
        (host.copy_fails, host.broken) = (Some(ILLEGAL_ADDRESS), Some(ILLEGAL_ADDRESS));
        let ended = machine.execute_order(&mut host, Action::Restore);
        assert_eq!(ended, (Outcome::DriverError, ILLEGAL_ADDRESS));
        // The gate is open, so calls reach the driver, which returns its error.
        let state = (machine.phase(), host.gate, host.state, host.damaged);
        assert_eq!(state, (Phase::Open, Gate::Open, process_state::RUNNING, false));
        // A process with a lost context must not be moved again.
        host.calls.clear();
        assert_eq!(machine.execute_order(&mut host, CLOSE).0, Outcome::Done);
        let ended = machine.execute_order(&mut host, LOCK);
        assert_eq!(ended, (Outcome::DriverError, ILLEGAL_ADDRESS));
        assert_eq!(machine.execute_order(&mut host, Action::Open).0, Outcome::Done);
        assert!(host.calls.is_empty());
    }
}

#[test]
fn lost_context_opens_gate_without_controller() {
    let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT]);
    (host.copy_fails, host.broken) = (Some(ILLEGAL_ADDRESS), Some(ILLEGAL_ADDRESS));
    assert!(machine.restore_self(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
}

/// After three failed copies, the gate must return an error for all calls, although other calls of
/// the driver succeed. No call may reach the driver, because the program must not access memory
/// that is not restored.
#[test]
fn lost_copy_is_told_after_three_attempts() {
    /// The MPS server of the process has ended (seen on an H200, driver 580.159).
    const MPS_RPC_FAILURE: u32 = 806;
    for code in [result::ECC_UNCORRECTABLE, MPS_RPC_FAILURE] {
        let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT]);
        for attempt in 1..=3 {
            assert_eq!((machine.phase(), host.gate), (Phase::CopiedOut, Gate::Closed), "{attempt}");
            host.copy_fails = Some(code);
            let ended = machine.execute_order(&mut host, Action::Restore);
            assert_eq!(ended, (Outcome::DriverError, code));
        }
        assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Damaged));
    }

    // A restore that succeeds resets the number of failures. A lack of VRAM (code 2) does not count
    // as a failure.
    let (mut host, mut machine) = copying(&[CLOSE, LOCK, COPY_OUT]);
    for code in [ILLEGAL_ADDRESS, ILLEGAL_ADDRESS, 2, 2, 2, 2] {
        host.copy_fails = Some(code);
        machine.execute_order(&mut host, Action::Restore);
        assert_eq!(machine.phase(), Phase::CopiedOut);
    }
    assert_eq!(machine.execute_order(&mut host, Action::Restore).0, Outcome::Done);
    assert_eq!(machine.execute_order(&mut host, Action::Open).0, Outcome::Done);
    for action in [CLOSE, LOCK, COPY_OUT] {
        assert_eq!(machine.execute_order(&mut host, action).0, Outcome::Done);
    }
    host.copy_fails = Some(ILLEGAL_ADDRESS);
    machine.execute_order(&mut host, Action::Restore);
    assert_eq!((machine.phase(), host.damaged), (Phase::CopiedOut, false));
}

#[test]
fn tool_in_process_bars_checkpoint_and_no_copy() {
    let (mut host, mut machine) = copying(&[CLOSE, LOCK]);
    host.tools = true;
    assert_eq!(machine.execute_order(&mut host, COPY_OUT), (Outcome::Done, 0));
    host.calls.clear();
    assert_eq!(machine.execute_order(&mut host, CHECKPOINT), (Outcome::Unsupported, 0));
    assert_eq!((machine.phase(), host.calls.as_slice()), (Phase::CopiedOut, &[][..]));
    for action in [Action::Restore, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    // A process that is not copied out is not checkpointed either, and can be unlocked and opened.
    for action in [CLOSE, LOCK] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!(machine.execute_order(&mut host, CHECKPOINT), (Outcome::Unsupported, 0));
    for action in [Action::Unlock, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    assert!(!host.calls.contains(&DriverCall::Checkpoint));
}

/// A copy in waits for VRAM only if the order says so, and not longer than the controller counts on.
#[test]
fn copy_in_awaits_vram_as_ordered() {
    use affinode_proto::wire::message::AWAIT_VRAM_MS;
    let decided_ms = 60_000;
    for (action, now_ms, decided, until_ms) in [
        (Action::Restore, decided_ms + 10, decided_ms, None),
        (Action::RestoreAsFreed, decided_ms + 10, decided_ms, Some(decided_ms + AWAIT_VRAM_MS)),
        (Action::RestoreAsFreed, decided_ms, 0, Some(decided_ms + AWAIT_VRAM_MS - PROOF_TTL_MS)),
    ] {
        let (mut host, mut machine) = copying(&[CLOSE, COPY_OUT]);
        host.now_us = now_ms * 1_000;
        assert_eq!(machine.obey(&mut host, action, decided), (Outcome::Done, 0));
        assert_eq!(host.awaits_vram_until_us, until_ms.map(|ms| ms * 1_000), "{action:?}");
        assert_eq!((machine.phase(), host.copied_out), (Phase::Closed, false));
    }
    // The driver's restore cannot wait for VRAM.
    let (mut host, mut machine) = copying(&[CLOSE, COPY_OUT, CHECKPOINT]);
    assert_eq!(machine.obey(&mut host, Action::RestoreAsFreed, 0).0, Outcome::WrongPhase);
    assert_eq!((machine.phase(), host.copied_out), (Phase::Checkpointed, true));
}

/// If the driver fails after memory was freed early, the process must be restored, not opened.
#[test]
fn partly_failed_copy_out_stays_copied_out() {
    let (mut host, mut machine) = copying(&[CLOSE]);
    (host.copy_fails, host.fails_in_part) = (Some(result::OUT_OF_MEMORY), true);
    let ended = machine.execute_order(&mut host, COPY_OUT);
    assert_eq!(ended, (Outcome::DriverError, result::OUT_OF_MEMORY));
    assert_eq!((machine.phase(), host.gate), (Phase::CopiedOut, Gate::Closed));
    assert_eq!(machine.execute_order(&mut host, Action::Open).0, Outcome::WrongPhase);
    for action in [Action::Restore, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.copied_out, host.gate), (Phase::Open, false, Gate::Open));
}
