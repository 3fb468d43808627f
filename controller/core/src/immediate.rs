//! Restore policy `immediate`: the restore of a called container does not wait until other
//! containers on its GPU are idle.
//!
//! ```text
//! called, does not fit ──idle neighbours suffice──> they are evicted, as for any waiter
//!        ├──with neighbours in use, latest restored first──> they are evicted too: their calls wait
//!        ├──with neighbours that cannot be offloaded───────> processes are ended, latest started first
//!        └──not even so──> no container is touched, the waiter waits like any other
//! ```
//!
//! The policy shortens the wait for VRAM, but the proof stays the same: the restore begins under a
//! grant, after NVML has shown that the VRAM is free. A process is ended only if it cannot be
//! offloaded, its priority is not above the waiter's, a call of the waiter waits, and enough VRAM
//! is then free.
//!
//! Containers that an operator or their mode keeps resident (pinned, `manual`, `off`) are not
//! affected. A container stays resident for its minimum residency after a restore, so two
//! containers of this policy take turns.

use std::cmp::Reverse;

use affinode_proto::{event::EventKind, reason::Reason, state::State};

use super::{
    DeviceBytes, Effect, Key, Millis, ProcessId,
    container::{Container, Offload},
    eligibility::is_unsafe,
    event::NodeEvent,
    needs,
    node_state::NodeState,
    offload, offload_check, overrides,
    policy::{Mode, Restore},
    process::{Process, Termination, TerminationCause},
    turns,
};

/// Sort key of a process: when it registered or was last restored, then its start time. A process
/// with a greater key began later to use its VRAM.
type Came = (Millis, u64);

/// Whether the container has the restore policy `immediate` and a CUDA call waits for its restore.
/// Such a container is urgent.
pub(super) fn is_urgent(node: &NodeState, key: &Key) -> bool {
    let urgent = |c: &Container| c.policy.restore == Restore::Immediate && c.wake_began.is_some();
    node.registry.containers.get(key).is_some_and(urgent)
        && !needs::container_needs(node, key).is_empty()
}

/// Appends the waiting containers to `turns` in queue order. An urgent waiter (restore policy
/// `immediate`, with a waiting call) comes before all other waiters of the same or lower priority,
/// even if these have waited longer.
pub(super) fn escalates_to_termination(node: &NodeState, turns: &mut Vec<Key>) {
    node.admission.queue.order_into(node.clock.now, turns);
    let possible = node.settings.policies.may_be_immediate();
    if !possible || !turns.iter().any(|key| is_urgent(node, key)) {
        return;
    }
    let priority = |key: &Key| node.registry.containers.get(key).map(|c| c.policy.priority);
    let order = std::mem::take(turns);
    for key in order {
        let behind = |other: &Key| !is_urgent(node, other) && priority(other) <= priority(&key);
        let place = turns.iter().position(|other| is_urgent(node, &key) && behind(other));
        turns.insert(place.unwrap_or(turns.len()), key);
    }
}

/// Frees VRAM for an urgent container (restore policy `immediate`, with a waiting call). Evicts the
/// containers in `idle`, then other containers that are in use, and ends processes that cannot be
/// offloaded. If this is not allowed or would not free enough, it changes nothing and returns
/// false.
pub(super) fn terminate_for_vram(
    node: &mut NodeState,
    key: &Key,
    missing: &[DeviceBytes],
    idle: &[Key],
) -> bool {
    let since = node.registry.containers.get(key).and_then(|c| c.wake_began);
    let Some(since) = since.filter(|_| is_urgent(node, key)) else { return false };
    let mut way = VramShortfall::new(missing);
    idle.iter().for_each(|key| {
        way.take(&needs::vram_freed_by(node, key, true));
    });
    let others: Vec<&Key> =
        blocking_containers(node, key).filter(|key| !idle.contains(key)).collect();
    let mut movable: Vec<(Came, &Key)> = Vec::new();
    let mut fixed: Vec<(Came, ProcessId, &Process)> = Vec::new();
    for other in others {
        if can_be_moved(node, other, since) {
            movable.extend(came(node, other).map(|came| (came, other)));
        } else if can_only_end(node, other, since) {
            let of_key = node.registry.processes.of(other).filter(|(_, p)| p.termination.is_none());
            fixed.extend(of_key.map(|(id, p)| (came_of(p), id, p)));
        }
    }
    movable.sort_by(|a, b| b.cmp(a));
    fixed.sort_by_key(|(came, id, _)| Reverse((*came, *id)));
    let moved: Vec<Key> = movable
        .into_iter()
        .filter(|(_, other)| way.take(&needs::vram_freed_by(node, other, true)))
        .map(|(_, other)| other.clone())
        .collect();
    let mut ended: Vec<(ProcessId, &[DeviceBytes])> = fixed
        .into_iter()
        .filter(|(.., p)| way.take(&p.memory.vram))
        .map(|(_, id, p)| (id, p.memory.vram.as_slice()))
        .collect();
    // All or nothing: processes are ended only if the waiter fits afterwards.
    if !way.is_clear() {
        return false;
    }
    // The end of a process that was chosen later may free enough VRAM to spare one that was
    // chosen earlier.
    ended.retain(|(_, holds)| !way.spare(holds));
    let ended: Vec<ProcessId> = ended.into_iter().map(|(id, _)| id).collect();
    for victim in idle.iter().chain(&moved) {
        let forced = moved.contains(victim);
        offload::evict(node, victim, Offload { forced, ..Offload::deep(node.clock.now) });
    }
    ended.into_iter().for_each(|id| end(node, id, key));
    true
}

/// Resident containers from which the waiting container `asker` may take VRAM, because `asker` has
/// the restore policy `immediate`.
fn blocking_containers<'a>(node: &'a NodeState, asker: &'a Key) -> impl Iterator<Item = &'a Key> {
    let priority = node.registry.containers.get(asker).map_or(i32::MIN, |c| c.policy.priority);
    let concerned = move |(key, c): &(&'a Key, &Container)| {
        *key != asker
            && c.goal.is_resident()
            && matches!(c.shown.state, State::Active | State::Idle)
            && !matches!(c.policy.mode, Mode::Manual | Mode::Off)
            && c.policy.priority <= priority
            && overrides::permitted(node, key, false).is_ok()
            && !node.admission.grants.contains_key(key)
            && node.clock.now >= c.resident_until
            && !offload_check::is_too_small(node, key)
            && turns::had_its_turn(node, key, c)
    };
    node.registry.containers.iter().filter(concerned).map(|(key, _)| key)
}

/// Whether a container in use can be offloaded. False if a forced offload of it has failed
/// since `since`.
fn can_be_moved(node: &NodeState, key: &Key, since: Millis) -> bool {
    let movable = matches!(
        offload_check::check_offload(node, key, true),
        Ok(()) | Err((Reason::CallInProgress, _))
    );
    let blind = |c: &Container| {
        c.cause == Reason::VramUnknown && node.clock.now < c.offload_failures.not_before()
    };
    movable
        && !failed_forced_offload(node, key, since)
        && !node.registry.containers.get(key).is_some_and(blind)
        && node.registry.processes.of(key).all(|(_, p)| p.termination.is_none())
}

/// Whether the VRAM of a container can only be freed by ending its processes. This is the case if
/// an offload is unsafe, or if a forced offload has failed since `since`.
fn can_only_end(node: &NodeState, key: &Key, since: Millis) -> bool {
    match offload_check::check_offload(node, key, true) {
        Ok(()) | Err((Reason::CallInProgress, _)) => failed_forced_offload(node, key, since),
        Err((reason, _)) => is_unsafe(reason) || reason == Reason::BadPeer,
    }
}

fn failed_forced_offload(node: &NodeState, key: &Key, since: Millis) -> bool {
    node.registry
        .containers
        .get(key)
        .is_some_and(|c| c.offload_failures.immovable_at.is_some_and(|at| at >= since))
}

fn came(node: &NodeState, key: &Key) -> Option<Came> {
    node.registry.processes.of(key).map(|(_, p)| came_of(p)).max()
}

fn end(node: &mut NodeState, id: ProcessId, asker: &Key) {
    let name = node.display_name(asker);
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    process.termination =
        Some(Termination { cause: TerminationCause::Room, since: node.clock.now, by_force: false });
    let (key, identity, bytes) =
        (process.key.clone(), process.identity.clone(), process.vram_bytes());
    let text = format!(
        "process {} ({}) is ended: {name} must be restored at once (restore policy immediate), and offloads of other containers cannot free enough VRAM for it",
        identity.pid, identity.command
    );
    let event = NodeEvent::new(EventKind::Ended, text).because(Reason::EndedForRoom);
    node.publish(&key, event.of_bytes(bytes));
    node.output.effects.push(Effect::End { identity, by_force: false });
}

/// Kills processes that were ordered to end and have not ended in time, if an urgent container
/// still needs their VRAM. Withdraws the order for a process that was offloaded meanwhile, or whose
/// VRAM is no longer needed.
pub(super) fn check_terminations(node: &mut NodeState) {
    if node.registry.processes.values().all(|p| p.termination.is_none()) {
        return;
    }
    let order = node.admission.queue.in_order(node.clock.now);
    let urgent = order.iter().filter(|key| is_urgent(node, key));
    let most =
        urgent.filter_map(|key| Some(node.registry.containers.get(key)?.policy.priority)).max();
    for process in node.registry.processes.values_mut() {
        let Some(ending) = &mut process.termination else { continue };
        if ending.cause != TerminationCause::Room {
            continue;
        }
        // The waiter for which the process is to be ended may have been served, and all other
        // waiters may have a lower priority than the process.
        let stays = |c: &Container| c.goal.is_resident() && Some(c.policy.priority) <= most;
        let in_the_way = node.registry.containers.get(&process.key).is_some_and(stays);
        if !in_the_way || process.agent.phase.is_offloaded() {
            process.termination = None;
        } else if ending.is_due(node.clock.now) {
            ending.by_force = true;
            let identity = process.identity.clone();
            node.output.effects.push(Effect::End { identity, by_force: true });
        }
    }
}

fn came_of(process: &Process) -> Came {
    (process.activity.resident_since, process.identity.start_ticks)
}

/// Missing VRAM per GPU, in bytes. If the value is negative, more VRAM is freed than needed.
struct VramShortfall {
    missing: Vec<(String, i128)>,
}

impl VramShortfall {
    fn new(missing: &[DeviceBytes]) -> VramShortfall {
        let missing = missing.iter().map(|need| (need.uuid.clone(), i128::from(need.bytes)));
        VramShortfall { missing: missing.collect() }
    }

    fn is_clear(&self) -> bool {
        self.missing.iter().all(|(_, bytes)| *bytes <= 0)
    }

    /// Subtracts VRAM that is to be freed (`holds`) from the missing VRAM. Does nothing and returns
    /// false if `holds` has no VRAM on a GPU where some is missing.
    fn take(&mut self, holds: &[DeviceBytes]) -> bool {
        let helps = self.missing.iter().any(|(uuid, bytes)| *bytes > 0 && on(holds, uuid) > 0);
        if helps {
            self.missing.iter_mut().for_each(|(uuid, bytes)| *bytes -= on(holds, uuid));
        }
        helps
    }

    /// Spares a victim with the VRAM `holds` if the other victims free enough. If so, adds `holds`
    /// to the missing VRAM again and returns true. Otherwise changes nothing and returns false.
    fn spare(&mut self, holds: &[DeviceBytes]) -> bool {
        let enough = self.missing.iter().all(|(uuid, bytes)| *bytes + on(holds, uuid) <= 0);
        if enough {
            self.missing.iter_mut().for_each(|(uuid, bytes)| *bytes += on(holds, uuid));
        }
        enough
    }
}

fn on(holds: &[DeviceBytes], uuid: &str) -> i128 {
    holds.iter().filter(|held| held.uuid == uuid).map(|held| i128::from(held.bytes)).sum()
}
