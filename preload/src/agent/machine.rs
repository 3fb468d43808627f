//! What the agent does with an order, apart from how.
//!
//! ```text
//!        Close           Lock             Checkpoint
//! Open ────────> Closed ──────> Locked ───────────────> Away
//!      <────────   ^    <──────   │    <───────────────  ^ │
//!        Open      │    Unlock    │    Restore, nothing  │ │
//!                  │              │    is parked         │ │
//!                  │              │ Park: unlock, copy,  │ │
//!                  │  Restore:    v       give back      │ │
//!                  └─ unpark ── Parked ──────────────────┘ │ Restore, then go on as
//!                                ^  Checkpoint: lock, then │ from Parked: restore,
//!                                │  checkpoint the rest    │ unlock, unpark
//!                                └─────────────────────────┘
//! ```
//!
//! The lock before a Park waits for work on the GPU. Of a Park that fails nothing was given
//! back (Closed); of a return that fails in its second half the memory is in the pool
//! (Parked), and it is tried again.
//!
//! Where the context is lost, as after an uncorrectable memory error, the program is told: Open.
//!
//! A process that ends while it is away (its driver answers "deinitialized") is Open.
//! Between two of them the phase says so (Closing, Locking, …). After each call into
//! the driver its own word decides where the process is, whatever the call returned.
//!
//! Where a checkpoint follows, a copier may copy beside it what a Park has handed over; it is waited
//! for behind the checkpoint. Where it does not, the process is Away with its memory on the device,
//! and takes that back when it returns.

use affinode_cuda_sys::{process_state, result};
use affinode_proto::wire::Phase;
use affinode_proto::wire::counters::Gate;
use affinode_proto::wire::message::{Action, BUSY_NVML, CopyOptions, Outcome, PROOF_TTL_MS};

use crate::swap::{LOADER_HELD, NO_HOST_MEMORY};

/// Which counts are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallAdmission {
    /// Every call.
    All,
    /// Calls that may take device memory.
    Allocating,
}

/// A call of the driver's checkpoint interface, on the own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverCall {
    /// Lock, waiting at most so many milliseconds for running work.
    Lock(u32),
    /// Device memory to host memory.
    Checkpoint,
    /// And back.
    Restore,
    /// And back, with these two of the listed GPUs in each other's place.
    RestoreOn(u8, u8),
    /// Run on.
    Unlock,
}

/// Everything that the machine can do to the process.
pub trait Host {
    /// Sets the gate.
    fn set_gate(&mut self, gate: Gate);
    /// Makes the phase known.
    fn set_phase(&mut self, phase: Phase);
    /// Counts one closing more.
    fn next_generation(&mut self);
    /// Makes the gate's value known to all threads, and their counts to us. False: it
    /// cannot be done.
    fn fence(&mut self) -> bool;
    /// Sets whether the gate holds calls that are made inside of other calls, too.
    fn set_sealed(&mut self, sealed: bool);
    /// Whether none of these calls is inside the driver.
    fn drained(&mut self, calls: CallAdmission) -> bool;
    /// Whether a caller waits at the gate.
    fn has_waiters(&mut self) -> bool;
    /// Sleeps.
    fn sleep_us(&mut self, us: u64);
    /// Monotonic time.
    fn now_us(&mut self) -> u64;
    /// Whether anything of this process may leave its device.
    fn is_eligible(&mut self) -> bool;
    /// Whether the driver must not checkpoint it: a tool or a video library is in the process. Asked
    /// with the gate closed, so that none can come in before the checkpoint.
    fn keeps_context(&mut self) -> bool;
    /// The driver is about to lock the process: where its threads are is noted.
    fn note_threads(&mut self);
    /// Whether the driver has ended, before its process: it says so to every call.
    fn has_driver_ended(&mut self) -> bool;
    /// Calls the driver; `None` when it has no such function.
    fn call(&mut self, call: DriverCall) -> Option<u32>;
    /// The driver's word on the state of the process, if it has one.
    fn state(&mut self) -> Option<u32>;
    /// Copies what can be carried to host memory, and gives the device memory back. On an
    /// error, the driver's code, everything is as it was. `vram_bytes`: all that the process holds
    /// on its device; where a checkpoint follows, a copier may copy beside it.
    fn park(&mut self, how: CopyOptions, vram_bytes: u64) -> Result<(), u32>;
    /// Waits until a copier has copied what it was handed, if anything. False: it has not, and
    /// will not; the content is on the device.
    fn settle(&mut self) -> bool;
    /// Bytes of what was handed over and is not copied: they are on the device still.
    fn handed_bytes(&mut self) -> u64;
    /// Brings it back. On an error, the driver's code, it is parked as before.
    fn unpark(&mut self) -> Result<(), u32>;
    /// Whether anything is parked.
    fn is_parked(&mut self) -> bool;
    /// Takes the host memory that it is parked in out of the driver's hands; a copier may get
    /// it into its own. `vram_bytes`: all that the process holds on its device when it is home.
    fn let_go_of_parked(&mut self, vram_bytes: u64);
    /// Tells a copier that the driver has taken the rest of the process off the device.
    fn announce_away(&mut self);
    /// Tells a copier that the driver restores the process from now on.
    fn announce_restore(&mut self);
    /// Leaves the copier, if there is a way to one.
    fn leave_copier(&mut self);
    /// Whether it has hold of device memory that another process has made: the driver would
    /// checkpoint it, and then not restore it.
    fn holds_imported(&mut self) -> bool;
    /// Whether it can come back with these two of the listed GPUs in each other's place.
    fn can_move(&mut self, from: u8, to: u8) -> bool;
    /// Whether the driver runs and answers every call with this code: the context is lost.
    fn is_broken(&mut self, code: u32) -> bool;
    /// From now on an open gate answers calls with an error: the memory is not there.
    fn set_damaged(&mut self);
    /// Whether so many bytes are proven free on the devices, and no other process that
    /// comes back by itself takes them before [`Host::end_return`].
    fn begin_return(&mut self, vram_bytes: u64) -> bool;
    /// The end of a return by itself, whether it began or not.
    fn end_return(&mut self);
}

/// How an order ended, with the driver's code where it was asked.
pub type Ended = (Outcome, u32);

/// Where the process is.
#[derive(Debug)]
pub struct OrderMachine {
    phase: Phase,
    allocations_held: bool,
    vram_bytes: u64,
    /// Returns in a line that failed with a code of a lost context.
    lost_returns: u32,
    /// The code that the driver answers every call with.
    broken: Option<u32>,
}

/// Returns that may fail so before the program is told: the driver may find other memory.
const MAX_LOST_RETURNS: u32 = 3;

impl OrderMachine {
    /// A process that runs, but takes no device memory before the controller has had
    /// its say: memory may be promised to another just now.
    pub fn new() -> OrderMachine {
        OrderMachine {
            phase: Phase::Open,
            allocations_held: true,
            vram_bytes: 0,
            lost_returns: 0,
            broken: None,
        }
    }

    /// Where the process is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether allocations are held.
    pub fn allocations_held(&self) -> bool {
        self.allocations_held
    }

    /// Carries out the controller's order of `decided_ms` (0: of no known time), unless it
    /// takes VRAM and is so old that the VRAM may be another's by now: the process or the
    /// controller was stopped in between.
    pub fn obey(&mut self, host: &mut impl Host, action: Action, decided_ms: u64) -> Ended {
        let age_ms = (host.now_us() / 1_000).saturating_sub(decided_ms);
        let late = decided_ms > 0 && age_ms > PROOF_TTL_MS;
        match action {
            _ if late && action.is_restore() => (Outcome::Late, 0),
            // Others may be promised by now what is copied on the device meanwhile.
            Action::CopyOut { vram_bytes, how } if late => {
                let how = CopyOptions { then_checkpoint: false, ..how };
                self.carry_out(host, Action::CopyOut { vram_bytes, how })
            }
            action => self.carry_out(host, action),
        }
    }

    /// Carries out an order, all of it, before it returns.
    pub fn carry_out(&mut self, host: &mut impl Host, action: Action) -> Ended {
        if !admits(self.phase, action) {
            // Somebody may have moved the process from outside.
            self.observe(host);
        }
        if !admits(self.phase, action) {
            return (Outcome::WrongPhase, 0);
        }
        match action {
            Action::Close { deadline_ms } => self.close(host, deadline_ms),
            Action::Open => {
                self.open(host);
                (Outcome::Done, 0)
            }
            Action::Lock { timeout_ms } => {
                if let Some(code) = self.broken {
                    return (Outcome::DriverError, code);
                }
                if !host.is_eligible() {
                    return (Outcome::Unsupported, 0);
                }
                host.note_threads();
                // 0 would wait for ever.
                let call = DriverCall::Lock(timeout_ms.max(1));
                self.step(host, call, Phase::Locking, Phase::Locked)
            }
            Action::CopyOut { vram_bytes, how } => {
                if !host.is_eligible() {
                    return (Outcome::Unsupported, 0);
                }
                self.vram_bytes = vram_bytes;
                self.park(host, how)
            }
            Action::Checkpoint { vram_bytes } => {
                if !host.is_eligible() || host.keeps_context() {
                    return (Outcome::Unsupported, 0);
                }
                if host.holds_imported() {
                    return (Outcome::Imported, 0);
                }
                self.vram_bytes = vram_bytes;
                self.checkpoint(host)
            }
            Action::Restore => {
                let ended = self.restore(host, DriverCall::Restore);
                if ended.0 != Outcome::Done {
                    host.leave_copier();
                }
                self.hand_over_if_lost(host, ended)
            }
            Action::RestoreOnGpu { from, to } => {
                // It would fill memory of the GPU where the process was.
                host.leave_copier();
                if host.handed_bytes() > 0 || !host.can_move(from, to) {
                    return (Outcome::Unreachable, 0);
                }
                let ended = self.restore(host, DriverCall::RestoreOn(from, to));
                self.hand_over_if_lost(host, ended)
            }
            Action::Unlock => {
                let ended = self.unlock(host);
                self.hand_over_if_lost(host, ended)
            }
            Action::HoldAllocations { deadline_ms } => self.hold_allocations(host, deadline_ms),
            Action::ReleaseAllocations => {
                self.release_allocations(host);
                (Outcome::Done, 0)
            }
        }
    }

    /// Lets callers go on that wait only because allocations are held.
    pub fn release_allocations(&mut self, host: &mut impl Host) {
        if self.allocations_held && self.phase == Phase::Open {
            host.set_gate(Gate::Open);
        }
        self.allocations_held = false;
    }

    /// Brings the process back without a controller, as far as it goes now. True when
    /// calls go through again.
    pub fn bring_back(&mut self, host: &mut impl Host) -> bool {
        let is_back = self.go_home(host);
        host.end_return();
        is_back
    }

    fn go_home(&mut self, host: &mut impl Host) -> bool {
        // What a copier has made for this process would look like somebody else's.
        host.leave_copier();
        self.release_allocations(host);
        self.observe(host);
        loop {
            let action = match self.phase {
                Phase::Open => return true,
                Phase::Closed => Action::Open,
                Phase::Locked => Action::Unlock,
                // Without room the restore would fail, and the process would be lost. One that
                // is parked would only wait, but may not take what another was promised.
                Phase::Checkpointed | Phase::CopiedOut if self.has_room(host) => Action::Restore,
                _ => return false,
            };
            if self.carry_out(host, action).0 != Outcome::Done {
                return self.phase == Phase::Open;
            }
        }
    }

    fn has_room(&self, host: &mut impl Host) -> bool {
        let on_device = host.handed_bytes();
        host.begin_return(self.vram_bytes.saturating_sub(on_device))
    }

    /// Whether the process ends, and its driver has ended before it. Calls go through then, to be
    /// answered as they would be anyway: there is nothing to bring back, and nobody is asked for room.
    pub fn has_ended(&mut self, host: &mut impl Host) -> bool {
        let ended = self.phase != Phase::Open && host.has_driver_ended();
        if ended {
            self.open(host);
        }
        ended
    }

    fn enter(&mut self, host: &mut impl Host, phase: Phase) {
        self.phase = phase;
        host.set_phase(phase);
    }

    fn open(&mut self, host: &mut impl Host) {
        host.leave_copier();
        self.enter(host, Phase::Open);
        host.set_gate(if self.allocations_held { Gate::AllocationsHeld } else { Gate::Open });
    }

    fn close(&mut self, host: &mut impl Host, deadline_ms: u32) -> Ended {
        self.release_allocations(host);
        host.next_generation();
        self.enter(host, Phase::Closing);
        host.set_sealed(false);
        host.set_gate(Gate::Closed);
        if host.fence() && wait_drained(host, CallAdmission::All, deadline_ms) {
            self.enter(host, Phase::Closed);
            return (Outcome::Done, 0);
        }
        self.open(host);
        (Outcome::Busy, 0)
    }

    fn hold_allocations(&mut self, host: &mut impl Host, deadline_ms: u32) -> Ended {
        self.allocations_held = true;
        if self.phase != Phase::Open {
            // Nobody is inside the driver; whoever is let in later finds them held.
            return (Outcome::Done, 0);
        }
        host.set_sealed(false);
        host.set_gate(Gate::AllocationsHeld);
        if host.fence() && wait_drained(host, CallAdmission::Allocating, deadline_ms) {
            return (Outcome::Done, 0);
        }
        // The controller goes on without this process: the calls that are inside may still take
        // memory, but none begins before the release.
        (Outcome::Busy, 0)
    }

    /// Back to Closed; or to Parked, while something is.
    fn unlock(&mut self, host: &mut impl Host) -> Ended {
        let after = if host.is_parked() { Phase::CopiedOut } else { Phase::Closed };
        self.step(host, DriverCall::Unlock, Phase::Unlocking, after)
    }

    /// The lock has waited for the GPU, and the gate lets no new work in: locked or not,
    /// nothing changes the memory. Copies need the process unlocked.
    fn park(&mut self, host: &mut impl Host, how: CopyOptions) -> Ended {
        match self.unlock(host) {
            (Outcome::Done, _) => {}
            ended => return ended,
        }
        self.enter(host, Phase::CopyingOut);
        match host.park(how, self.vram_bytes) {
            Ok(()) => {
                self.enter(host, Phase::CopiedOut);
                (Outcome::Done, 0)
            }
            Err(code) => self.moved(host, code),
        }
    }

    /// A copy that failed: where the process is, its memory says.
    fn moved(&mut self, host: &mut impl Host, code: u32) -> Ended {
        if code == result::DEINITIALIZED {
            self.open(host);
            return (Outcome::DriverError, code);
        }
        let phase = if host.is_parked() { Phase::CopiedOut } else { Phase::Closed };
        self.enter(host, phase);
        match code {
            NO_HOST_MEMORY => (Outcome::NoHostMemory, 0),
            LOADER_HELD => (Outcome::Busy, code),
            code => (Outcome::DriverError, code),
        }
    }

    fn checkpoint(&mut self, host: &mut impl Host) -> Ended {
        if self.phase == Phase::CopiedOut {
            // Nothing runs on the GPU: it was waited for, and the gate is closed.
            const LOCK_MS: u32 = 5_000;
            host.let_go_of_parked(self.vram_bytes);
            let call = DriverCall::Lock(LOCK_MS);
            match self.step(host, call, Phase::Locking, Phase::Locked) {
                (Outcome::Done, _) => {}
                ended => return ended,
            }
        }
        let call = DriverCall::Checkpoint;
        let ended = self.step(host, call, Phase::Checkpointing, Phase::Checkpointed);
        if self.phase == Phase::Checkpointed {
            if !host.settle() {
                return (Outcome::NotCopied, 0);
            }
            host.announce_away();
        }
        if self.phase == Phase::Locked && host.is_parked() {
            self.unlock(host);
        }
        ended
    }

    fn restore(&mut self, host: &mut impl Host, call: DriverCall) -> Ended {
        if self.phase == Phase::Checkpointed {
            if call == DriverCall::Restore {
                host.announce_restore();
            }
            let ended = self.step(host, call, Phase::Restoring, Phase::Locked);
            if ended.0 != Outcome::Done || !host.is_parked() {
                return ended;
            }
            match self.unlock(host) {
                (Outcome::Done, _) => {}
                ended => return ended,
            }
        }
        self.enter(host, Phase::CopyingIn);
        match host.unpark() {
            Ok(()) => {
                self.enter(host, Phase::Closed);
                (Outcome::Done, 0)
            }
            Err(code) => self.moved(host, code),
        }
    }

    /// A step home has ended. Where it failed because the context is lost, as after an
    /// uncorrectable memory error, no attempt will succeed, and callers would wait for ever:
    ///
    /// - The driver runs and confirms it: calls go through, and the driver answers them with its
    ///   error, as it does without us. They find no memory of ours that is not back, as none of
    ///   them is carried out.
    /// - Otherwise, after some attempts, calls are answered with an error and none reaches the
    ///   driver, whose state is not there.
    fn hand_over_if_lost(&mut self, host: &mut impl Host, ended: Ended) -> Ended {
        let (outcome, code) = ended;
        if outcome == Outcome::Done {
            self.lost_returns = 0;
        }
        if outcome != Outcome::DriverError || !result::is_sticky(code) || self.phase == Phase::Open
        {
            return ended;
        }
        self.lost_returns += 1;
        let driver_runs = host.state() == Some(process_state::RUNNING);
        if driver_runs && host.is_broken(code) {
            self.broken = Some(code);
            self.open(host);
        } else if self.lost_returns >= MAX_LOST_RETURNS {
            host.set_damaged();
            self.open(host);
        }
        ended
    }

    fn step(
        &mut self,
        host: &mut impl Host,
        call: DriverCall,
        during: Phase,
        after: Phase,
    ) -> Ended {
        let before = self.phase;
        self.enter(host, during);
        let Some(code) = host.call(call) else {
            self.enter(host, before);
            return (Outcome::Unsupported, 0);
        };
        if code == result::DEINITIALIZED {
            // The process is ending and its driver has ended: there is nothing left to bring
            // back, and every call is answered with this code. Whoever waits goes on to exit.
            self.open(host);
            return (Outcome::DriverError, code);
        }
        let succeeded = code == result::SUCCESS;
        self.enter(host, if succeeded { after } else { before });
        self.observe(host);
        let outcome = if succeeded && self.phase == after {
            Outcome::Done
        } else if matches!(code, result::NOT_READY | BUSY_NVML | LOADER_HELD)
            && self.phase == before
        {
            Outcome::Busy
        } else {
            Outcome::DriverError
        };
        (outcome, code)
    }

    /// Takes the driver's word for where the process is, once the gate is closed.
    fn observe(&mut self, host: &mut impl Host) {
        if self.phase == Phase::Open {
            return;
        }
        let phase = match host.state() {
            Some(process_state::RUNNING) if host.is_parked() => Phase::CopiedOut,
            Some(process_state::RUNNING) => Phase::Closed,
            Some(process_state::LOCKED) => Phase::Locked,
            Some(process_state::CHECKPOINTED | process_state::FAILED) => Phase::Checkpointed,
            _ => return,
        };
        self.enter(host, phase);
    }
}

fn admits(phase: Phase, action: Action) -> bool {
    match action {
        Action::HoldAllocations { .. } | Action::ReleaseAllocations => true,
        Action::Close { .. } => phase == Phase::Open,
        Action::Open | Action::Lock { .. } => phase == Phase::Closed,
        Action::Unlock | Action::CopyOut { .. } => phase == Phase::Locked,
        Action::Checkpoint { .. } => matches!(phase, Phase::Locked | Phase::CopiedOut),
        Action::Restore => phase.is_offloaded(),
        Action::RestoreOnGpu { .. } => phase == Phase::Checkpointed,
    }
}

/// Waits for calls in progress, and seals the gate behind them. Gives up as soon as a caller waits
/// for the gate while another is still inside: the process is not idle then, and the one inside might even
/// need the other to go on.
fn wait_drained(host: &mut impl Host, calls: CallAdmission, deadline_ms: u32) -> bool {
    const MAX_SLEEP_US: u64 = 2_000;
    let end = host.now_us() + u64::from(deadline_ms) * 1_000;
    let mut sleep_us = 20;
    loop {
        // Behind the fence: the first look proves that no call passes as one that is alone, the
        // second that no nested call passed beside it.
        if host.drained(calls) {
            host.set_sealed(true);
            if host.drained(calls) {
                return true;
            }
            host.set_sealed(false);
        }
        if host.now_us() >= end || (calls == CallAdmission::All && host.has_waiters()) {
            return false;
        }
        host.sleep_us(sleep_us);
        sleep_us = (2 * sleep_us).min(MAX_SLEEP_US);
    }
}

#[cfg(test)]
mod tests;
