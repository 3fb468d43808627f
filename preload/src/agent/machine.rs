//! State machine that executes the controller's orders for one process. It consists of the phases
//! of the process and the steps of each order. [`Host`] executes the single steps.
//!
//! ```text
//!        Close            Lock                  Checkpoint
//! Open ────────> Closed ──────> Locked ───────────────────> Checkpointed
//!      <────────  ^     <──────  │     <───────────────────     ^  │
//!        Open     │     Unlock   │     Restore, nothing is      │  │
//!                 │              │     copied out               │  │
//!        CopyOut: │              │ CopyOut: unlock, copy,       │  │
//!     wait, copy, │ Restore:     v free device memory           │  │
//!            free └─ copy in ── CopiedOut ──────────────────────┘  │ Restore: restore,
//!                                ^       Checkpoint: lock, then    │ unlock, then copy in
//!                                │       checkpoint the rest       │ as from CopiedOut
//!                                └─────────────────────────────────┘
//! ```
//!
//! While a step runs, the phase has the name of the step: Closing, Locking, CopyingOut,
//! Checkpointing, Restoring, Unlocking, CopyingIn. After each call into the driver, the state that
//! the driver reports decides the phase, whatever the call returned.
//!
//! - A CopyOut in the phase Closed first waits for work on the GPU. A CopyOut in the phase Locked
//!   does not wait, because the lock has already waited. A CopyOut that fails has freed nothing,
//!   and the phase is Closed. If the driver fails after memory was freed early, the phase is
//!   CopiedOut. If a restore fails while it copies in, the content stays in the staging buffer
//!   (CopiedOut), and the restore is repeated.
//! - If the context is lost, as after an uncorrectable memory error, the gate opens (Open) and the
//!   program's calls return the error.
//! - A process that ends while it is offloaded (its driver returns DEINITIALIZED) is Open.
//! - If a checkpoint follows a CopyOut, a copier may copy the exported memory during the checkpoint.
//!   The agent waits for the copier after the checkpoint. If the copier fails, the process is
//!   Checkpointed with that memory still on the device, and maps it again when it is restored.

mod host;

use affinode_cuda_sys::{process_state, result};
use affinode_proto::wire::Phase;
use affinode_proto::wire::counters::Gate;
use affinode_proto::wire::message::{
    AWAIT_VRAM_MS, Action, BUSY_NVML, CopyOptions, Outcome, PROOF_TTL_MS,
};

pub use self::host::{CallAdmission, DriverCall, Host};
use crate::swap::pending_work::GpuWork;
use crate::swap::{GIVEN_UP, LOADER_HELD, NO_HOST_MEMORY};

/// Result of an order: its outcome, and the driver's error code (0: no error of the driver).
pub type Ended = (Outcome, u32);

/// State machine for the controller's orders: the phase of the process, and the values on which a
/// restore depends.
#[derive(Debug)]
pub struct OrderMachine {
    phase: Phase,
    allocations_held: bool,
    vram_bytes: u64,
    /// Time until which a copy in may wait for VRAM, in milliseconds. Set by each order.
    await_vram_until_ms: u64,
    /// Number of consecutive restores that failed with a code which means that the context is lost.
    lost_returns: u32,
    /// The code that the driver returns for every call since the context is lost; `None`: not lost.
    broken: Option<u32>,
}

/// Maximum time, in milliseconds, that an offload waits for running work on the GPU to end. The
/// process is idle by then, so most of its work has ended.
const MAX_WORK_MS: u32 = 5_000;

/// Maximum number of consecutive restores that fail because the context is lost. After the last of
/// them, calls return an error. Until then the restore is repeated, because the driver may use
/// other memory the next time.
const MAX_LOST_RETURNS: u32 = 3;

impl OrderMachine {
    /// Creates the machine of a running process. Its allocations are paused until the controller
    /// has sent its Welcome, because the free VRAM may be granted to another process.
    pub fn new() -> OrderMachine {
        OrderMachine {
            phase: Phase::Open,
            allocations_held: true,
            vram_bytes: 0,
            await_vram_until_ms: 0,
            lost_returns: 0,
            broken: None,
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether the gate pauses the application's allocations.
    pub fn allocations_held(&self) -> bool {
        self.allocations_held
    }

    /// Executes an order that the controller decided at `decided_ms` (0: time unknown). An order is
    /// late if it is older than [`PROOF_TTL_MS`], for example because this process or the
    /// controller was stopped. The VRAM may by then be granted to another process. Therefore a late
    /// restore is refused, and a late copy out is executed without the copier, which would need
    /// VRAM.
    pub fn obey(&mut self, host: &mut impl Host, action: Action, decided_ms: u64) -> Ended {
        let now_ms = host.now_us() / 1_000;
        let age_ms = now_ms.saturating_sub(decided_ms);
        // If the time of the decision is unknown, it may have been `PROOF_TTL_MS` ago.
        let decided = if decided_ms > 0 { decided_ms } else { now_ms.saturating_sub(PROOF_TTL_MS) };
        self.await_vram_until_ms = decided + AWAIT_VRAM_MS;
        let late = decided_ms > 0 && age_ms > PROOF_TTL_MS;
        match action {
            _ if late && action.is_restore() => (Outcome::Late, 0),
            // Copy out without the copier, because the copier would need VRAM on the device. That
            // VRAM may be granted to another process by now.
            Action::CopyOut { vram_bytes, how } if late => {
                let how = CopyOptions { then_checkpoint: false, ..how };
                self.execute_order(host, Action::CopyOut { vram_bytes, how })
            }
            action => self.execute_order(host, action),
        }
    }

    /// Executes an order of the controller completely, and returns its result.
    pub fn execute_order(&mut self, host: &mut impl Host, action: Action) -> Ended {
        if !admits(self.phase, action) {
            // Query the driver's state first, because another program may have moved the process
            // with the driver's checkpoint interface.
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
            Action::Lock { timeout_ms } => self.lock(host, timeout_ms),
            Action::CopyOut { .. } if !host.is_eligible() => (Outcome::Unsupported, 0),
            Action::CopyOut { vram_bytes, how } => {
                self.vram_bytes = vram_bytes;
                self.copy_out(host, how)
            }
            Action::Checkpoint { vram_bytes } => self.checkpoint_if_safe(host, vram_bytes),
            Action::Restore | Action::RestoreAsFreed => {
                let awaits = action == Action::RestoreAsFreed;
                let until_us = self.await_vram_until_ms.saturating_mul(1_000);
                let ended = self.restore(host, DriverCall::Restore, awaits.then_some(until_us));
                if ended.0 != Outcome::Done {
                    host.leave_copier();
                }
                self.hand_over_if_lost(host, ended)
            }
            Action::RestoreOnGpu { from, to } => self.restore_on_gpu(host, from, to),
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

    fn lock(&mut self, host: &mut impl Host, timeout_ms: u32) -> Ended {
        if let Some(code) = self.broken {
            return (Outcome::DriverError, code);
        }
        if !host.is_eligible() {
            return (Outcome::Unsupported, 0);
        }
        host.note_threads();
        // The driver takes 0 as "no limit".
        let call = DriverCall::Lock(timeout_ms.max(1));
        self.step(host, call, Phase::Locking, Phase::Locked)
    }

    fn checkpoint_if_safe(&mut self, host: &mut impl Host, vram_bytes: u64) -> Ended {
        if !host.is_eligible() || host.keeps_context() {
            return (Outcome::Unsupported, 0);
        }
        if host.holds_imported() {
            return (Outcome::Imported, 0);
        }
        self.vram_bytes = vram_bytes;
        self.checkpoint(host)
    }

    fn restore_on_gpu(&mut self, host: &mut impl Host, from: u8, to: u8) -> Ended {
        // Close the connection to the copier, because it would copy into memory of the GPU that the
        // process leaves.
        host.leave_copier();
        if host.exported_bytes() > 0 || !host.can_move(from, to) {
            return (Outcome::Unreachable, 0);
        }
        let ended = self.restore(host, DriverCall::RestoreOn(from, to), None);
        self.hand_over_if_lost(host, ended)
    }

    /// Ends the pause of allocations. Calls that waited only for the end of the pause continue.
    pub fn release_allocations(&mut self, host: &mut impl Host) {
        if self.allocations_held && self.phase == Phase::Open {
            host.set_gate(Gate::Open);
        }
        self.allocations_held = false;
    }

    /// Restores the process without a controller, if that is possible now. True: the phase is Open,
    /// so calls no longer wait at the gate.
    pub fn restore_self(&mut self, host: &mut impl Host) -> bool {
        let is_back = self.run_self_restore(host);
        host.end_return();
        is_back
    }

    fn run_self_restore(&mut self, host: &mut impl Host) -> bool {
        // Close the connection to the copier. Otherwise its device memory for this process would
        // count as used in the check for free VRAM.
        host.leave_copier();
        self.release_allocations(host);
        self.observe(host);
        loop {
            let action = match self.phase {
                Phase::Open => return true,
                Phase::Closed => Action::Open,
                Phase::Locked => Action::Unlock,
                // Without free VRAM the restore of a checkpointed process would fail, and the
                // process would be lost. A process that is only copied out would keep its content,
                // but must not take VRAM that is granted to another process.
                Phase::Checkpointed | Phase::CopiedOut if self.has_room(host) => Action::Restore,
                _ => return false,
            };
            if self.execute_order(host, action).0 != Outcome::Done {
                return self.phase == Phase::Open;
            }
        }
    }

    fn has_room(&self, host: &mut impl Host) -> bool {
        let on_device = host.exported_bytes();
        // What was not copied out is on the device, and does not have to be free in addition.
        let most_bytes = match self.phase {
            Phase::CopiedOut => host.copied_out_bytes(),
            _ => u64::MAX,
        };
        host.begin_return(self.vram_bytes.saturating_sub(on_device).min(most_bytes))
    }

    /// Whether the driver has already ended in this process, which then ends too. If so, there is
    /// nothing to restore, so the gate is opened. Calls then pass and return DEINITIALIZED, as they
    /// do without this library.
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
        // A closed gate pauses allocations anyway, so the Close ends the pause that was ordered
        // before.
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
            // The gate is closed, so no call is inside the driver. Allocations are paused when the
            // gate opens.
            return (Outcome::Done, 0);
        }
        host.set_sealed(false);
        host.set_gate(Gate::AllocationsHeld);
        if host.fence() && wait_drained(host, CallAdmission::Allocating, deadline_ms) {
            return (Outcome::Done, 0);
        }
        // The controller does not wait for this process. Calls that are inside the driver may still
        // take memory, but no further call enters it before the release.
        (Outcome::Busy, 0)
    }

    /// Unlocks the process. The phase is then Closed, or CopiedOut if any content is copied out.
    fn unlock(&mut self, host: &mut impl Host) -> Ended {
        let after = if host.is_parked() { Phase::CopiedOut } else { Phase::Closed };
        self.step(host, DriverCall::Unlock, Phase::Unlocking, after)
    }

    /// Copies memory out after the GPU's work has ended. The gate admits no new work, so the memory
    /// does not change. A locked process is unlocked first, because copies need the driver. In that
    /// case the lock has already waited for the work.
    fn copy_out(&mut self, host: &mut impl Host, how: CopyOptions) -> Ended {
        let quiet = match self.phase {
            Phase::Locked => self.unlock(host),
            _ => self.await_work(host),
        };
        if quiet.0 != Outcome::Done {
            return quiet;
        }
        self.enter(host, Phase::CopyingOut);
        match host.copy_out(how, self.vram_bytes) {
            Ok(()) => {
                self.enter(host, Phase::CopiedOut);
                (Outcome::Done, 0)
            }
            Err(code) => self.moved(host, code),
        }
    }

    /// Waits until the GPU's work has ended. If events cannot show whether work runs, uses the
    /// driver's lock, which also waits for the work.
    fn await_work(&mut self, host: &mut impl Host) -> Ended {
        let end_us = host.now_us() + u64::from(MAX_WORK_MS) * 1_000;
        match host.await_work(end_us) {
            GpuWork::Done => (Outcome::Done, 0),
            GpuWork::Running => (Outcome::Busy, result::NOT_READY),
            GpuWork::Failed(result::DEINITIALIZED) => {
                self.open(host);
                (Outcome::DriverError, result::DEINITIALIZED)
            }
            GpuWork::Failed(code) => (Outcome::DriverError, code),
            GpuWork::Unseen { may_end } => {
                host.note_threads();
                let call = DriverCall::Lock(MAX_WORK_MS);
                match self.step(host, call, Phase::Locking, Phase::Locked) {
                    (Outcome::Done, _) => self.unlock(host),
                    // The driver locks no client of MPS. If what hides the work may end, this is
                    // no failure of copies.
                    (Outcome::DriverError, result::NOT_SUPPORTED) if may_end => {
                        (Outcome::Busy, result::NOT_SUPPORTED)
                    }
                    ended => ended,
                }
            }
        }
    }

    /// Sets the phase after a failed copy out or copy in, and returns the result for the error
    /// code. The phase is CopiedOut if anything is copied out, else Closed. It is Open if the
    /// driver has ended (DEINITIALIZED).
    fn moved(&mut self, host: &mut impl Host, code: u32) -> Ended {
        if code == result::DEINITIALIZED {
            self.open(host);
            return (Outcome::DriverError, code);
        }
        let phase = if host.is_parked() { Phase::CopiedOut } else { Phase::Closed };
        self.enter(host, phase);
        match code {
            NO_HOST_MEMORY => (Outcome::NoHostMemory, 0),
            GIVEN_UP => (Outcome::GivenUp, 0),
            LOADER_HELD => (Outcome::Busy, code),
            code => (Outcome::DriverError, code),
        }
    }

    fn checkpoint(&mut self, host: &mut impl Host) -> Ended {
        if self.phase == Phase::CopiedOut {
            // Nothing runs on the GPU, because the copy out has waited for all work, and the gate
            // is closed.
            host.release_copied(self.vram_bytes);
            let call = DriverCall::Lock(MAX_WORK_MS);
            match self.step(host, call, Phase::Locking, Phase::Locked) {
                (Outcome::Done, _) => {}
                ended => return ended,
            }
        }
        let call = DriverCall::Checkpoint;
        let ended = self.step(host, call, Phase::Checkpointing, Phase::Checkpointed);
        if self.phase == Phase::Checkpointed {
            // The checkpoint has succeeded, but the copier may not have copied everything.
            if !host.settle() {
                return (Outcome::NotCopied, 0);
            }
            host.announce_offloaded();
        }
        // The checkpoint has failed after a copy-out, so unlock the process. Its phase is then
        // CopiedOut again.
        if self.phase == Phase::Locked && host.is_parked() {
            self.unlock(host);
        }
        ended
    }

    fn restore(
        &mut self,
        host: &mut impl Host,
        call: DriverCall,
        awaits_vram_until_us: Option<u64>,
    ) -> Ended {
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
        match host.copy_in(awaits_vram_until_us) {
            Ok(()) => {
                self.enter(host, Phase::Closed);
                (Outcome::Done, 0)
            }
            Err(code) => self.moved(host, code),
        }
    }

    /// Checks whether a step of a restore has failed because the context is lost, as after an
    /// uncorrectable memory error. Callers must not wait without end in this case, so their calls
    /// return an error:
    ///
    /// - If the driver reports the state RUNNING and returns the same code again, the gate opens.
    ///   Calls pass, and the driver returns its error, as without this library. No call needs the
    ///   memory that is not copied in, because all calls fail.
    /// - Otherwise the restore may be tried again. After [`MAX_LOST_RETURNS`] failed restores, the
    ///   gate returns an error for every call. No call reaches the driver, because the driver's
    ///   state of the process is not restored.
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
            // The process is ending and its driver has ended: nothing is left to restore, and every
            // call returns this code. Waiting callers go on to the end of the process.
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

    /// Updates the phase from the state that the driver reports. Does nothing while the phase is
    /// Open.
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
        Action::Unlock => phase == Phase::Locked,
        Action::CopyOut { .. } => matches!(phase, Phase::Closed | Phase::Locked),
        Action::Checkpoint { .. } => matches!(phase, Phase::Locked | Phase::CopiedOut),
        Action::Restore => phase.is_offloaded(),
        Action::RestoreAsFreed => phase == Phase::CopiedOut,
        Action::RestoreOnGpu { .. } => phase == Phase::Checkpointed,
    }
}

/// Waits until no call of the set `calls` is inside the driver, then seals the gate and returns
/// true. Returns false after `deadline_ms`. If the set is `All`, also returns false if a caller
/// waits at the gate while another call is still inside the driver. The process is then not idle.
/// Besides, the call inside the driver may be unable to end before the caller at the gate
/// continues.
fn wait_drained(host: &mut impl Host, calls: CallAdmission, deadline_ms: u32) -> bool {
    const MAX_SLEEP_US: u64 = 2_000;
    let end = host.now_us() + u64::from(deadline_ms) * 1_000;
    let mut sleep_us = 20;
    loop {
        // The fence has passed. The first check proves that no outer call passes the gate, the
        // second that no nested call has passed before the seal.
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
