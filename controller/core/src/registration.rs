//! Handles announcements and withdrawals of containers. Also handles registrations, lost
//! connections and exits of processes.

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    state::State,
    wire::{Capabilities, Hazards, Phase, WIRE_VERSION, message::ControllerMessage},
};

use super::{
    ContainerSpec, DeviceBytes, Effect, Key, Millis, ProcessId,
    container::{Container, Goal, Offload},
    driver_limit,
    event::NodeEvent,
    grants, holds,
    host_memory::HostPoolPermission,
    host_relief,
    input::{Identity, Request, SwapStatus},
    measurements,
    node_state::NodeState,
    oom_wait,
    process::{
        AgentStatus, OffloadedMemory, PrefaultOrder, Process, ProcessActivity, ProcessHolds,
        ProcessMemory, on_gpu,
    },
    vram_limit,
};

/// Error text for a process that reports an offloaded phase although no controller offloaded it.
/// Its counters are then ignored.
pub(super) const NEVER_MOVED: &str = "reports that it is offloaded, but no controller offloaded it";

/// State that a process reports at its registration: phase, hazards, capabilities and memory.
pub(super) struct RegistrationStatus {
    pub(super) phase: Phase,
    pub(super) generation: u64,
    pub(super) hazards: Hazards,
    pub(super) capabilities: Capabilities,
    pub(super) swap: SwapStatus,
}

pub(super) fn announced(node: &mut NodeState, spec: ContainerSpec, key: &Key) {
    if let Some(known) = node.registry.containers.get_mut(key) {
        known.spec = spec;
        let (policy, warnings) = known.spec.policy(&node.settings.policies);
        (known.policy, known.warnings) = (policy, warnings);
        return;
    }
    let (policy, warnings) = spec.policy(&node.settings.policies);
    let container = Container::new(spec, policy, warnings.clone(), node.clock.now);
    node.registry.containers.insert_sorted(key.clone(), container);
    for text in warnings {
        node.publish(key, NodeEvent::new(EventKind::Annotation, text));
    }
}

/// Whether a container with this generation differs from the known container with this key. The
/// generation is compared because ids of containers are reused. Generation 0 matches any container.
#[must_use]
pub(super) fn is_of_another(node: &NodeState, key: &Key, generation: u64) -> bool {
    let known = node.registry.containers.get(key).map_or(0, |known| known.spec.generation);
    known != 0 && generation != 0 && known != generation
}

pub(super) fn withdrawn(node: &mut NodeState, key: &Key) {
    vram_limit::forget_container(node, key);
    driver_limit::forget_container(node, key);
    let members = node.members(key);
    host_relief::permit_refused_offloads(node, &members);
    for process in members {
        node.registry.processes.remove(&process);
        holds::forget_holds(node, process);
        node.output.effects.push(Effect::Drop(process));
    }
    grants::end_grant(node, key);
    node.admission.ledger.release(key);
    node.admission.queue.leave(key);
    node.output.effects.push(Effect::Journal(key.clone(), None));
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.shown.reason = (Reason::NotRegistered, "the container was deleted".into());
    }
    // The responses contain the container's state, so they come before the removal.
    node.answer(key, Request::Offload, false, 0, 0);
    node.answer(key, Request::Restore, false, 0, 0);
    node.registry.containers.shift_remove(key);
    node.registry.unclaimed_journal.retain(|(other, ..), _| other != key);
    grants::recall_settled(node, key);
}

pub(super) fn register(
    node: &mut NodeState,
    key: &Key,
    id: ProcessId,
    identity: Identity,
    mut standing: RegistrationStatus,
) {
    // If the pid and start time are known, the process lost its connection and registers again.
    let known = node
        .registry
        .processes
        .of(key)
        .find(|(_, p)| {
            p.identity.pid == identity.pid && p.identity.start_ticks == identity.start_ticks
        })
        .map(|(old, _)| old);
    let full = known.is_none() && node.members(key).len() >= node.settings.max_processes;
    if let Some(old) = known {
        oom_wait::end_alloc_wait(node, old);
        vram_limit::forget(node, old);
    }
    if full || !node.registry.containers.contains_key(key) {
        return refuse_registration(node, id, !full);
    }
    let before = known.and_then(|old| node.registry.processes.remove(&old));
    let offloaded = recorded_offload(node, key, &identity, standing.phase, before.as_ref());
    // The process reports an offloaded phase or copied bytes, but no record shows an offload.
    // Accepting the report would give the process a claim on VRAM that it never had. Only a
    // process older than this controller is believed: an earlier controller may have offloaded
    // it, and the journal may be lost.
    let younger = node.clock.started_ticks > 0 && identity.start_ticks >= node.clock.started_ticks;
    let off = standing.phase.is_offloaded() || standing.swap.copied_out_bytes > 0;
    let lies = off && offloaded.is_none() && (known.is_some() || younger);
    if lies {
        standing.phase = Phase::Open;
        standing.swap = SwapStatus { copied_out_bytes: 0, local_memory_bytes: 0, ..standing.swap };
    }
    let first = use_by_newcomer(node, key, standing.phase);
    let first_seen = if younger || node.clock.started_ticks == 0 { node.clock.now } else { 0 };
    let mut process = registered(key, identity, standing, before, first_seen);
    process.memory.offloaded = offloaded.map(OffloadedMemory::of);
    node.registry.processes.insert(id, process);
    if lies {
        measurements::bad_page(node, id, NEVER_MOVED.into());
    }
    grants::recall_settled(node, key);
    driver_limit::retry(node, key);
    welcome(node, key, id);
    if let Some(old) = known {
        holds::forget_holds(node, old);
        node.output.effects.push(Effect::Drop(old));
    }
    if first {
        let out = node.registry.containers.get(key).is_some_and(|c| c.goal.is_offloaded());
        let (state, reason) = match out {
            true => (State::Offloaded, Reason::IdleTimeout),
            false => (State::Active, Reason::Called),
        };
        node.set_state(key, state, reason, "", 0, 0);
    }
    node.resume(key);
}

/// Refuses the registration of a process. `retry`: the process may register again later.
fn refuse_registration(node: &mut NodeState, id: ProcessId, retry: bool) {
    let refusal = ControllerMessage::Refuse { version: WIRE_VERSION, retry };
    node.output.effects.push(Effect::Send(id, refusal));
    node.output.effects.push(Effect::Drop(id));
}

/// Returns the VRAM that a registering process needs for its restore, on the GPU on which it will
/// be restored. VRAM and target GPU come from the process's earlier connection or from the journal.
fn recorded_offload(
    node: &mut NodeState,
    key: &Key,
    identity: &Identity,
    phase: Phase,
    before: Option<&Process>,
) -> Option<Vec<DeviceBytes>> {
    let recalled =
        node.registry.unclaimed_journal.remove(&(key.clone(), identity.pid, identity.start_ticks));
    let (left, to) = match (before, recalled) {
        (Some(p), _) if p.memory.offloaded.is_some() => {
            let sent = p.is_migrating() || !p.agent.connected;
            let vram = p.memory.offloaded_vram().map(<[DeviceBytes]>::to_vec);
            (vram, p.memory.target_gpu().filter(|_| sent).map(str::to_owned))
        }
        (_, Some(recalled)) => (Some(recalled.offloaded), recalled.to),
        _ => (None, None),
    };
    // A process that is no longer checkpointed was restored on its target GPU.
    let to = to.filter(|_| phase != Phase::Checkpointed);
    left.map(|left| on_gpu(&left, to.as_deref()))
}

/// Updates the container's goal because a process registers in this phase. Returns whether it is
/// the container's first process.
fn use_by_newcomer(node: &mut NodeState, key: &Key, phase: Phase) -> bool {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(key) else { return false };
    let first = container.shown.state == State::Unregistered;
    if first {
        // The first process of the container, or the first to register again with a new
        // controller.
        container.usage.last_use = now;
        container.goal = match phase.is_offloaded() {
            // Its other processes may still be moving, for which other waiters wait then.
            true => Goal::Offloaded(Offload { requested_at: Some(now), ..Offload::default() }),
            false => Goal::default(),
        };
    } else if phase == Phase::Open && !container.goal.is_resident() {
        // An open process registers in a container that is offloaded or about to be: the
        // container is in use.
        let forced = container.goal.is_forced();
        container.offload_failures.has_stayed(now, Reason::Called, forced);
        container.goal.become_resident();
        container.cause = Reason::Called;
        container.usage.last_use = now;
    }
    first
}

/// Sends a registered process the orders to pause its allocations, then the Welcome message. The
/// process allocates nothing until it receives the Welcome, so the orders come first.
fn welcome(node: &mut NodeState, key: &Key, id: ProcessId) {
    holds::hold_newcomer(node, id);
    holds::hold_for_siblings(node, id);
    let vram_limit_bytes = vram_limit::limit_newcomer(node, key, id);
    let Some(container) = node.registry.containers.get(key) else { return };
    let wait_for_room_ms = oom_wait::wait_for_room_ms(&container.policy);
    let engine = container.policy.engine;
    let welcome =
        ControllerMessage::Welcome { process: id.0, wait_for_room_ms, engine, vram_limit_bytes };
    node.output.effects.push(Effect::Send(id, welcome));
}

pub(super) fn detached(node: &mut NodeState, id: ProcessId) {
    let Some(process) = node.registry.processes.get_mut(&id) else {
        return;
    };
    // If a migration is in progress, the process may be on the target GPU already.
    let sent = process.is_migrating() || !process.agent.connected;
    if !sent {
        process.memory.set_target_gpu(None);
    }
    (process.agent.connected, process.prefault.ordered) = (false, false);
    // The next registration contains the phase, and so the result of the order.
    process.pending = None;
    let key = process.key.clone();
    oom_wait::end_alloc_wait(node, id);
    vram_limit::forget(node, id);
    holds::forget_holds(node, id);
    node.resume(&key);
}

pub(super) fn exited(node: &mut NodeState, id: ProcessId) {
    oom_wait::end_alloc_wait(node, id);
    vram_limit::forget(node, id);
    host_relief::permit_refused_offloads(node, &[id]);
    let Some(process) = node.registry.processes.remove(&id) else {
        return;
    };
    holds::forget_holds(node, id);
    node.output.effects.push(Effect::Drop(id));
    let key = process.key;
    if node.members(&key).is_empty() {
        grants::close_grant(node, &key);
        node.admission.queue.leave(&key);
        node.clear_journal(&key);
        node.set_state(
            &key,
            State::Unregistered,
            Reason::NotRegistered,
            "the container's CUDA processes ended",
            0,
            0,
        );
        node.answer(&key, Request::Offload, false, 0, 0);
        node.answer(&key, Request::Restore, false, 0, 0);
        if let Some(container) = node.registry.containers.get_mut(&key) {
            container.goal = Goal::default();
            container.survey_asked = None;
            container.wake_began = None;
        }
    } else {
        node.resume(&key);
    }
}

/// Creates the record of a process that registers. Keeps what is known from its earlier connection
/// (`before`). `first_seen`: time since which a process without an earlier connection counts as
/// resident.
fn registered(
    key: &Key,
    identity: Identity,
    standing: RegistrationStatus,
    before: Option<Process>,
    first_seen: Millis,
) -> Process {
    let RegistrationStatus { phase, generation, hazards, capabilities, swap } = standing;
    let agent = AgentStatus { connected: true, phase, generation, hazards, capabilities };
    let holds = before.as_ref().map(|p| p.holds.record).unwrap_or_default();
    let idle = before.as_ref().and_then(|p| p.prefault.ordered_for_idle);
    let failed_moves = before.as_ref().map(|p| p.failed_moves).unwrap_or_default();
    let termination = before.as_ref().and_then(|p| p.termination.clone());
    let (vram, activity) = match before {
        Some(before) => (before.memory.vram, ProcessActivity { working: None, ..before.activity }),
        None => (Vec::new(), ProcessActivity { resident_since: first_seen, ..Default::default() }),
    };
    Process {
        key: key.clone(),
        identity,
        agent,
        pending: None,
        memory: ProcessMemory { vram, swap, offloaded: None },
        failed_moves,
        // The connection of the earlier registration has ended.
        host_pool: HostPoolPermission::default(),
        prefault: PrefaultOrder { ordered: false, ordered_for_idle: idle },
        holds: ProcessHolds { record: holds, ..ProcessHolds::default() },
        activity,
        termination,
        alloc_wait: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Input, Node, Settings};

    #[test]
    fn generation_tells_reused_ids_apart() {
        let mut node = Node::new(Settings::default());
        let key = Key::parse(&"0".repeat(32)).unwrap();
        assert!(!node.is_of_another(&key, 1), "no container is known");
        for (known, said, of_another) in [(7, 7, false), (7, 8, true), (7, 0, false), (0, 8, false)]
        {
            let spec = ContainerSpec { generation: known, ..ContainerSpec::default() };
            let _ = node.handle(0, Input::Announced(Box::new(spec), key.clone()));
            assert_eq!(node.is_of_another(&key, said), of_another, "{known}, {said}");
        }
    }
}
