//! Collects the facts that decide about an offload, and acts on the decision of [`super::eligibility`].

use affinode_proto::{event::EventKind, reason::Reason, state::State, wire::Hazards};

use super::{
    Key, Node,
    container::Offload,
    eligibility::{IdleFacts, OffloadFacts, ProcessFacts, Refusal, is_unsafe},
    event::NodeEvent,
    node::text_of,
    plan::OffloadMethod,
    process::Process,
};

impl Node {
    /// Checks whether the container may be offloaded now. If not, returns the reason and its
    /// detail. `asked`: an operator or a waiter requests the offload, so mode, idleness and minimum
    /// residency do not matter.
    pub(super) fn check_offload(&self, key: &Key, asked: bool) -> Result<(), Refusal> {
        let Some(container) = self.containers.get(key) else {
            return Err((Reason::NotRegistered, String::new()));
        };
        let moves = self.moves(key);
        let processes = self.processes.of(key);
        let facts = OffloadFacts {
            now: self.now,
            container,
            processes: processes.map(|(_, p)| self.process_facts(p, moves(p))).collect(),
            nothing_to_copy: self.has_nothing_to_copy(key),
            has_second_level: self.has_second_level(key),
            permitted: self.permitted(key, asked),
            gpu_error: self.gpu_error.as_deref(),
            idle: (!asked).then(|| self.idle_facts(key)),
        };
        facts.check()
    }

    fn process_facts<'a>(&self, process: &'a Process, method: OffloadMethod) -> ProcessFacts<'a> {
        let harmless = match method {
            OffloadMethod::Copy => process.copyable_hazards(),
            OffloadMethod::DriverCheckpoint | OffloadMethod::CopyAndCheckpoint => {
                Hazards::default()
            }
        };
        ProcessFacts {
            pid: process.identity.pid,
            hazards: process.hazards,
            unsafe_hazards: process.hazards.without(harmless),
            keeps_context: process.keeps_context(),
            mig_gpu: self.cut_gpu_of(process),
            counter_error: process.counter_error.as_deref(),
            connected: process.connected,
            in_call: process.counters.as_ref().is_some_and(|page| page.inflight > 0),
        }
    }

    fn idle_facts(&self, key: &Key) -> IdleFacts {
        let window = self.containers.get(key).map(|c| &c.policy.offload_window);
        IdleFacts {
            waiting_alloc_bytes: self.alloc_wait_of(key).map(|(_, wait)| wait.need.bytes),
            working: self.working(key),
            is_too_small: self.is_too_small(key),
            is_window_open: window.is_some_and(|window| window.is_open(self.week_minute())),
            leaves_when_idle: self.leaves_when_idle(key),
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

    /// Publishes an event that says why the container stays resident. Publishes nothing if the
    /// reason is the same as in the last such event.
    pub(super) fn refuse_offload(&mut self, key: &Key, reason: Reason, detail: &str) {
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        if container.shown.refused.replace(reason) != Some(reason) {
            self.publish_refusal(key, reason, detail);
        }
    }

    /// Publishes the event of a refused offload.
    pub(super) fn publish_refusal(&mut self, key: &Key, reason: Reason, detail: &str) {
        let event = NodeEvent::new(EventKind::Refused, text_of(reason, detail));
        self.publish(key, event.because(reason));
    }

    /// Updates whether the container is idle, and begins an offload if the policy says so.
    pub(super) fn evaluate(&mut self, key: &Key) {
        let Some(c) = self.containers.get(key) else {
            return;
        };
        if !c.goal.is_resident() || !matches!(c.shown.state, State::Active | State::Idle) {
            return;
        }
        self.update_oversubscription();
        let Some(c) = self.containers.get(key) else { return };
        let verdict = self.check_offload(key, false);
        let idle = self.now.saturating_sub(c.usage.last_use) >= c.idle_after_ms()
            && !matches!(verdict, Err((Reason::CallInProgress | Reason::GpuBusy, _)));
        match verdict {
            Ok(()) => {
                self.set_state(key, State::Idle, Reason::IdleTimeout, "", 0, 0);
                self.begin_offload(key, Reason::IdleTimeout, Offload::begins(self.now));
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
