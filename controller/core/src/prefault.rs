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
//! Prefaulted memory is charged to the container and the node like any other memory in use. A CUDA
//! call ends the prefaulting. Each process is ordered to prefault at most once per idle period. No
//! offload waits for prefaulting.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Capabilities, Phase, message::ControllerMessage},
};

use super::{
    Effect, Key, Millis, ProcessId, container::Container, copier_use, node_state::NodeState,
    offload_check, offload_level, plan::OffloadMethod, policy::Engine, process::Process,
};

/// After this many consecutive offloads of a process in which no copier copied its memory, the
/// process is no longer prefaulted.
const MAX_UNCOPIED: u32 = 3;

impl Container {
    /// Time at which the present idle period began. This time identifies the period.
    fn quiet_since(&self) -> Millis {
        self.usage.last_use.max(self.figures.restored_at.unwrap_or(0))
    }
}

/// Decides for each process of a container whether prefaulting begins or ends now, and sends the
/// orders: to prefault host memory, or to release it.
pub(super) fn update_prefault(node: &mut NodeState, key: &Key) {
    let Some(c) = node.registry.containers.get(key) else { return };
    let prepared = |(_, p): (ProcessId, &Process)| p.prefault.ordered;
    if !c.policy.prefault && !node.registry.processes.of(key).any(prepared) {
        return;
    }
    // During an offload or restore, prefaulted memory is neither added nor released.
    if !c.goal.is_resident() || !matches!(c.shown.state, State::Active | State::Idle) {
        return;
    }
    let idleness = c.quiet_since();
    let waited = node.clock.now.saturating_sub(idleness) >= c.idle_after_ms() / 2;
    let stays = stays_prefaulted(node, key, c);
    let begins = stays && waited && may_begin(node, key);
    let moves = offload_level::moves(node, key);
    for id in node.members(key) {
        let begins = begins && may_prefault(node, id).is_some();
        let Some(process) = node.registry.processes.get_mut_uncounted(&id) else { continue };
        let same = process.prefault.ordered_for_idle == Some(idleness);
        if process.prefault.ordered
            && !(stays && same && moves(process) == OffloadMethod::CopyAndCheckpoint)
        {
            end_prefault(node, id);
        } else if begins && !same {
            process.prefault.ordered_for_idle = Some(idleness);
            begin_prefault(node, id);
        }
    }
}

/// Whether a container's processes keep their prefaulted memory. They keep it while an offload is
/// possible. They also keep it if only a condition that may end soon prevents the offload, such as
/// a failed reading of the GPUs.
fn stays_prefaulted(node: &NodeState, key: &Key, c: &Container) -> bool {
    let copies = offload_level::engine_of(node, key) == Engine::Full;
    let verdict = offload_check::check_offload(node, key, true);
    let passing = |reason| {
        matches!(reason, Reason::VramUnknown | Reason::AgentSilent | Reason::CallInProgress)
    };
    c.policy.prefault && copies && verdict.map_or_else(|(reason, _)| passing(reason), |()| true)
}

/// Whether prefaulting may begin: the container is resident, not in use, and large enough for
/// an offload. A container whose allocation waits counts as in use.
fn may_begin(node: &NodeState, key: &Key) -> bool {
    let still =
        |p: &Process| p.agent.connected && p.agent.phase == Phase::Open && p.pending.is_none();
    offload_check::check_offload(node, key, true).is_ok()
        && node.registry.processes.of(key).all(|(_, p)| still(p))
        && !offload_check::is_too_small(node, key)
}

/// Orders a process to prefault host memory, if its GPU has a copier: only a copier uses prefaulted
/// memory. If there is no copier, the next attempt is made in the next idle period.
fn begin_prefault(node: &mut NodeState, id: ProcessId) {
    if attach_ahead(node, id)
        && let Some(process) = node.registry.processes.get_mut_uncounted(&id)
    {
        process.prefault.ordered = true;
        node.output.effects.push(Effect::Send(id, ControllerMessage::Prefault { on: true }));
    }
}

/// Ends the prefaulting of a process, and orders the process to release the prefaulted memory.
pub(super) fn end_prefault(node: &mut NodeState, id: ProcessId) {
    let process = node.registry.processes.get_mut_uncounted(&id).filter(|p| p.prefault.ordered);
    if let Some(process) = process {
        process.prefault.ordered = false;
        node.copiers.detach(id);
        node.output.effects.push(Effect::Send(id, ControllerMessage::Prefault { on: false }));
    }
}

/// Ends the prefaulting of a container's resident processes after a failed offload. An offloaded
/// process keeps its prefaulted memory, because its content is stored there.
pub(super) fn prefault_failed(node: &mut NodeState, key: &Key) {
    let here = |(_, p): &(ProcessId, &Process)| p.memory.offloaded.is_none();
    let here: Vec<ProcessId> =
        node.registry.processes.of(key).filter(here).map(|(id, _)| id).collect();
    here.into_iter().for_each(|id| end_prefault(node, id));
}

/// The GPU and the swappable bytes of a process that may be prefaulted. `None` if:
///
/// - its library does not support prefaulting or copiers;
/// - its counters were not read yet;
/// - its offload would not both copy the memory and checkpoint the context;
/// - its memory is on several GPUs, or less than the minimum;
/// - its counters report that no copier can restore it;
/// - no copier copied its memory in its last `MAX_UNCOPIED` offloads.
pub(super) fn may_prefault(node: &NodeState, id: ProcessId) -> Option<(String, u64)> {
    let able = |p: &Process| p.can(Capabilities::PREFAULTS) && p.can(Capabilities::USES_COPIER);
    let may = |p: &&Process| {
        able(p) && p.activity.counters.is_some() && p.failed_moves.copier_in_a_row < MAX_UNCOPIED
    };
    let process = node.registry.processes.get(&id).filter(may)?;
    let (uuid, _) = copier_use::for_copier(node, process, &process.memory.vram)?;
    // NVML's last sample may be older than the last allocations, so the bytes that the agent
    // can copy count instead.
    let total = node.gpus.samples.iter().find(|gpu| gpu.uuid == uuid)?.total_bytes;
    let bytes = process.memory.swap.swappable_bytes.min(total);
    (bytes >= node.settings.prefault_min_bytes).then_some((uuid, bytes))
}

/// Attaches a resident process to the copier of its GPU before the offload. The copier can then
/// register the prefaulted host memory. Returns false if the process cannot use a copier.
fn attach_ahead(node: &mut NodeState, id: ProcessId) -> bool {
    match may_prefault(node, id) {
        Some((uuid, most_bytes)) => copier_use::attach(node, id, &uuid, most_bytes, true),
        None => false,
    }
}

/// Records that a process has no connection to its copier and therefore copies its memory
/// itself. If the process is resident, its prefaulting ends. If it is being offloaded, its
/// prefaulted memory is kept, because the offload already uses it.
pub(super) fn not_attached(node: &mut NodeState, id: ProcessId) {
    if node.copiers.detach(id) {
        end_prefault(node, id);
    }
}
