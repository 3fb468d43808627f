use super::*;

mod copied_out;
mod copier;

/// A fake process in which every step succeeds, unless a field specifies a failure.
struct Fake {
    gate: Gate,
    sealed: bool,
    /// True if a fence was made since the last change of the gate.
    fenced: bool,
    can_fence: bool,
    phases: Vec<Phase>,
    generation: u64,
    state: u32,
    now_us: u64,
    inside_until_us: u64,
    waiters: bool,
    eligible: bool,
    /// Result of `keeps_context`. True stands for a profiler, sanitizer or debugger in the process.
    tools: bool,
    room: bool,
    fails: Option<(DriverCall, u32)>,
    /// True if failing steps nevertheless take effect.
    fails_late: bool,
    calls: Vec<DriverCall>,
    returns_ended: u32,
    /// True if memory is swappable. The field `copied_out` is true if that memory is copied out.
    can_copy: bool,
    copied_out: bool,
    /// True if the host memory was unregistered from the driver.
    let_go: bool,
    /// True if the process holds imported memory that is not copied out.
    imported: bool,
    /// True if the copier fills the memory during the restore.
    with_copier: bool,
    /// Bytes that a copy-out exports to a copier, which then copies them.
    hands: u64,
    exported: u64,
    out_bytes: u64,
    /// True if the copier was told that the process is checkpointed.
    announced: bool,
    /// VRAM in bytes that had to be free for the last restore without a controller.
    asked_room: u64,
    /// Time until which the last copy in had to wait for VRAM, in microseconds.
    awaits_vram_until_us: Option<u64>,
    /// True if the next failed copy out leaves a part of the memory copied out.
    fails_in_part: bool,
    /// Code with which the next copy fails; `None`: it succeeds.
    copy_fails: Option<u32>,
    /// Code that the driver returns for every call; `None`: calls succeed.
    broken: Option<u32>,
    damaged: bool,
    /// State that the fake driver reports. `None`: the real state. `Some(None)`: it reports no
    /// state.
    says: Option<Option<u32>>,
    /// Result of a wait for the GPU's work.
    work: GpuWork,
}

impl Fake {
    fn new() -> Fake {
        Fake {
            gate: Gate::Open,
            sealed: false,
            fenced: false,
            can_fence: true,
            phases: Vec::new(),
            generation: 0,
            state: process_state::RUNNING,
            now_us: 0,
            inside_until_us: 0,
            waiters: false,
            eligible: true,
            tools: false,
            room: true,
            fails: None,
            fails_late: false,
            calls: Vec::new(),
            returns_ended: 0,
            can_copy: false,
            copied_out: false,
            let_go: false,
            imported: false,
            with_copier: false,
            hands: 0,
            exported: 0,
            out_bytes: 0,
            announced: false,
            asked_room: 0,
            awaits_vram_until_us: None,
            fails_in_part: false,
            copy_fails: None,
            broken: None,
            damaged: false,
            says: None,
            work: GpuWork::Done,
        }
    }
}

impl Host for Fake {
    fn set_gate(&mut self, gate: Gate) {
        self.fenced = false;
        self.gate = if self.damaged && gate != Gate::Closed { Gate::Damaged } else { gate };
    }
    fn set_sealed(&mut self, sealed: bool) {
        self.sealed = sealed;
    }
    fn set_phase(&mut self, phase: Phase) {
        self.phases.push(phase);
    }
    fn next_generation(&mut self) {
        self.generation += 1;
    }
    fn fence(&mut self) -> bool {
        self.fenced = self.can_fence;
        self.can_fence
    }
    fn drained(&mut self, _: CallAdmission) -> bool {
        assert!(
            self.fenced,
            "without a fence after a change of the gate, the counts prove nothing"
        );
        self.now_us >= self.inside_until_us
    }
    fn has_waiters(&mut self) -> bool {
        self.waiters
    }
    fn sleep_us(&mut self, us: u64) {
        self.now_us += us;
    }
    fn now_us(&mut self) -> u64 {
        self.now_us
    }
    fn is_eligible(&mut self) -> bool {
        self.eligible
    }
    fn keeps_context(&mut self) -> bool {
        self.tools
    }
    fn call(&mut self, call: DriverCall) -> Option<u32> {
        assert_eq!(self.gate, Gate::Closed, "{call:?} was made while the gate was open");
        self.calls.push(call);
        let fails = self.fails.filter(|(failing, _)| *failing == call);
        if let Some((_, code)) = fails
            && !self.fails_late
        {
            return Some(code);
        }
        self.state = match call {
            DriverCall::Lock(_) | DriverCall::Restore | DriverCall::RestoreOn(..) => {
                process_state::LOCKED
            }
            DriverCall::Checkpoint => process_state::CHECKPOINTED,
            DriverCall::Unlock => process_state::RUNNING,
        };
        Some(fails.map_or(result::SUCCESS, |(_, code)| code))
    }
    fn state(&mut self) -> Option<u32> {
        self.says.unwrap_or(Some(self.state))
    }
    fn note_threads(&mut self) {
        assert_eq!(
            self.state,
            process_state::RUNNING,
            "the threads must be recorded before the lock"
        );
    }
    fn has_driver_ended(&mut self) -> bool {
        self.fails.is_some_and(|(_, code)| code == result::DEINITIALIZED)
    }
    fn await_work(&mut self, _: u64) -> GpuWork {
        assert_eq!((self.gate, self.state), (Gate::Closed, process_state::RUNNING));
        self.work
    }
    fn copy_out(&mut self, how: CopyOptions, _vram_bytes: u64) -> Result<(), u32> {
        assert_eq!((self.gate, self.state), (Gate::Closed, process_state::RUNNING));
        if let Some(code) = self.copy_fails.take() {
            self.copied_out = self.fails_in_part;
            return Err(code);
        }
        self.copied_out = self.can_copy;
        self.exported = if how.then_checkpoint { self.hands } else { 0 };
        Ok(())
    }
    fn copy_in(&mut self, awaits_vram_until_us: Option<u64>) -> Result<(), u32> {
        assert_eq!((self.gate, self.state), (Gate::Closed, process_state::RUNNING));
        self.awaits_vram_until_us = awaits_vram_until_us;
        if let Some(code) = self.copy_fails.take() {
            return Err(code);
        }
        (self.copied_out, self.exported) = (false, 0);
        Ok(())
    }
    fn settle(&mut self) -> bool {
        assert_eq!(
            self.state,
            process_state::CHECKPOINTED,
            "the copier may settle only while the process is checkpointed"
        );
        if self.with_copier {
            self.exported = 0;
        }
        self.exported == 0
    }
    fn exported_bytes(&mut self) -> u64 {
        self.exported
    }
    fn copied_out_bytes(&mut self) -> u64 {
        self.out_bytes
    }
    fn is_parked(&mut self) -> bool {
        self.copied_out
    }
    fn release_copied(&mut self, _: u64) {
        assert_eq!(self.state, process_state::RUNNING);
        self.let_go = true;
    }
    fn announce_offloaded(&mut self) {
        self.announced = true;
        assert_eq!(self.state, process_state::CHECKPOINTED);
    }
    fn announce_restore(&mut self) {
        assert_eq!(self.state, process_state::CHECKPOINTED);
        self.with_copier = true;
    }
    fn leave_copier(&mut self) {
        self.with_copier = false;
    }
    fn holds_imported(&mut self) -> bool {
        self.imported
    }
    fn can_move(&mut self, _: u8, to: u8) -> bool {
        to < 2
    }
    fn is_broken(&mut self, code: u32) -> bool {
        assert_eq!(
            self.state,
            process_state::RUNNING,
            "driver calls are allowed only in the state RUNNING"
        );
        self.broken == Some(code)
    }
    fn set_damaged(&mut self) {
        self.damaged = true;
    }
    fn begin_return(&mut self, vram_bytes: u64) -> bool {
        self.asked_room = vram_bytes;
        self.room
    }
    fn end_return(&mut self) {
        self.returns_ended += 1;
    }
}

const CLOSE: Action = Action::Close { deadline_ms: 50 };
const LOCK: Action = Action::Lock { timeout_ms: 100 };
const CHECKPOINT: Action = Action::Checkpoint { vram_bytes: 1 << 30 };

/// Returns a machine whose allocations are released, as after the Welcome of a controller.
fn running(host: &mut Fake) -> OrderMachine {
    let mut machine = OrderMachine::new();
    machine.release_allocations(host);
    machine
}

fn offloaded(host: &mut Fake) -> OrderMachine {
    let mut machine = running(host);
    for action in [CLOSE, LOCK, CHECKPOINT] {
        assert_eq!(machine.execute_order(host, action), (Outcome::Done, 0));
    }
    machine
}

/// Returns a process that has reached this phase, and its machine.
fn at(phase: Phase) -> (Fake, OrderMachine) {
    let mut host = Fake::new();
    let mut machine = running(&mut host);
    for action in [CLOSE, LOCK, CHECKPOINT] {
        if machine.phase() != phase {
            assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
        }
    }
    assert_eq!(machine.phase(), phase);
    (host, machine)
}

#[test]
fn out_and_back() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    assert_eq!((machine.phase(), host.gate), (Phase::Checkpointed, Gate::Closed));
    for action in [Action::Restore, Action::Unlock, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
    assert_eq!(host.generation, 1);
    let passed = [Phase::Closing, Phase::Locking, Phase::Checkpointing, Phase::Restoring];
    assert!(passed.iter().all(|phase| host.phases.contains(phase)));
}

/// A restore order that is older than the limit must be refused: the process or the controller may
/// have been stopped in between, and the VRAM may be granted to another process.
#[test]
fn old_restore_order_is_refused() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    host.now_us = 60_000_000;
    for decided_ms in [1, 60_000 - PROOF_TTL_MS - 1] {
        assert_eq!(machine.obey(&mut host, Action::Restore, decided_ms), (Outcome::Late, 0));
    }
    assert_eq!(
        (machine.phase(), host.calls.last()),
        (Phase::Checkpointed, Some(&DriverCall::Checkpoint))
    );
    let in_time = 60_000 - PROOF_TTL_MS;
    assert_eq!(machine.obey(&mut host, Action::Restore, in_time), (Outcome::Done, 0));
    // An order that takes no VRAM is executed at any age.
    assert_eq!(machine.obey(&mut host, Action::Unlock, 1), (Outcome::Done, 0));
}

#[test]
fn close_waits_for_calls_up_to_its_deadline() {
    let mut host = Fake::new();
    host.inside_until_us = 49_000;
    assert_eq!(running(&mut host).execute_order(&mut host, CLOSE).0, Outcome::Done);
    let mut host = Fake::new();
    host.inside_until_us = 80_000;
    assert_eq!(running(&mut host).execute_order(&mut host, CLOSE).0, Outcome::Busy);
    assert_eq!(host.gate, Gate::Open);
}

#[test]
fn a_caller_at_the_gate_turns_a_close_round() {
    let mut host = Fake::new();
    (host.inside_until_us, host.waiters) = (40_000, true);
    assert_eq!(running(&mut host).execute_order(&mut host, CLOSE).0, Outcome::Busy);
    assert!(host.now_us < 1_000);
}

#[test]
fn orders_that_do_not_fit_do_nothing() {
    let mut host = Fake::new();
    let mut machine = running(&mut host);
    for action in [LOCK, CHECKPOINT, Action::Restore, Action::Unlock, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action).0, Outcome::WrongPhase);
    }
    let mut machine = offloaded(&mut host);
    host.calls.clear();
    for action in [CLOSE, LOCK, CHECKPOINT, Action::Unlock, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action).0, Outcome::WrongPhase);
    }
    assert!(host.calls.is_empty());
    assert_eq!(host.gate, Gate::Closed, "no order opens the gate of an offloaded process");
}

#[test]
fn an_unsafe_process_is_not_locked() {
    let mut host = Fake::new();
    host.eligible = false;
    let mut machine = running(&mut host);
    machine.execute_order(&mut host, CLOSE);
    assert_eq!(machine.execute_order(&mut host, LOCK).0, Outcome::Unsupported);
    assert!(host.calls.is_empty());
}

#[test]
fn the_drivers_word_decides_after_an_error() {
    for (failing, code, outcome, phase) in [
        (DriverCall::Lock(100), 600, Outcome::Busy, Phase::Closed),
        (DriverCall::Lock(100), 304, Outcome::DriverError, Phase::Closed),
        (DriverCall::Checkpoint, 801, Outcome::DriverError, Phase::Locked),
    ] {
        let mut host = Fake::new();
        host.fails = Some((failing, code));
        let mut machine = running(&mut host);
        let ended = [CLOSE, LOCK, CHECKPOINT]
            .map(|action| machine.execute_order(&mut host, action))
            .into_iter()
            .find(|ended| ended.0 != Outcome::Done);
        assert_eq!(ended, Some((outcome, code)));
        assert_eq!(machine.phase(), phase, "{failing:?}");
    }
}

#[test]
fn driver_state_overrides_the_phase() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    host.state = process_state::RUNNING;
    assert_eq!(machine.execute_order(&mut host, Action::Open).0, Outcome::Done);
}

#[test]
fn self_restore_needs_free_vram() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    host.room = false;
    assert!(!machine.restore_self(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Checkpointed, Gate::Closed));
    host.room = true;
    assert!(machine.restore_self(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
}

/// A copy out has failed after a part of the memory was freed. The rest is on the device, so only the
/// freed part must be free for a restore without a controller.
#[test]
fn partly_copied_out_process_needs_little_vram() {
    for (out_bytes, asked) in [(5, 5), (60, 60), (70, 60)] {
        let mut host = Fake::new();
        host.can_copy = true;
        let mut machine = running(&mut host);
        machine.execute_order(&mut host, CLOSE);
        let how = CopyOptions::default();
        machine.execute_order(&mut host, Action::CopyOut { vram_bytes: 60, how });
        assert_eq!(machine.phase(), Phase::CopiedOut);
        (host.out_bytes, host.room) = (out_bytes, true);
        assert!(machine.restore_self(&mut host));
        assert_eq!((machine.phase(), host.asked_room), (Phase::Open, asked));
    }
}

#[test]
fn a_failed_restore_leaves_the_gate_closed() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    host.fails = Some((DriverCall::Restore, result::OUT_OF_MEMORY));
    assert!(!machine.restore_self(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Checkpointed, Gate::Closed));
}

#[test]
fn allocations_are_held_while_other_calls_run() {
    let hold = Action::HoldAllocations { deadline_ms: 10 };
    let mut host = Fake::new();
    let mut machine = running(&mut host);
    assert_eq!(machine.execute_order(&mut host, hold).0, Outcome::Done);
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::AllocationsHeld));
    machine.execute_order(&mut host, Action::ReleaseAllocations);
    assert_eq!(host.gate, Gate::Open);
    host.inside_until_us = host.now_us + 20_000;
    assert_eq!(machine.execute_order(&mut host, hold).0, Outcome::Busy);
    let held = (host.gate, machine.allocations_held());
    assert_eq!(held, (Gate::AllocationsHeld, true), "no allocation begins before the release");
    machine.execute_order(&mut host, Action::ReleaseAllocations);
    assert_eq!((host.gate, machine.allocations_held()), (Gate::Open, false));
}

#[test]
fn a_hold_outlasts_a_way_out_and_back() {
    let hold = Action::HoldAllocations { deadline_ms: 10 };
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    assert_eq!(machine.execute_order(&mut host, hold).0, Outcome::Done);
    assert_eq!(host.gate, Gate::Closed, "a hold of allocations must leave the gate closed");
    for action in [Action::Restore, Action::Unlock, Action::Open] {
        assert_eq!(machine.execute_order(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::AllocationsHeld));
    machine.execute_order(&mut host, Action::ReleaseAllocations);
    assert_eq!(host.gate, Gate::Open);
}

#[test]
fn release_while_offloaded_admits_no_call() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    machine.execute_order(&mut host, Action::HoldAllocations { deadline_ms: 10 });
    machine.execute_order(&mut host, Action::ReleaseAllocations);
    assert_eq!(host.gate, Gate::Closed);
}

#[test]
fn a_new_process_holds_its_allocations() {
    assert!(OrderMachine::new().allocations_held());
}

#[test]
fn exit_while_offloaded_is_allowed() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    host.fails = Some((DriverCall::Restore, result::DEINITIALIZED));
    let ended = machine.execute_order(&mut host, Action::Restore);
    assert_eq!(ended, (Outcome::DriverError, result::DEINITIALIZED));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));

    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    host.fails = Some((DriverCall::Restore, result::DEINITIALIZED));
    assert!(
        machine.restore_self(&mut host),
        "the process must also be able to end without a controller"
    );
    assert_eq!(host.returns_ended, 1);
}

/// If three restores fail because the context is lost, calls must return an error and no longer
/// wait. No call may reach the driver, because the driver's state of the process is not restored.
#[test]
fn lost_restore_is_told_after_three_attempts() {
    for failing in [DriverCall::Restore, DriverCall::Unlock] {
        let mut host = Fake::new();
        let mut machine = offloaded(&mut host);
        host.fails = Some((failing, result::ECC_UNCORRECTABLE));
        for attempt in 1..=3 {
            assert_eq!(host.gate, Gate::Closed, "{failing:?} {attempt}");
            assert!(machine.restore_self(&mut host) == (attempt == 3));
        }
        assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Damaged), "{failing:?}");
        assert_ne!(host.state, process_state::RUNNING);
    }
}

/// The phase after a step must be the one that matches the state reported by the driver, even if
/// the step has returned a different result.
#[test]
fn drivers_state_decides_against_its_code() {
    let steps = [
        (LOCK, Phase::Closed, process_state::RUNNING, Phase::Closed),
        (CHECKPOINT, Phase::Locked, process_state::LOCKED, Phase::Locked),
        (CHECKPOINT, Phase::Locked, process_state::RUNNING, Phase::Closed),
        (Action::Restore, Phase::Checkpointed, process_state::CHECKPOINTED, Phase::Checkpointed),
        (Action::Restore, Phase::Checkpointed, process_state::FAILED, Phase::Checkpointed),
        (Action::Unlock, Phase::Locked, process_state::LOCKED, Phase::Locked),
    ];
    for (action, before, says, after) in steps {
        let (mut host, mut machine) = at(before);
        host.says = Some(Some(says));
        let ended = machine.execute_order(&mut host, action);
        // The driver returned success, but its state shows that it has not executed the step.
        assert_eq!(ended, (Outcome::DriverError, 0), "{action:?} {says}");
        assert_eq!((machine.phase(), host.gate), (after, Gate::Closed), "{action:?} {says}");
        assert_eq!(host.phases.last(), Some(&after));
    }
    // The driver returned an error, but its state shows that it has executed the step.
    let made = [
        (
            CHECKPOINT,
            DriverCall::Checkpoint,
            Phase::Locked,
            process_state::CHECKPOINTED,
            Phase::Checkpointed,
        ),
        (
            Action::Restore,
            DriverCall::Restore,
            Phase::Checkpointed,
            process_state::LOCKED,
            Phase::Locked,
        ),
        (LOCK, DriverCall::Lock(100), Phase::Closed, process_state::LOCKED, Phase::Locked),
    ];
    for (action, call, before, says, after) in made {
        let (mut host, mut machine) = at(before);
        (host.fails, host.fails_late) = (Some((call, 999)), true);
        assert_eq!(
            machine.execute_order(&mut host, action),
            (Outcome::DriverError, 999),
            "{action:?}"
        );
        assert_eq!((machine.phase(), host.state), (after, says), "{action:?}");
    }
    // The lock returns NOT_READY, but the process is locked. The outcome must not be `Busy`, which
    // would repeat the lock.
    let (mut host, mut machine) = at(Phase::Closed);
    host.fails = Some((DriverCall::Lock(100), result::NOT_READY));
    host.says = Some(Some(process_state::LOCKED));
    assert_eq!(machine.execute_order(&mut host, LOCK), (Outcome::DriverError, result::NOT_READY));
    assert_eq!(machine.phase(), Phase::Locked);
}

/// If the driver reports no known state of the process, the code that the step returned must decide
/// the phase.
#[test]
fn code_decides_where_driver_has_no_state() {
    for says in [None, Some(77)] {
        let (mut host, mut machine) = at(Phase::Closed);
        host.says = Some(says);
        assert_eq!(machine.execute_order(&mut host, LOCK), (Outcome::Done, 0));
        assert_eq!(machine.phase(), Phase::Locked);
        host.fails = Some((DriverCall::Checkpoint, 1));
        assert_eq!(machine.execute_order(&mut host, CHECKPOINT), (Outcome::DriverError, 1));
        assert_eq!(machine.phase(), Phase::Locked);
    }
}

#[test]
fn close_without_fence_is_busy() {
    let mut host = Fake::new();
    host.can_fence = false;
    let mut machine = running(&mut host);
    assert_eq!(machine.execute_order(&mut host, CLOSE).0, Outcome::Busy);
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
    let hold = Action::HoldAllocations { deadline_ms: 10 };
    assert_eq!(machine.execute_order(&mut host, hold).0, Outcome::Busy);
    assert_eq!(host.phases.last(), Some(&Phase::Open));
}

/// The gate must be sealed as soon as the counts prove that no call is inside, and not before. It
/// must stay sealed until calls pass again.
#[test]
fn gate_is_sealed_once_counts_are_proven() {
    let mut host = Fake::new();
    host.inside_until_us = 80_000;
    let mut machine = running(&mut host);
    assert_eq!(machine.execute_order(&mut host, CLOSE).0, Outcome::Busy);
    assert!(!host.sealed);
    host.inside_until_us = 0;
    assert_eq!(machine.execute_order(&mut host, CLOSE).0, Outcome::Done);
    assert!(host.sealed);
    // Allocations that are paused while the gate is closed stay paused, and sealed, when it opens.
    let hold = Action::HoldAllocations { deadline_ms: 10 };
    machine.execute_order(&mut host, hold);
    machine.execute_order(&mut host, Action::Open);
    assert_eq!((host.gate, host.sealed), (Gate::AllocationsHeld, true));
    // The next pause of allocations starts unsealed: nested calls pass until the counts are proven.
    machine.execute_order(&mut host, Action::ReleaseAllocations);
    host.inside_until_us = host.now_us + 80_000;
    assert_eq!(machine.execute_order(&mut host, hold).0, Outcome::Busy);
    assert!(!host.sealed);
}

#[test]
fn ended_driver_opens_the_gate_without_orders() {
    let mut host = Fake::new();
    let mut machine = offloaded(&mut host);
    assert!(!machine.has_ended(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Checkpointed, Gate::Closed));
    let asked = host.calls.len();
    host.fails = Some((DriverCall::Restore, result::DEINITIALIZED));
    assert!(machine.has_ended(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
    assert_eq!(host.calls.len(), asked, "no restore was tried");
    assert!(!machine.has_ended(&mut host), "a process with an open gate does not change");
}
