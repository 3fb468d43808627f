//! Collects the facts that decide about an offload, and acts on the decision of [`super::eligibility`].

use affinode_proto::{reason::Reason, state::State, wire::Hazards, wire::Phase};

use super::{
    Key, Node,
    container::Container,
    container::Goal,
    eligibility::{IdleFacts, OffloadFacts, ProcessFacts, Refusal},
    plan::OffloadMethod,
    policy::Mode,
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

    /// Whether the context of a copied-out container may be evicted. This is also allowed while the
    /// container waits for its restore: otherwise its context would block other containers during
    /// the wait. Processes without VRAM, which may have started meanwhile, do not matter.
    pub(super) fn may_evict_context(&self, key: &Key) -> bool {
        let waits = |c: &Container| match c.goal {
            Goal::Offloaded(_) => c.shown.state == State::Offloaded,
            Goal::Resident(_) => c.shown.state == State::Queued && !self.grants.contains_key(key),
            Goal::OffloadRequested(_) => false,
        };
        let copied_out = |c: &Container| {
            waits(c)
                && c.policy.mode != Mode::Off
                && self.has_second_level(key)
                && self.now >= c.offload_failures.not_before
                && self
                    .processes
                    .of(key)
                    .all(|(_, p)| p.phase.is_offloaded() || p.vram_bytes() == 0)
                && self.processes.of(key).any(|(_, p)| p.phase == Phase::CopiedOut)
                && self.check_offload(key, true).is_ok()
        };
        self.containers.get(key).is_some_and(copied_out)
    }
}
