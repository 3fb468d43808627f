//! Decides whether a container may be offloaded now, and gives the reason if not.

use affinode_proto::{event::EventKind, reason::Reason, state::State, wire::Hazards};

use super::{
    Key, Millis, Node, container::Goal, event::NodeEvent, node::text_of, plan::OffloadMethod,
    policy::Mode, process::Process,
};

const HAZARDS: [(Hazards, Reason); 10] = [
    (Hazards::DAMAGED_MEMORY, Reason::DamagedMemory),
    (Hazards::DIRECT_ACCESS, Reason::DirectAccess),
    (Hazards::MANAGED_MEMORY, Reason::ManagedMemory),
    (Hazards::PEER_ACCESS, Reason::PeerAccess),
    (Hazards::SHARED_MEMORY, Reason::SharedMemory),
    (Hazards::MPS, Reason::Mps),
    (Hazards::NO_CHECKPOINT_API, Reason::DriverTooOld),
    (Hazards::VIDEO, Reason::Video),
    (Hazards::TOOLS, Reason::Tools),
    (Hazards::HIDDEN_WAY, Reason::HiddenWay),
];

/// The reason why a process with these hazards must not be offloaded, if there is one.
pub(super) fn hazard_reason(hazards: Hazards) -> Option<Reason> {
    HAZARDS.iter().find(|(bit, _)| hazards.intersects(*bit)).map(|(_, reason)| *reason)
}

/// Time without a call after which running GPU work is shown as the reason for staying resident.
const QUIET_MS: Millis = 2_000;

impl Node {
    /// Whether the container may be offloaded now. Otherwise returns the reason. `asked`: an
    /// operator or a waiter requests the offload, so mode, idleness and minimum residency do not
    /// matter.
    pub(super) fn check_offload(&self, key: &Key, asked: bool) -> Result<(), (Reason, String)> {
        let refuse = |reason: Reason| Err((reason, String::new()));
        let Some(c) = self.containers.get(key) else {
            return refuse(Reason::NotRegistered);
        };
        let processes = || self.processes.of(key).map(|(_, p)| p);
        if processes().next().is_none() {
            return refuse(Reason::NotRegistered);
        }
        let moves = self.moves(key);
        for process in processes() {
            // A copy out leaves the context on the GPU, so hazards of a checkpoint do not matter.
            let harmless = match moves(process) {
                OffloadMethod::Copy => process.copyable_hazards(),
                OffloadMethod::DriverCheckpoint | OffloadMethod::CopyAndCheckpoint => {
                    Hazards::default()
                }
            };
            if let Some(reason) = hazard_reason(process.hazards.without(harmless)) {
                return Err((reason, format!("process {}", process.identity.pid)));
            }
            if let Some(gpu) = self.cut_gpu_of(process) {
                return Err((Reason::Mig, format!("GPU {gpu}")));
            }
            if let Some(why) = &process.counter_error {
                return Err((Reason::BadPeer, format!("process {}: {why}", process.identity.pid)));
            }
            if !process.connected {
                return Err((Reason::AgentSilent, format!("process {}", process.identity.pid)));
            }
        }
        if c.policy.mode == Mode::Off {
            return refuse(Reason::ModeOff);
        }
        let is_void = self.has_nothing_to_copy(key);
        if is_void && processes().all(|p| p.keeps_context()) {
            // No memory can be copied, so the reason to show is the hazards because of which the
            // contexts stay.
            let kept = processes().next();
            let reason = kept.and_then(|p| hazard_reason(p.hazards));
            let detail = kept.map_or(String::new(), |p| format!("process {}", p.identity.pid));
            return Err((reason.unwrap_or(Reason::NothingToCopy), detail));
        }
        if is_void && !self.has_second_level(key) {
            return refuse(Reason::NothingToCopy);
        }
        self.wished(key, asked).or_else(refuse)?;
        if self.gpu_error.is_some() {
            return Err((Reason::VramUnknown, self.gpu_error.clone().unwrap_or_default()));
        }
        if processes().any(|p| p.counters.as_ref().is_some_and(|page| page.inflight > 0)) {
            return refuse(Reason::CallInProgress);
        }
        if asked {
            return Ok(());
        }
        if let Some((_, want)) = self.alloc_wait_of(key) {
            return Err((Reason::AllocationWaits, super::oom_wait::size(want.need.bytes)));
        }
        if c.busy_until().is_some_and(|until| self.now < until) {
            return refuse(Reason::HintedBusy);
        }
        // If the container calls all the time, "recent calls" is the better reason to show.
        let quiet_ms = self.now.saturating_sub(c.last_called);
        if quiet_ms >= QUIET_MS.min(c.idle_after_ms())
            && let Some((pid, percent)) = self.working(key)
        {
            return Err((Reason::GpuBusy, format!("process {pid}, {percent} %")));
        }
        if self.now.saturating_sub(c.last_use) < c.idle_after_ms() {
            return refuse(Reason::RecentCalls);
        }
        if self.is_too_small(key) {
            return refuse(Reason::TooSmall);
        }
        if is_void {
            return refuse(Reason::NothingToCopy);
        }
        if c.prewake_hold_until.is_some_and(|until| self.now < until) {
            return refuse(c.prewake_reason);
        }
        if c.restored_at.is_some_and(|t| self.now.saturating_sub(t) < c.policy.minimum_residency_ms)
        {
            return refuse(Reason::MinimumResidency);
        }
        if self.now < c.offload_not_before {
            return Err(c.reason.clone());
        }
        match c.policy.mode {
            Mode::Manual => refuse(Reason::ModeManual),
            // A waiter that needs the container's VRAM evicts the container: see `eviction.rs`.
            Mode::Pressure => refuse(Reason::NoPressure),
            _ if !c.policy.offload_window.is_open(self.week_minute()) => {
                refuse(Reason::OutsideWindow)
            }
            Mode::Auto if !self.leaves_when_idle(key) => refuse(Reason::Oversubscribed),
            _ => Ok(()),
        }
    }

    /// Whether the container must not be offloaded because it holds less VRAM than
    /// `minimum_vram_bytes`.
    pub(super) fn is_too_small(&self, key: &Key) -> bool {
        let least = self.containers.get(key).map_or(0, |c| c.policy.minimum_vram_bytes);
        let held = || -> u64 { self.processes.of(key).map(|(_, p)| p.vram_bytes()).sum() };
        least > 0 && (1..least).contains(&held())
    }

    /// The index of a GPU in MIG mode on which the process holds memory.
    pub(super) fn cut_gpu_of(&self, process: &Process) -> Option<u32> {
        let cut = self.gpus.iter().filter(|gpu| gpu.mig);
        let holds = |uuid: &str| process.vram.iter().any(|held| held.uuid == uuid);
        cut.filter(|gpu| holds(&gpu.uuid)).map(|gpu| gpu.index).next()
    }

    /// Publishes that the container stays resident, and why. The event is published once per
    /// reason.
    pub(super) fn refuse_offload(&mut self, key: &Key, reason: Reason, detail: &str) {
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        if container.refused.replace(reason) != Some(reason) {
            self.publish_refusal(key, reason, detail);
        }
    }

    /// Publishes the event of a refusal.
    pub(super) fn publish_refusal(&mut self, key: &Key, reason: Reason, detail: &str) {
        let event = NodeEvent::new(EventKind::Refused, text_of(reason, detail));
        self.publish(key, event.because(reason));
    }

    /// Updates whether the container is idle, and begins an offload if the policy says so.
    pub(super) fn evaluate(&mut self, key: &Key) {
        let Some(c) = self.containers.get(key) else {
            return;
        };
        if c.goal != Goal::Resident || !matches!(c.state, State::Active | State::Idle) {
            return;
        }
        self.update_oversubscription();
        let Some(c) = self.containers.get(key) else { return };
        let verdict = self.check_offload(key, false);
        let idle = self.now.saturating_sub(c.last_use) >= c.idle_after_ms()
            && !matches!(verdict, Err((Reason::CallInProgress | Reason::GpuBusy, _)));
        match verdict {
            Ok(()) => {
                self.set_state(key, State::Idle, Reason::IdleTimeout, "", 0, 0);
                self.begin_offload(key, Reason::IdleTimeout);
            }
            Err((reason, detail)) => {
                let state = if idle { State::Idle } else { State::Active };
                self.set_state(key, state, reason, &detail, 0, 0);
                if is_unsafe(reason) {
                    self.refuse_offload(key, reason, &detail);
                }
            }
        }
    }
}

/// Whether the reason is a property of the process or its GPU. Such a reason is permanent, so an
/// event reports it.
pub(super) fn is_unsafe(reason: Reason) -> bool {
    reason == Reason::Mig || HAZARDS.iter().any(|(_, hazard)| *hazard == reason)
}
