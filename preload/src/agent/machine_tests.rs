use super::*;

#[path = "machine_handed_tests.rs"]
mod handed;
#[path = "machine_parked_tests.rs"]
mod parked;

/// A process in which everything works, until told otherwise.
struct Fake {
    gate: Gate,
    phases: Vec<Phase>,
    generation: u64,
    state: u32,
    now_us: u64,
    inside_until_us: u64,
    waiters: bool,
    eligible: bool,
    room: bool,
    fails: Option<(DriverCall, u32)>,
    calls: Vec<DriverCall>,
    returns_ended: u32,
    /// Memory that can be carried, and whether it is parked.
    carries: bool,
    parked: bool,
    /// The driver has no hold of the host memory.
    let_go: bool,
    /// Memory of another's making that is not parked.
    imported: bool,
    /// A vault fills.
    with_vault: bool,
    /// So many bytes are handed to a vault at a park, while it says that it copies.
    hands: u64,
    handed: u64,
    /// A vault was told that the process is away.
    announced: bool,
    /// Room that was asked for without a controller.
    asked_room: u64,
    /// What the next copy fails with.
    copy_fails: Option<u32>,
}

impl Fake {
    fn new() -> Fake {
        Fake {
            gate: Gate::Open,
            phases: Vec::new(),
            generation: 0,
            state: process_state::RUNNING,
            now_us: 0,
            inside_until_us: 0,
            waiters: false,
            eligible: true,
            room: true,
            fails: None,
            calls: Vec::new(),
            returns_ended: 0,
            carries: false,
            parked: false,
            let_go: false,
            imported: false,
            with_vault: false,
            hands: 0,
            handed: 0,
            announced: false,
            asked_room: 0,
            copy_fails: None,
        }
    }
}

impl Host for Fake {
    fn set_gate(&mut self, gate: Gate) {
        self.gate = gate;
    }
    fn set_phase(&mut self, phase: Phase) {
        self.phases.push(phase);
    }
    fn next_generation(&mut self) {
        self.generation += 1;
    }
    fn fence(&mut self) -> bool {
        true
    }
    fn drained(&mut self, _: Calls) -> bool {
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
    fn call(&mut self, call: DriverCall) -> Option<u32> {
        assert_eq!(self.gate, Gate::Closed, "{call:?} with the gate open");
        self.calls.push(call);
        if let Some((failing, code)) = self.fails
            && failing == call
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
        Some(result::SUCCESS)
    }
    fn state(&mut self) -> Option<u32> {
        Some(self.state)
    }
    fn park(&mut self, how: How, _vram_bytes: u64) -> Result<(), u32> {
        assert_eq!((self.gate, self.state), (Gate::Closed, process_state::RUNNING));
        if let Some(code) = self.copy_fails.take() {
            return Err(code);
        }
        self.parked = self.carries;
        self.handed = if how.then_checkpoint { self.hands } else { 0 };
        Ok(())
    }
    fn unpark(&mut self) -> Result<(), u32> {
        assert_eq!((self.gate, self.state), (Gate::Closed, process_state::RUNNING));
        if let Some(code) = self.copy_fails.take() {
            return Err(code);
        }
        (self.parked, self.handed) = (false, 0);
        Ok(())
    }
    fn settle(&mut self) -> bool {
        assert_eq!(self.state, process_state::CHECKPOINTED, "beside the checkpoint");
        if self.with_vault {
            self.handed = 0;
        }
        self.handed == 0
    }
    fn handed_bytes(&mut self) -> u64 {
        self.handed
    }
    fn is_parked(&mut self) -> bool {
        self.parked
    }
    fn let_go_of_parked(&mut self, _: u64) {
        assert_eq!(self.state, process_state::RUNNING);
        self.let_go = true;
    }
    fn announce_away(&mut self) {
        self.announced = true;
        assert_eq!(self.state, process_state::CHECKPOINTED);
    }
    fn announce_restore(&mut self) {
        assert_eq!(self.state, process_state::CHECKPOINTED);
        self.with_vault = true;
    }
    fn leave_vault(&mut self) {
        self.with_vault = false;
    }
    fn holds_imported(&mut self) -> bool {
        self.imported
    }
    fn can_move(&mut self, _: u8, to: u8) -> bool {
        to < 2
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

/// A process that a controller has welcomed.
fn running(host: &mut Fake) -> Machine {
    let mut machine = Machine::new();
    machine.release_allocations(host);
    machine
}

fn away(host: &mut Fake) -> Machine {
    let mut machine = running(host);
    for action in [CLOSE, LOCK, CHECKPOINT] {
        assert_eq!(machine.carry_out(host, action), (Outcome::Done, 0));
    }
    machine
}

#[test]
fn out_and_back() {
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    assert_eq!((machine.phase(), host.gate), (Phase::Away, Gate::Closed));
    for action in [Action::Restore, Action::Unlock, Action::Open] {
        assert_eq!(machine.carry_out(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
    assert_eq!(host.generation, 1);
    let passed = [Phase::Closing, Phase::Locking, Phase::Checkpointing, Phase::Restoring];
    assert!(passed.iter().all(|phase| host.phases.contains(phase)));
}

/// It, or the controller, was stopped for a while: the VRAM may be another's by now.
#[test]
fn an_order_to_come_back_that_is_old_is_not_carried_out() {
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    host.now_us = 60_000_000;
    for decided_ms in [1, 60_000 - PROOF_HOLDS_MS - 1] {
        assert_eq!(machine.obey(&mut host, Action::Restore, decided_ms), (Outcome::Late, 0));
    }
    assert_eq!((machine.phase(), host.calls.last()), (Phase::Away, Some(&DriverCall::Checkpoint)));
    let in_time = 60_000 - PROOF_HOLDS_MS;
    assert_eq!(machine.obey(&mut host, Action::Restore, in_time), (Outcome::Done, 0));
    // What takes no VRAM is never late.
    assert_eq!(machine.obey(&mut host, Action::Unlock, 1), (Outcome::Done, 0));
}

#[test]
fn calls_that_end_in_time_are_waited_for_and_others_reopen_the_gate() {
    let mut host = Fake::new();
    host.inside_until_us = 49_000;
    assert_eq!(running(&mut host).carry_out(&mut host, CLOSE).0, Outcome::Done);
    let mut host = Fake::new();
    host.inside_until_us = 80_000;
    assert_eq!(running(&mut host).carry_out(&mut host, CLOSE).0, Outcome::Busy);
    assert_eq!(host.gate, Gate::Open);
}

#[test]
fn a_caller_at_the_gate_turns_a_close_round() {
    let mut host = Fake::new();
    (host.inside_until_us, host.waiters) = (40_000, true);
    assert_eq!(running(&mut host).carry_out(&mut host, CLOSE).0, Outcome::Busy);
    assert!(host.now_us < 1_000);
}

#[test]
fn orders_that_do_not_fit_do_nothing() {
    let mut host = Fake::new();
    let mut machine = running(&mut host);
    for action in [LOCK, CHECKPOINT, Action::Restore, Action::Unlock, Action::Open] {
        assert_eq!(machine.carry_out(&mut host, action).0, Outcome::WrongPhase);
    }
    let mut machine = away(&mut host);
    host.calls.clear();
    for action in [CLOSE, LOCK, CHECKPOINT, Action::Unlock, Action::Open] {
        assert_eq!(machine.carry_out(&mut host, action).0, Outcome::WrongPhase);
    }
    assert!(host.calls.is_empty());
    assert_eq!(host.gate, Gate::Closed, "nothing opens a gate while away");
}

#[test]
fn an_unsafe_process_is_not_locked() {
    let mut host = Fake::new();
    host.eligible = false;
    let mut machine = running(&mut host);
    machine.carry_out(&mut host, CLOSE);
    assert_eq!(machine.carry_out(&mut host, LOCK).0, Outcome::Unsupported);
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
            .map(|action| machine.carry_out(&mut host, action))
            .into_iter()
            .find(|ended| ended.0 != Outcome::Done);
        assert_eq!(ended, Some((outcome, code)));
        assert_eq!(machine.phase(), phase, "{failing:?}");
    }
}

#[test]
fn a_process_that_was_moved_from_outside_is_believed() {
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    host.state = process_state::RUNNING;
    assert_eq!(machine.carry_out(&mut host, Action::Open).0, Outcome::Done);
}

#[test]
fn it_brings_itself_back_only_where_there_is_room() {
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    host.room = false;
    assert!(!machine.bring_back(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Away, Gate::Closed));
    host.room = true;
    assert!(machine.bring_back(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));
}

#[test]
fn a_failed_restore_leaves_the_gate_closed() {
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    host.fails = Some((DriverCall::Restore, result::OUT_OF_MEMORY));
    assert!(!machine.bring_back(&mut host));
    assert_eq!((machine.phase(), host.gate), (Phase::Away, Gate::Closed));
}

#[test]
fn allocations_are_held_and_released_while_the_rest_runs() {
    let hold = Action::HoldAllocations { deadline_ms: 10 };
    let mut host = Fake::new();
    let mut machine = running(&mut host);
    assert_eq!(machine.carry_out(&mut host, hold).0, Outcome::Done);
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::AllocationsHeld));
    machine.carry_out(&mut host, Action::ReleaseAllocations);
    assert_eq!(host.gate, Gate::Open);
    host.inside_until_us = host.now_us + 20_000;
    assert_eq!(machine.carry_out(&mut host, hold).0, Outcome::Busy);
    assert_eq!(host.gate, Gate::Open);
}

#[test]
fn a_hold_outlasts_a_way_out_and_back() {
    let hold = Action::HoldAllocations { deadline_ms: 10 };
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    assert_eq!(machine.carry_out(&mut host, hold).0, Outcome::Done);
    assert_eq!(host.gate, Gate::Closed, "a hold lets nobody in");
    for action in [Action::Restore, Action::Unlock, Action::Open] {
        assert_eq!(machine.carry_out(&mut host, action), (Outcome::Done, 0));
    }
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::AllocationsHeld));
    machine.carry_out(&mut host, Action::ReleaseAllocations);
    assert_eq!(host.gate, Gate::Open);
}

#[test]
fn a_release_while_it_is_away_lets_nobody_in() {
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    machine.carry_out(&mut host, Action::HoldAllocations { deadline_ms: 10 });
    machine.carry_out(&mut host, Action::ReleaseAllocations);
    assert_eq!(host.gate, Gate::Closed);
}

#[test]
fn a_new_process_holds_its_allocations() {
    assert!(Machine::new().allocations_held());
}

#[test]
fn a_process_that_ends_while_away_is_let_go() {
    let mut host = Fake::new();
    let mut machine = away(&mut host);
    host.fails = Some((DriverCall::Restore, result::DEINITIALIZED));
    let ended = machine.carry_out(&mut host, Action::Restore);
    assert_eq!(ended, (Outcome::DriverError, result::DEINITIALIZED));
    assert_eq!((machine.phase(), host.gate), (Phase::Open, Gate::Open));

    let mut machine = away(&mut host);
    assert!(machine.bring_back(&mut host), "without a controller, too");
    assert_eq!(host.returns_ended, 1);
}
