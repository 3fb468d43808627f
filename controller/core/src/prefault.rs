//! Prefaults (touches and registers) host memory while a container is idle, so that its offload is
//! faster (`policy.prefault`).
//!
//! ```text
//!                ┌──in use, policy off, may not be offloaded: ordered off─┐
//!                v                                                        │
//! not prefaulted ──idle for half its timeout, resident, a copier: ordered on──> prefaulted ──offload──> restored
//!      ^  ^                                                               │                      │
//!      │  └──offload failed: ordered off; connection lost; no copier──────┘                      │
//!      └──────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Prefaulted memory belongs to the container and the node like any other memory in use. Therefore
//! each process is ordered to prefault at most once per idle period. No offload waits for
//! prefaulting.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Capabilities, Phase, message::ControllerMessage},
};

use super::{
    Effect, Key, Millis, Node, ProcessId, container::Container, plan::OffloadMethod,
    policy::Engine, process::Process,
};

/// Number of offloads in a row in which the copier copied nothing. From this number on, a process
/// is not prefaulted.
const MAX_UNCOPIED: u32 = 3;

impl Container {
    /// Time at which the present idle period began. It identifies the period.
    fn quiet_since(&self) -> Millis {
        self.usage.last_use.max(self.figures.restored_at.unwrap_or(0))
    }
}

impl Node {
    /// Orders the processes of a container to prefault host memory, or to release it.
    pub(super) fn update_prefault(&mut self, key: &Key) {
        let Some(c) = self.containers.get(key) else { return };
        let prepared = |(_, p): (ProcessId, &Process)| p.prefault_ordered;
        if !c.policy.prefault && !self.processes.of(key).any(prepared) {
            return;
        }
        // During an offload or restore, prefaulted memory is neither added nor released.
        if !c.goal.is_resident() || !matches!(c.shown.state, State::Active | State::Idle) {
            return;
        }
        let idleness = c.quiet_since();
        let waited = self.now.saturating_sub(idleness) >= c.idle_after_ms() / 2;
        let stays = self.stays_prefaulted(key, c);
        let begins = stays && waited && self.may_begin(key);
        let moves = self.moves(key);
        for id in self.members(key) {
            let begins = begins && self.may_prefault(id).is_some();
            let Some(process) = self.processes.get_mut_uncounted(&id) else { continue };
            let same = process.prefault_ordered_for_idle == Some(idleness);
            if process.prefault_ordered
                && !(stays && same && moves(process) == OffloadMethod::CopyAndCheckpoint)
            {
                self.end_prefault(id);
            } else if begins && !same {
                process.prefault_ordered_for_idle = Some(idleness);
                self.begin_prefault(id);
            }
        }
    }

    /// Whether prefaulted memory is kept. It is not released because of a condition that may end
    /// soon, such as a failed reading of the GPUs.
    fn stays_prefaulted(&self, key: &Key, c: &Container) -> bool {
        let copies = self.engine_of(key) == Engine::Full;
        let verdict = self.check_offload(key, true);
        let passing = |reason| {
            matches!(reason, Reason::VramUnknown | Reason::AgentSilent | Reason::CallInProgress)
        };
        c.policy.prefault && copies && verdict.map_or_else(|(reason, _)| passing(reason), |()| true)
    }

    /// Whether prefaulting may begin: the container is resident, not in use, and large enough for
    /// an offload. A container whose allocation waits counts as in use.
    fn may_begin(&self, key: &Key) -> bool {
        let still = |p: &Process| p.connected && p.phase == Phase::Open && p.pending.is_none();
        self.check_offload(key, true).is_ok()
            && self.processes.of(key).all(|(_, p)| still(p))
            && !self.is_too_small(key)
    }

    /// Orders a process to prefault, if there is a copier for its memory: only a copier uses
    /// prefaulted memory. If there is no copier, the next attempt is made in the next idle period.
    fn begin_prefault(&mut self, id: ProcessId) {
        if self.attach_ahead(id)
            && let Some(process) = self.processes.get_mut_uncounted(&id)
        {
            process.prefault_ordered = true;
            self.effects.push(Effect::Send(id, ControllerMessage::Prefault { on: true }));
        }
    }

    /// Ends the prefaulting of a process, and orders the process to release the prefaulted memory.
    pub(super) fn end_prefault(&mut self, id: ProcessId) {
        let process = self.processes.get_mut_uncounted(&id).filter(|p| p.prefault_ordered);
        if let Some(process) = process {
            process.prefault_ordered = false;
            self.copiers.detach(id);
            self.effects.push(Effect::Send(id, ControllerMessage::Prefault { on: false }));
        }
    }

    /// Ends the prefaulting of a container after a failed offload. A process that is offloaded gets
    /// no order, because it has used its prefaulted memory.
    pub(super) fn prefault_failed(&mut self, key: &Key) {
        let here = |(_, p): &(ProcessId, &Process)| p.offloaded_vram.is_none();
        let here: Vec<ProcessId> = self.processes.of(key).filter(here).map(|(id, _)| id).collect();
        here.into_iter().for_each(|id| self.end_prefault(id));
    }

    /// The GPU and the swappable bytes of a process that may be prefaulted. `None` if:
    ///
    /// - its library does not support prefaulting or copiers;
    /// - its counters were not read yet;
    /// - the offload uses another method;
    /// - its memory is on several GPUs, or less than the minimum;
    /// - its counters report that no copier can restore it;
    /// - no copier copied it in the last offloads (`MAX_UNCOPIED`).
    pub(super) fn may_prefault(&self, id: ProcessId) -> Option<(String, u64)> {
        let able = |p: &Process| p.can(Capabilities::PREFAULTS) && p.can(Capabilities::USES_COPIER);
        let may =
            |p: &&Process| able(p) && p.counters.is_some() && p.failed_copy_outs < MAX_UNCOPIED;
        let process = self.processes.get(&id).filter(may)?;
        let (uuid, _) = self.for_copier(process, &process.vram)?;
        // NVML's last sample may be older than the last allocations, so the bytes that the agent
        // can copy count instead.
        let total = self.gpus.iter().find(|gpu| gpu.uuid == uuid)?.total_bytes;
        let bytes = process.swap.swappable_bytes.min(total);
        (bytes >= self.settings.prefault_min_bytes).then_some((uuid, bytes))
    }

    /// Attaches a resident process to the copier of its GPU. The copier registers the process's
    /// prefaulted memory. Returns false if there is no copier for the process.
    fn attach_ahead(&mut self, id: ProcessId) -> bool {
        match self.may_prefault(id) {
            Some((uuid, most_bytes)) => self.attach(id, &uuid, most_bytes, true),
            None => false,
        }
    }

    /// Records that a process has no connection to its copier and therefore copies its memory
    /// itself. If the process is resident, its prefaulting ends. If it is being offloaded, its
    /// prefaulted memory is kept, because the offload already uses it.
    pub(super) fn not_attached(&mut self, id: ProcessId) {
        if self.copiers.detach(id) {
            self.end_prefault(id);
        }
    }
}
