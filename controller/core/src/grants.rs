//! Begins and ends grants of VRAM, and recovers the grants of an earlier controller from its
//! journal.
//!
//! `grant.rs` has a diagram of the stages. `serve_queue.rs` chooses the waiters that get a grant.

use std::collections::BTreeSet;

use affinode_proto::{state::State, wire::Phase};

use super::{
    DeviceBytes, Key, ProcessId,
    grant::{Grant, Stage},
    holds, host_promises, merge_needs,
    node_state::{JournalClaim, NodeState},
    process::on_gpu,
};

/// Promises VRAM to a container and begins a grant, which proves that this VRAM is free. Returns
/// the UUIDs of the GPUs.
pub(super) fn promise(
    node: &mut NodeState,
    key: &Key,
    needs: Vec<DeviceBytes>,
    want: Option<(ProcessId, u64)>,
) -> BTreeSet<String> {
    let uuids: BTreeSet<String> = needs.iter().map(|n| n.uuid.clone()).collect();
    node.admission.ledger.promise(key, needs);
    begin_grant(node, key, uuids.clone(), want);
    uuids
}

fn begin_grant(
    node: &mut NodeState,
    key: &Key,
    uuids: BTreeSet<String>,
    want: Option<(ProcessId, u64)>,
) {
    let allocates = want.map(|(id, _)| id);
    let mut everyone = if node.settings.hold { node.registry.processes.ids() } else { Vec::new() };
    // An order to pause allocations would also stop the allocation that this grant is for.
    everyone.retain(|id| Some(*id) != allocates);
    let mut grant = Grant::new(Stage::Holding(BTreeSet::new()), uuids, node.clock.now);
    grant.want = want;
    node.admission.grants.insert(key.clone(), grant);
    node.driver_limits.changed.insert(key.clone());
    for id in everyone {
        holds::hold(node, key, id);
    }
    holds::prove_when_held(node, key);
}

/// Recovers the journal record of a process that an earlier controller offloaded. If the record
/// shows that a restore may be running, the process's VRAM counts as promised until the process
/// registers. All other processes pause their allocations, because the driver may be allocating
/// this VRAM now.
pub(super) fn recall(
    node: &mut NodeState,
    key: Key,
    (pid, start): (u32, u64),
    recalled: JournalClaim,
) {
    let restoring = recalled.restoring;
    node.registry.unclaimed_journal.insert((key.clone(), pid, start), recalled);
    if restoring {
        let needs = recalled_needs(node, &key);
        let uuids = needs.iter().map(|need| need.uuid.clone()).collect();
        node.admission.ledger.promise(&key, needs);
        node.admission.grants.insert(key, Grant::new(Stage::Granted, uuids, node.clock.now));
    } else {
        host_promises::promise_to_unseen(node, &key);
    }
}

/// Ends the grant of a restored container. If a process that has not registered may still be
/// allocating VRAM, the grant continues.
pub(super) fn close_grant(node: &mut NodeState, key: &Key) {
    if !node.is_restoring_unseen(key) {
        abort_grant(node, key);
    }
}

fn recalled_needs(node: &NodeState, key: &Key) -> Vec<DeviceBytes> {
    let of_key = node
        .registry
        .unclaimed_journal
        .iter()
        .filter(|((other, ..), r)| other == key && r.restoring);
    let needs: Vec<DeviceBytes> =
        of_key.flat_map(|(_, r)| on_gpu(&r.offloaded, r.to.as_deref())).collect();
    merge_needs(&needs)
}

/// Ends a grant that was recovered from the journal, once all its processes have registered or
/// exited and the phase of each process is known. An incomplete restore begins again under a new
/// grant.
pub(super) fn recall_settled(node: &mut NodeState, key: &Key) {
    host_promises::promise_to_unseen(node, key);
    let recalled_grant = node.admission.grants.get(key).is_some_and(|grant| grant.recalled);
    if recalled_grant && recalled_needs(node, key).is_empty() {
        abort_grant(node, key);
    }
}

/// Marks all grants as doubtful after a time in which the controller sent no messages. Other
/// processes may have resumed their allocations and restored themselves, so VRAM that was proven
/// free may be in use. Grants from the journal are not marked, because no restore is started under
/// them.
pub(super) fn doubt_grants(node: &mut NodeState) {
    node.admission.grants.values_mut().filter(|g| !g.recalled).for_each(|g| g.doubted = true);
}

/// Ends a grant and releases its promise. A container that still waits stays in the queue.
pub(super) fn abort_grant(node: &mut NodeState, key: &Key) {
    end_grant(node, key);
    node.admission.ledger.release(key);
}

/// Ends a grant after success or failure. Other processes may allocate VRAM again.
pub(super) fn end_grant(node: &mut NodeState, key: &Key) {
    stays_where_it_was(node, key);
    let Some(mut grant) = node.admission.grants.remove(key) else {
        return;
    };
    node.admission.hold_orders.retain(|_, asked| asked.key != *key);
    holds::release_holds(node, &mut grant);
    count_vain_return(node, key, &grant);
}

/// Counts a grant that led to no complete restore although other processes paused their
/// allocations. The first such grant has no consequence. Each further one in a row delays the next
/// attempt.
fn count_vain_return(node: &mut NodeState, key: &Key, grant: &Grant) {
    let resident = node.registry.processes.of(key).all(|(_, p)| p.agent.phase == Phase::Open);
    let Some(container) = node.registry.containers.get_mut(key) else { return };
    if grant.is_granted() && !resident {
        container.restore_failures.has_wasted_a_turn(node.clock.now);
    }
}

/// Clears the migration target of each connected process of the container. A process whose
/// migration is in progress keeps its target: it may lose its connection, and only its next
/// registration reports on which GPU it is.
fn stays_where_it_was(node: &mut NodeState, key: &Key) {
    for id in node.members(key) {
        if let Some(process) = node.registry.processes.get_mut(&id)
            && process.agent.connected
            && !process.is_migrating()
        {
            process.memory.set_target_gpu(None);
        }
    }
}

pub(super) fn enqueue(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get(key) else {
        return;
    };
    let (priority, lost) = (container.policy.priority, container.shown.state == State::Lost);
    if now >= container.restore_failures.not_before {
        // A container that loses its place, for example because its context was evicted for another
        // waiter, waits since its call. One that has failed again and again waits behind the others,
        // because each attempt pauses their allocations.
        let has_failed = lost || container.restore_failures.in_a_row > 1;
        let called = node.called_since(key).filter(|_| !has_failed).unwrap_or(now);
        let since = node.alloc_wait_of(key).map_or(called, |(_, want)| want.since);
        node.admission.queue.enter(key, priority, since);
    }
    if !lost {
        node.set_state(key, State::Queued, node.cause(key), "", 0, 0);
    }
}

/// Ends the container's grant if the grant is for a waiting allocation. A grant that was recovered
/// from the journal is never for an allocation.
pub(super) fn end_alloc_grant(node: &mut NodeState, key: &Key) {
    if node.admission.grants.get(key).is_some_and(|grant| grant.want.is_some()) {
        close_grant(node, key);
    }
}
