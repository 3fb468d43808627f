//! The way out and the way home of a container.
//!
//! ```text
//! Home ──idle, policy──> Leaving ──survey says go──> Out: close, lock, survey, journal, checkpoint
//!   ^                       │ in use or no room        │ busy, error, wake
//!   └───────────────────────┴──────────────────────────┘ unlock, open; what is away is queued for its return
//! ```

use affinode_proto::{
    api::control::Event,
    reason::Reason,
    state::State,
    wire::{
        Hazards, Phase,
        message::{Action, ControllerMessage, Outcome},
    },
};

use super::{
    DeviceBytes, Effect, Key, Millis, Node, ProcessId, Record, RecordedProcess,
    container::{Container, Goal},
    input::{Request, Survey},
    merge_needs,
    node::text_of,
    plan::{self, Out, Position},
    policy::Mode,
    process::Process,
};

/// Beyond its own deadline an order is late after this, and the offload is given up.
const LATE_MS: Millis = 5_000;
/// A driver call that takes longer than this is shown as such; it is never cut off.
const SLOW_MS: Millis = 60_000;
/// What the driver answers when a lock finds work in progress.
const CUDA_ERROR_NOT_READY: u32 = 600;
/// What the driver answers to a checkpoint with managed memory.
const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

const HAZARDS: [(Hazards, Reason); 5] = [
    (Hazards::MANAGED_MEMORY, Reason::ManagedMemory),
    (Hazards::PEER_ACCESS, Reason::PeerAccess),
    (Hazards::SHARED_MEMORY, Reason::SharedMemory),
    (Hazards::MPS, Reason::Mps),
    (Hazards::NO_CHECKPOINT_API, Reason::DriverTooOld),
];

impl Node {
    /// Whether the container may be offloaded now. `asked`: by a person, so that
    /// mode, idleness and residency do not matter.
    pub(super) fn may_offload(&self, key: &Key, asked: bool) -> Result<(), (Reason, String)> {
        let refuse = |reason: Reason| Err((reason, String::new()));
        let Some(c) = self.containers.get(key) else {
            return refuse(Reason::NotRegistered);
        };
        let processes: Vec<&Process> = self.processes.of(key).map(|(_, p)| p).collect();
        if processes.is_empty() {
            return refuse(Reason::NotRegistered);
        }
        for process in &processes {
            if let Some((_, reason)) =
                HAZARDS.iter().find(|(bit, _)| process.hazards.contains(*bit))
            {
                return Err((*reason, format!("process {}", process.identity.pid)));
            }
            if let Some(why) = &process.bad_page {
                return Err((Reason::BadPeer, format!("process {}: {why}", process.identity.pid)));
            }
            if !process.connected {
                return Err((Reason::AgentSilent, format!("process {}", process.identity.pid)));
            }
        }
        if c.policy.mode == Mode::Off {
            return refuse(Reason::ModeOff);
        }
        if self.gpu_error.is_some() {
            return Err((Reason::VramUnknown, self.gpu_error.clone().unwrap_or_default()));
        }
        if processes.iter().any(|p| p.page.as_ref().is_some_and(|page| page.inflight > 0)) {
            return refuse(Reason::CallInProgress);
        }
        if asked {
            return Ok(());
        }
        if self.now.saturating_sub(c.last_use) < c.idle_after_ms() {
            return refuse(Reason::RecentCalls);
        }
        if c.expected_until.is_some_and(|until| self.now < until) {
            return refuse(Reason::Expected);
        }
        if c.came_home.is_some_and(|t| self.now.saturating_sub(t) < c.policy.minimum_residency_ms) {
            return refuse(Reason::MinimumResidency);
        }
        if self.now < c.not_before {
            return Err(c.reason.clone());
        }
        match c.policy.mode {
            Mode::Manual => refuse(Reason::ModeManual),
            // Whoever needs its room takes it: see `room.rs`.
            Mode::Pressure => refuse(Reason::NoPressure),
            _ => Ok(()),
        }
    }

    /// Shows whether the container is idle, and sends it away when policy says so.
    pub(super) fn consider(&mut self, key: &Key) {
        let Some(c) = self.containers.get(key) else {
            return;
        };
        if c.goal != Goal::Home || !matches!(c.state, State::Active | State::Idle) {
            return;
        }
        let verdict = self.may_offload(key, false);
        let idle = self.now.saturating_sub(c.last_use) >= c.idle_after_ms()
            && !matches!(verdict, Err((Reason::CallInProgress, _)));
        match verdict {
            Ok(()) => {
                self.set_state(key, State::Idle, Reason::IdleTimeout, "", 0, 0);
                self.leave(key, Reason::IdleTimeout);
            }
            Err((reason, detail)) => {
                let state = if idle { State::Idle } else { State::Active };
                self.set_state(key, state, reason, &detail, 0, 0);
            }
        }
    }

    /// Begins the way out: looks at host memory and devices first.
    pub(super) fn leave(&mut self, key: &Key, why: Reason) {
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        container.goal = Goal::Leaving;
        container.missed = container.expected_until.take().is_some();
        container.cause = why;
        container.reason = (why, String::new());
        container.offload_began = Some(self.now);
        self.survey(key);
    }

    fn survey(&mut self, key: &Key) {
        let processes =
            self.processes.of(key).map(|(_, p)| (p.identity.pid, p.vram_bytes())).collect();
        if let Some(container) = self.containers.get_mut(key).filter(|c| !c.surveying) {
            container.surveying = true;
            self.effects.push(Effect::Survey { key: key.clone(), processes });
        }
    }

    pub(super) fn surveyed(&mut self, key: &Key, survey: Survey) {
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        container.surveying = false;
        let (goal, cause) = (container.goal, container.cause);
        let verdict = match survey.gpus {
            Ok(gpus) => {
                self.take_survey(key, &gpus);
                survey.room
            }
            Err(error) => Err((Reason::VramUnknown, error)),
        };
        // Nothing to gain; and of what NVML does not see nobody knows what a return needs.
        let holds_vram = self.processes.of(key).any(|(_, p)| p.vram_bytes() > 0);
        let verdict = verdict.and_then(|()| {
            let away = self.processes.of(key).any(|(_, p)| p.phase == Phase::Away);
            if holds_vram || away { Ok(()) } else { Err((Reason::NoVram, String::new())) }
        });
        match (goal, verdict) {
            (Goal::Home, _) => self.advance(key),
            (_, Err((reason, detail))) => self.fail_offload(key, reason, &detail),
            (Goal::Leaving, Ok(())) => {
                if let Some(container) = self.containers.get_mut(key) {
                    container.goal = Goal::Out;
                }
                self.set_state(key, State::Closing, cause, "", 0, 0);
                self.advance(key);
            }
            (Goal::Out, Ok(())) => {
                if let Out::Checkpoint(process) =
                    plan::out(&self.positions(key), self.settings.deadlines)
                {
                    self.checkpoint(key, process);
                }
                self.advance(key);
            }
        }
    }

    /// Every process is locked, host memory was found: note what will be needed
    /// for the return, then let the driver move this process out.
    fn checkpoint(&mut self, key: &Key, id: ProcessId) {
        self.set_state(key, State::Offloading, self.cause(key), "", 0, 0);
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        // A process that allocated and that NVML does not list: the figure is not known.
        let claimed = process.page.as_ref().is_some_and(|page| page.allocated_bytes > 0);
        process.away = (!process.vram.is_empty() || !claimed).then(|| process.vram.clone());
        let vram_bytes = process.away.iter().flatten().map(|d| d.bytes).max().unwrap_or(0);
        self.journal(key, "checkpoint");
        self.order(id, Action::Checkpoint { vram_bytes });
    }

    pub(super) fn journal(&mut self, key: &Key, step: &str) {
        let processes = self
            .processes
            .of(key)
            .filter_map(|(_, p)| {
                let (pid, start_ticks) = (p.identity.pid, p.identity.start_ticks);
                p.away.clone().map(|away| RecordedProcess { pid, start_ticks, away })
            })
            .collect();
        self.effects
            .push(Effect::Journal(key.clone(), Some(Record { step: step.to_owned(), processes })));
    }

    fn cause(&self, key: &Key) -> Reason {
        self.containers.get(key).map_or(Reason::Requested, |c| c.cause)
    }

    /// What a process that is away needs to come back. Without a record (a journal
    /// that was lost): all that its hooks counted and a context, on every device.
    pub(super) fn needs(&self, process: &Process) -> Vec<DeviceBytes> {
        const CONTEXT_BYTES: u64 = 1 << 30;
        if let Some(away) = &process.away {
            return away.clone();
        }
        let claimed = process.page.as_ref().map_or(0, |page| page.allocated_bytes);
        self.gpus
            .iter()
            .map(|gpu| DeviceBytes {
                uuid: gpu.uuid.clone(),
                bytes: claimed
                    .saturating_add(CONTEXT_BYTES)
                    .min(gpu.total_bytes - gpu.total_bytes / 16),
            })
            .collect()
    }

    /// What the processes of a container that are away need together.
    pub(super) fn container_needs(&self, key: &Key) -> Vec<DeviceBytes> {
        let needs: Vec<DeviceBytes> = self
            .processes
            .of(key)
            .filter(|(_, p)| p.phase == Phase::Away)
            .flat_map(|(_, p)| self.needs(p))
            .collect();
        merge_needs(&needs)
    }

    fn positions(&self, key: &Key) -> Vec<Position> {
        let out = self.containers.get(key).is_some_and(|c| c.goal == Goal::Out);
        self.processes
            .of(key)
            .map(|(id, p)| Position {
                process: id,
                phase: p.phase,
                occupied: !p.connected || p.pending.is_some() || (out && p.holds > 0),
            })
            .collect()
    }

    /// Does the next thing for a container, if there is one.
    pub(super) fn advance(&mut self, key: &Key) {
        let Some(container) = self.containers.get(key) else {
            return;
        };
        if container.state == State::Unregistered {
            return;
        }
        let positions = self.positions(key);
        if positions.is_empty() {
            return;
        }
        match container.goal {
            Goal::Leaving => {}
            Goal::Out => self.advance_out(key, &positions),
            Goal::Home => self.advance_home(key, &positions),
        }
    }

    fn advance_out(&mut self, key: &Key, positions: &[Position]) {
        match plan::out(positions, self.settings.deadlines) {
            Out::Wait => {}
            Out::Send(orders) => {
                for (process, action) in orders {
                    self.order(process, action);
                }
            }
            Out::Checkpoint(_) => self.survey(key),
            Out::Done => self.arrived_out(key),
        }
    }

    fn arrived_out(&mut self, key: &Key) {
        let now = self.now;
        let bytes = self.away_bytes(key);
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        if container.state == State::Offloaded {
            return;
        }
        let elapsed = container.offload_began.take().map_or(0, |began| now.saturating_sub(began));
        container.offloads += 1;
        container.last_offload_ms = elapsed;
        container.failures = 0;
        let cause = container.cause;
        self.set_state(key, State::Offloaded, cause, "", bytes, elapsed);
        self.answer(key, Request::Offload, true, bytes, elapsed);
    }

    fn away_bytes(&self, key: &Key) -> u64 {
        self.processes
            .of(key)
            .filter(|(_, p)| p.phase == Phase::Away)
            .map(|(_, p)| p.away_bytes())
            .sum()
    }

    fn advance_home(&mut self, key: &Key, positions: &[Position]) {
        let lost = self.containers.get(key).is_some_and(|c| c.state == State::Lost);
        let plan = plan::home(positions, lost);
        for (process, action) in plan.send {
            self.order(process, action);
        }
        if plan.done {
            self.arrived_home(key);
        } else if let Some(process) = plan.restore {
            if self.grants.get(key).is_some_and(super::grant::Grant::is_granted) {
                if let Some(container) = self.containers.get_mut(key) {
                    container.restore_began.get_or_insert(self.now);
                }
                self.set_state(key, State::Restoring, self.cause(key), "", 0, 0);
                self.journal(key, "restore");
                self.order(process, Action::Restore);
            } else if !self.grants.contains_key(key) {
                self.enqueue(key);
            }
        }
    }

    fn enqueue(&mut self, key: &Key) {
        let now = self.now;
        let Some(container) = self.containers.get(key) else {
            return;
        };
        if now < container.not_before && container.state == State::Lost {
            return;
        }
        let priority = container.policy.priority;
        self.queue.enter(key, priority, now);
        if container.state != State::Lost {
            self.set_state(key, State::Queued, self.cause(key), "", 0, 0);
        }
    }

    /// Every process is open.
    fn arrived_home(&mut self, key: &Key) {
        let now = self.now;
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        if matches!(container.state, State::Active | State::Idle | State::Unregistered) {
            return;
        }
        let was_away = self.processes.of(key).any(|(_, p)| p.away.is_some());
        let bytes: u64 = self.processes.of(key).map(|(_, p)| p.away_bytes()).sum();
        let since = |began: Option<Millis>| began.map_or(0, |began| now.saturating_sub(began));
        let elapsed = since(container.wake_began.take());
        let restore_ms = since(container.restore_began.take());
        container.offload_began = None;
        if container.cause != Reason::Expected {
            container.last_use = now;
        }
        if was_away
            && matches!(
                container.state,
                State::Restoring | State::Queued | State::Lost | State::Offloaded
            )
        {
            container.restores += 1;
            container.came_home = Some(now);
            container.last_wake_ms = elapsed.max(restore_ms);
            container.last_restore_ms = restore_ms;
            container.reason = (container.cause, String::new());
        }
        let (reason, detail) = container.reason.clone();
        for id in self.members(key) {
            if let Some(process) = self.processes.get_mut(&id) {
                process.away = None;
            }
        }
        self.siblings_are_back(key);
        self.end_grant(key);
        self.ledger.release(key);
        self.queue.leave(key);
        self.effects.push(Effect::Journal(key.clone(), None));
        self.set_state(key, State::Active, reason, &detail, bytes, elapsed);
        self.answer(key, Request::Restore, true, bytes, elapsed);
        self.leave_again(key);
    }

    /// An offload that was asked for while the container came home begins now.
    fn leave_again(&mut self, key: &Key) {
        let asked = |c: &Container| c.commands.iter().any(|(_, r)| *r == Request::Offload);
        if !self.containers.get(key).is_some_and(asked) {
            return;
        }
        match self.may_offload(key, true) {
            Ok(()) => self.leave(key, Reason::Requested),
            Err(reason) => {
                if let Some(container) = self.containers.get_mut(key) {
                    container.reason = reason;
                }
                self.answer(key, Request::Offload, false, 0, 0);
            }
        }
    }

    /// Nobody waits for an answer that no arrival will bring: the container is home and
    /// not about to leave, because it was called or a process started meanwhile.
    pub(super) fn settle_requests(&mut self, key: &Key) {
        let Some(c) = self.containers.get_mut(key) else { return };
        let home = c.goal == Goal::Home && matches!(c.state, State::Active | State::Idle);
        if home && !c.commands.is_empty() {
            c.reason = (Reason::WokenMeanwhile, String::new());
            self.answer(key, Request::Offload, false, 0, 0);
            self.answer(key, Request::Restore, true, 0, 0);
        }
    }

    /// Gives up an offload: whatever was done so far is undone.
    pub(super) fn fail_offload(&mut self, key: &Key, reason: Reason, detail: &str) {
        let now = self.now;
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        container.goal = Goal::Home;
        container.cause = reason;
        container.reason = (reason, detail.to_owned());
        container.failures += 1;
        // Tried again after the idle timeout, each time twice as long, at most an hour.
        let base = container.policy.idle_timeout_ms.clamp(1_000, 300_000);
        container.not_before = now + (base << container.failures.min(6)).min(3_600_000);
        container.offload_began = None;
        self.publish(
            key,
            Event {
                kind: "refused".into(),
                reason: reason.to_string(),
                text: text_of(reason, detail),
                ..Event::default()
            },
        );
        self.answer(key, Request::Offload, false, 0, 0);
        self.advance(key);
    }

    pub(super) fn wake(&mut self, id: ProcessId, generation: u64) {
        let now = self.now;
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        if process.phase == Phase::Open && process.pending.is_none() {
            return; // The gate is open again: the wake crossed the order.
        }
        process.generation = generation;
        let key = process.key.clone();
        let Some(container) = self.containers.get_mut(&key) else {
            return;
        };
        if container.wake_began.is_none() {
            container.wake_began = Some(now);
            let pause = container.pause_ends(now, &mut self.pauses);
            container.history.returned(pause);
            container.missed = false;
        }
        container.last_use = now;
        if container.goal != Goal::Home {
            let meanwhile = container.state != State::Offloaded;
            container.goal = Goal::Home;
            container.cause = if meanwhile { Reason::WokenMeanwhile } else { Reason::Called };
            container.reason = (container.cause, String::new());
            if meanwhile {
                self.answer(&key, Request::Offload, false, 0, 0);
            }
            self.advance(&key);
        }
        let position = self.queue.position(&key, now).unwrap_or(0);
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        self.effects.push(Effect::Send(id, ControllerMessage::WakeAck { generation, position }));
    }

    pub(super) fn report(
        &mut self,
        id: ProcessId,
        order: u64,
        outcome: Outcome,
        phase: Phase,
        cuda_error: u32,
    ) {
        if self.hold_reported(id, order, outcome) {
            return;
        }
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        let Some(pending) = process.pending.filter(|pending| pending.order == order) else {
            return;
        };
        process.pending = None;
        process.phase = phase;
        let key = process.key.clone();
        let pid = process.identity.pid;
        if phase != Phase::Away && matches!(pending.action, Action::Checkpoint { .. }) {
            process.away = None;
        }
        let failed = |call: &str| format!("{call} of process {pid} returned {cuda_error}");
        if phase == Phase::Away {
            process.vram.clear();
        } else if pending.action == Action::Restore {
            // Until NVML is read again: what it gave back it has again.
            process.vram = process.away.clone().unwrap_or_default();
        }
        match (pending.action, outcome) {
            (_, Outcome::Done | Outcome::WrongPhase) => {}
            (_, Outcome::Unsupported) => {
                process.hazards.0 |= Hazards::NO_CHECKPOINT_API.0;
                self.fail_offload(&key, Reason::DriverTooOld, "");
            }
            (Action::Close { .. }, _) => {
                self.fail_offload(&key, Reason::Busy, &format!("process {pid}"))
            }
            (Action::Lock { .. }, Outcome::Busy) => {
                self.fail_offload(&key, Reason::Busy, &format!("process {pid}"))
            }
            (Action::Lock { .. }, _) if cuda_error == CUDA_ERROR_NOT_READY => {
                self.fail_offload(
                    &key,
                    Reason::Busy,
                    &format!("work of process {pid} is running on the GPU"),
                );
            }
            (Action::Lock { .. }, _) => {
                self.fail_offload(&key, Reason::DriverError, &failed("cuCheckpointProcessLock"))
            }
            (Action::Checkpoint { .. }, _) if cuda_error == CUDA_ERROR_NOT_SUPPORTED => {
                process.hazards.0 |= Hazards::MANAGED_MEMORY.0;
                self.fail_offload(
                    &key,
                    Reason::ManagedMemory,
                    &failed("cuCheckpointProcessCheckpoint"),
                );
            }
            (Action::Checkpoint { .. }, _) => {
                self.fail_offload(
                    &key,
                    Reason::DriverError,
                    &failed("cuCheckpointProcessCheckpoint"),
                );
            }
            (Action::Restore, _) if phase == Phase::Away => {
                self.restore_failed(&key, &failed("cuCheckpointProcessRestore"))
            }
            _ => self.publish(
                &key,
                Event {
                    kind: "refused".into(),
                    reason: Reason::DriverError.to_string(),
                    text: failed("an order"),
                    ..Event::default()
                },
            ),
        }
        self.advance(&key);
    }

    /// The driver could not restore. It is tried again, seldom: the driver may know
    /// no way back, but nothing is lost by asking.
    fn restore_failed(&mut self, key: &Key, detail: &str) {
        const AGAIN_MS: Millis = 10_000;
        self.end_grant(key);
        self.ledger.release(key);
        self.queue.leave(key);
        if let Some(container) = self.containers.get_mut(key) {
            container.not_before = self.now + AGAIN_MS;
        }
        self.siblings_are_back(key);
        self.set_state(key, State::Lost, Reason::DriverLost, detail, 0, 0);
        self.answer(key, Request::Restore, false, 0, 0);
        self.answer(key, Request::Offload, false, 0, 0);
    }

    /// Orders that are late: an offload is given up, a driver call is only shown.
    pub(super) fn check_overdue(&mut self, key: &Key) {
        let now = self.now;
        let late = self.processes.of(key).find_map(|(_, p)| {
            let pending = p.pending?;
            let (limit, gives_up) = match pending.action {
                Action::Close { deadline_ms } => (Millis::from(deadline_ms) + LATE_MS, true),
                Action::Lock { timeout_ms } => (Millis::from(timeout_ms) + LATE_MS, true),
                _ => (SLOW_MS, false),
            };
            (now.saturating_sub(pending.since) > limit).then_some((p.identity.pid, gives_up))
        });
        let Some((pid, gives_up)) = late else { return };
        let out = self.containers.get(key).is_some_and(|c: &Container| c.goal == Goal::Out);
        if gives_up && out {
            self.fail_offload(key, Reason::AgentSilent, &format!("process {pid}"));
        } else if let Some(container) = self.containers.get_mut(key) {
            container.reason = (Reason::AgentSilent, format!("process {pid}"));
        }
    }
}
