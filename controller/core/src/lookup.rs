//! Look-ups of containers and processes that several files of the core need.

use affinode_proto::{
    reason::Reason,
    wire::{Capabilities, Phase},
};

use super::{
    Key, Millis, ProcessId, RecordedProcess,
    container::Container,
    node_state::NodeState,
    offload_level,
    plan::{OffloadMethod, ProcessPosition},
    process::{PendingAlloc, Process},
};

/// Time after the start of an offload during which the offload is expected to free VRAM. After this
/// time the controller no longer expects that VRAM.
const LEAVES_MS: Millis = 20_000;

impl NodeState {
    /// Name of a container for users; empty if it is unknown.
    pub(super) fn display_name(&self, key: &Key) -> String {
        self.registry.containers.get(key).map(Container::display_name).unwrap_or_default()
    }

    /// VRAM that the offloaded processes of a container released, in bytes.
    pub(super) fn offloaded_bytes(&self, key: &Key) -> u64 {
        let offloaded =
            self.registry.processes.of(key).filter(|(_, p)| p.agent.phase.is_offloaded());
        offloaded.map(|(_, p)| p.offloaded_vram_bytes()).sum()
    }

    /// Returns the number by which the controller identifies each process of a container.
    pub(super) fn members(&self, key: &Key) -> Vec<ProcessId> {
        self.registry.processes.ids_of(key).collect()
    }

    /// The present minute of the week, by the wall clock.
    pub(super) fn week_minute(&self) -> u32 {
        let now = i64::try_from(self.clock.now).unwrap_or(i64::MAX);
        super::window::week_minute(self.clock.unix_ms.saturating_add(now))
    }

    /// Cause of the container's offload or restore in progress.
    pub(super) fn cause(&self, key: &Key) -> Reason {
        self.registry.containers.get(key).map_or(Reason::Requested, |c| c.cause)
    }

    /// Phase and offload method of each process of a container, from which its next orders are
    /// planned.
    pub(super) fn positions(&self, key: &Key) -> Vec<ProcessPosition> {
        let container = self.registry.containers.get(key);
        let out = container.is_some_and(|c| c.goal.is_offloaded());
        let moves = offload_level::moves(self, key);
        self.registry
            .processes
            .of(key)
            .map(|(id, p)| ProcessPosition {
                process: id,
                phase: p.agent.phase,
                occupied: !p.agent.connected || p.pending.is_some() || (out && p.holds.count > 0),
                may_leave: p.may_leave(self.clock.now),
                moves: moves(p),
                awaits_work: p.can(Capabilities::AWAITS_WORK),
                is_prefaulted: p.prefault.ordered && moves(p) == OffloadMethod::CopyAndCheckpoint,
            })
            .collect()
    }

    /// Whether no container waits for VRAM and no other one pauses for a grant.
    pub(super) fn is_settled(&self) -> bool {
        !self.admission.has_active_grant()
            && self.admission.queue.in_order(self.clock.now).is_empty()
    }

    /// Processes of a container that an earlier controller's journal records and that have not
    /// registered.
    pub(super) fn recalled_of<'a>(
        &'a self,
        key: &'a Key,
    ) -> impl Iterator<Item = RecordedProcess> + 'a {
        let of_key =
            self.registry.unclaimed_journal.iter().filter(move |((other, ..), _)| other == key);
        of_key.map(|((_, pid, start_ticks), recalled)| RecordedProcess {
            pid: *pid,
            start_ticks: *start_ticks,
            offloaded: recalled.offloaded.clone(),
            to: recalled.to.clone(),
        })
    }

    /// Whether a process of the container that has not registered may be in the middle of a
    /// restore, according to an earlier controller's journal.
    pub(super) fn is_restoring_unseen(&self, key: &Key) -> bool {
        self.registry
            .unclaimed_journal
            .iter()
            .any(|((other, ..), recalled)| other == key && recalled.restoring)
    }

    /// The waiting allocation of the container that is served next, and its process. `None`: no
    /// allocation waits.
    pub(super) fn alloc_wait_of(&self, key: &Key) -> Option<(ProcessId, &PendingAlloc)> {
        self.registry.processes.of(key).find_map(|(id, p)| Some((id, p.alloc_wait.as_ref()?)))
    }

    /// When an allocation or a call of the container began to wait for VRAM. `None`: none waits.
    pub(super) fn called_since(&self, key: &Key) -> Option<Millis> {
        let container = self.registry.containers.get(key)?;
        self.alloc_wait_of(key).map(|(_, want)| want.since).or(container.wake_began)
    }

    /// When the container began to wait for VRAM, with or without a call. `None`: it does not wait.
    pub(super) fn waiting_since(&self, key: &Key) -> Option<Millis> {
        self.called_since(key).or_else(|| self.admission.queue.waits_since(key))
    }

    /// Whether an offload of the process is in progress and expected to free VRAM soon.
    pub(super) fn is_leaving(&self, id: ProcessId) -> bool {
        let leaves = |p: &Process| {
            let container = self.registry.containers.get(&p.key).filter(|c| !c.goal.is_resident());
            let began = container.and_then(|c| c.goal.offload()?.began);
            let soon = began.is_some_and(|began| self.clock.now.saturating_sub(began) < LEAVES_MS);
            soon && p.agent.phase != Phase::Checkpointed
        };
        self.registry.processes.get(&id).is_some_and(leaves)
    }
}
