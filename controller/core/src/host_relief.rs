//! Frees host memory for an offload by the restore of another container. Without this, containers
//! could wait for each other for ever when VRAM and host memory are both full.
//!
//! ```text
//! first waiter ──needs VRAM of──> holder ──lacks host memory──> content of an offloaded container
//!                                                               that fits into the free VRAM
//! after 5 s:
//!  ├── that container waits too ──> it is served before the first waiter (`passing`)
//!  ├── no call waits for it ──────> it is restored, and stays resident for 10 s
//!  └── no content fits ───────────> content moves to disk (`disk_step`), if the node has a disk
//! then the holder is offloaded for the first waiter
//! ```
//!
//! A restore without a call, in the second case, is called a relief. Only one holder is considered: if
//! two must leave for the waiter and both lack host memory, nothing is restored or moved.

use std::{cmp::Reverse, collections::BTreeSet};

use affinode_proto::{reason::Reason, state::State};

use super::{
    DeviceBytes, Key, Millis, ProcessId,
    container::{Container, Goal, Offload},
    disk_step,
    host_memory::{MemoryPlace, MemoryPool},
    kept_memory,
    ledger::margin_bytes,
    needs,
    node_state::NodeState,
    overrides,
    policy::Mode,
};

/// Time for which the first waiter must have waited. Most shortages of host memory end earlier.
const HEAD_WAIT_MS: Millis = 5_000;
/// Time for which the first waiter must have waited before content moves to disk, if another container
/// may leave the GPU soon. Content that moves to disk comes back late.
const OTHERS_WAIT_MS: Millis = 60_000;
/// Minimum interval between two searches for the same waiter.
const SEEK_MS: Millis = 100;
/// Time for which a container that is restored to free host memory stays resident, from the decision.
/// A restore that has not ended after this time does not prevent another one.
const STAY_MS: Millis = 10_000;

/// Whether the waiter cannot be served because a container on these GPUs lacks host memory for its
/// offload, and no offload in progress frees VRAM for the waiter.
pub(super) fn is_blocked(node: &NodeState, waiter: &Key, uuids: &BTreeSet<String>) -> bool {
    let waits_long = |began: Millis| node.clock.now.saturating_sub(began) >= HEAD_WAIT_MS;
    let is_leaving = |key: &Key| {
        holds(node, key, uuids) && node.registry.processes.ids_of(key).any(|id| node.is_leaving(id))
    };
    node.waiting_since(waiter).is_some_and(waits_long)
        && short_holders(node, waiter, uuids).next().is_some()
        && !node.registry.containers.keys().any(is_leaving)
}

/// Returns the containers with VRAM on these GPUs whose last offload lacked host memory, and which
/// were not used since. Their offload would free VRAM for `waiter`, which may evict them.
pub(super) fn short_holders<'a>(
    node: &'a NodeState,
    waiter: &'a Key,
    uuids: &'a BTreeSet<String>,
) -> impl Iterator<Item = (&'a Key, &'a Container)> {
    let is_short = |c: &Container| c.offload_failures.short_in_a_row > 0;
    evictable_holders(node, waiter, uuids, is_short)
}

/// Returns the containers with VRAM on these GPUs that `waiter` may evict once they are unused, and for
/// which `is_meant` is true.
fn evictable_holders<'a>(
    node: &'a NodeState,
    waiter: &'a Key,
    uuids: &'a BTreeSet<String>,
    is_meant: impl Fn(&Container) -> bool + 'a,
) -> impl Iterator<Item = (&'a Key, &'a Container)> {
    let priority = node.registry.containers.get(waiter).map_or(i32::MIN, |c| c.policy.priority);
    // The cheap conditions come first, because few containers lack host memory.
    node.registry.containers.iter().filter(move |(key, c)| {
        *key != waiter
            && is_meant(c)
            && (c.policy.priority <= priority || c.rests_offloaded())
            && !matches!(c.policy.mode, Mode::Manual | Mode::Off)
            && overrides::permitted(node, key, false).is_ok()
            && holds(node, key, uuids)
    })
}

fn holds(node: &NodeState, key: &Key, uuids: &BTreeSet<String>) -> bool {
    uuids.iter().any(|uuid| needs::held_bytes(node, key, uuid) > 0)
}

/// Whether the restore of `key` frees host memory in a pool that the offload of `holder` lacked.
pub(super) fn relieves(node: &NodeState, key: &Key, holder: &Container) -> bool {
    holder.short_of.iter().any(|pool| freed_bytes(node, key, pool) > 0)
}

/// Host memory of a pool that the restore of an offloaded container frees, in bytes.
fn freed_bytes(node: &NodeState, key: &Key, pool: &MemoryPool) -> u64 {
    let of_key = node.registry.processes.of(key).filter(|(_, p)| p.agent.phase.is_offloaded());
    of_key
        .fold(0, |sum, (_, p)| sum.saturating_add(kept_memory::offloaded_bytes_in(p, &pool.place)))
}

/// Permits offloads at once that lacked host memory which these processes have used and now free.
/// Otherwise a waiter for VRAM would wait until the delays have passed. Each such offload begins
/// with a survey, which takes time. Therefore only the oldest refusals are concerned.
pub(super) fn permit_refused_offloads(node: &mut NodeState, processes: &[ProcessId]) {
    let freed = |node: &NodeState, pool: &MemoryPool| {
        let mut freed = processes.iter().filter_map(|id| node.registry.processes.get(id));
        freed.any(|p| kept_memory::offloaded_bytes_in(p, &pool.place) > 0)
    };
    const MIN_AGE_MS: Millis = 500;
    permit_offloads_into(node, MIN_AGE_MS, freed);
}

/// Permits offloads at once that lacked memory of the host pool or of the node, because content of
/// another container has moved from there to disk.
pub(super) fn content_moved_to_disk(node: &mut NodeState) {
    permit_offloads_into(node, 0, |_, pool| !matches!(pool.place, MemoryPlace::Cgroup(_)));
}

/// Permits offloads at once that lacked memory of a pool for which `is_freed` returns true, if this
/// was found at least `min_age_ms` ago.
fn permit_offloads_into(
    node: &mut NodeState,
    min_age_ms: Millis,
    is_freed: impl Fn(&NodeState, &MemoryPool) -> bool,
) {
    const MAX_OFFLOADS: usize = 8;
    let frees = |pool: &MemoryPool| is_freed(node, pool);
    let is_old = |c: &Container| {
        c.offload_failures.short_in_a_row > 0
            && node.clock.now.saturating_sub(c.offload_failures.short_at) >= min_age_ms
    };
    let refused = node.registry.containers.iter().filter(|(_, c)| is_old(c));
    let mut refused: Vec<(Millis, Key)> = refused
        .filter(|(_, c)| c.short_of.iter().any(frees))
        .map(|(key, c)| (c.offload_failures.short_at, key.clone()))
        .collect();
    refused.sort();
    for (_, key) in refused.into_iter().take(MAX_OFFLOADS) {
        if let Some(container) = node.registry.containers.get_mut(&key) {
            container.offload_failures.host_memory_was_freed();
        }
    }
}

/// Whether the container waits for a restore that was ordered to free host memory, and for nothing
/// else. A restore that has begun is completed.
pub(super) fn is_relief(node: &NodeState, key: &Key) -> bool {
    let waits = |c: &Container| {
        c.cause == Reason::FreesHostMemory
            && c.goal.is_resident()
            && matches!(c.shown.state, State::Offloaded | State::Queued | State::Restoring)
            && c.wake_began.is_none()
            && c.commands.is_empty()
    };
    node.registry.containers.get(key).is_some_and(waits)
        && node.alloc_wait_of(key).is_none()
        && node.registry.processes.of(key).all(|(_, p)| p.agent.phase.is_offloaded())
}

/// Ends a relief that is not needed any more or has no room. The container stays offloaded.
pub(super) fn withdraw(node: &mut NodeState, key: &Key) {
    node.admission.queue.leave(key);
    if let Some(container) = node.registry.containers.get_mut(key) {
        // The container's next evaluation shows it as offloaded.
        container.goal = Goal::Offloaded(Offload { keeps_context: true, ..Offload::default() });
        container.cause = Reason::Pressure;
        container.resident_until = 0;
    }
}

/// Restores a container that no call waits for, if this frees enough host memory for the offload of
/// a container whose VRAM the blocked waiter needs. If no container can be restored, moves content to
/// disk. `needs`: the VRAM that the waiter needs.
pub(super) fn relieve(node: &mut NodeState, waiter: &Key, needs: &[DeviceBytes]) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(waiter) else { return };
    let searched_at = container.restore_failures.relief_searched_at;
    if searched_at.is_some_and(|at| now.saturating_sub(at) < SEEK_MS) {
        return;
    }
    container.restore_failures.relief_searched_at = Some(now);
    let uuids: BTreeSet<String> = needs.iter().map(|need| need.uuid.clone()).collect();
    let mut all = node.registry.containers.values();
    if all.any(|c| now < c.resident_until) || !is_blocked(node, waiter, &uuids) {
        return;
    }
    let Some((key, holder)) = find_relief(node, waiter, needs, &uuids) else {
        return move_to_disk(node, waiter, needs, &uuids);
    };
    if let Some(holder) = node.registry.containers.get_mut(&holder) {
        holder.offload_failures.record_relief(now);
    }
    if let Some(container) = node.registry.containers.get_mut(&key) {
        // The container's next evaluation requests its restore.
        container.goal.become_resident();
        container.cause = Reason::FreesHostMemory;
        container.resident_until = now + STAY_MS;
    }
}

/// Returns the smallest offloaded container whose restore suffices, and the container that can be
/// offloaded after it.
fn find_relief(
    node: &NodeState,
    waiter: &Key,
    needs: &[DeviceBytes],
    uuids: &BTreeSet<String>,
) -> Option<(Key, Key)> {
    let holders: Vec<(&Key, &Container)> = short_holders(node, waiter, uuids)
        .filter(|(_, c)| c.offload_failures.may_be_relieved(node.clock.now))
        .collect();
    let helped = |key: &Key| {
        let mut holders = holders.iter();
        let holder = holders.find(|(holder, c)| {
            *holder != key
                && frees_enough(node, key, c)
                && makes_room(node, waiter, needs, &needs::container_needs(node, key), holder)
        });
        holder.map(|(holder, _)| (*holder).clone())
    };
    let keys = node.registry.containers.keys().filter(|key| may_return(node, key));
    let reliefs = keys.filter_map(|key| Some((key.clone(), helped(key)?)));
    reliefs.min_by_key(|(key, _)| {
        needs::container_needs(node, key).iter().map(|need| need.bytes).sum::<u64>()
    })
}

/// Moves content of an offloaded container to disk, if the content of all containers that may move
/// is what the offload of a holder lacks. Content that no call waits for moves first, and that of the
/// first waiter last, because a restore from disk takes longer.
fn move_to_disk(
    node: &mut NodeState,
    waiter: &Key,
    needs: &[DeviceBytes],
    uuids: &BTreeSet<String>,
) {
    let waits_long = node
        .waiting_since(waiter)
        .is_some_and(|began| node.clock.now.saturating_sub(began) >= OTHERS_WAIT_MS);
    if !disk_step::may_begin(node) || (!waits_long && others_may_leave(node, waiter, uuids)) {
        return;
    }
    let keys = node.registry.containers.keys();
    let movable: Vec<&Key> = keys.filter(|key| disk_step::may_move_for_waiter(node, key)).collect();
    let movable_bytes = movable
        .iter()
        .fold(0_u64, |sum, key| sum.saturating_add(disk_step::movable_bytes(node, key)));
    let suffices = |pool: &MemoryPool| {
        !matches!(pool.place, MemoryPlace::Cgroup(_))
            && pool.free_bytes.saturating_add(movable_bytes) >= pool.need_bytes
    };
    let helps = short_holders(node, waiter, uuids).any(|(key, holder)| {
        holder.short_of.iter().any(suffices)
            && disk_step::is_short_since_last_move(node, holder.offload_failures.short_at)
            && makes_room(node, waiter, needs, &[], key)
    });
    let turn = |key: &&Key| {
        let container = node.registry.containers.get(*key);
        let (priority, since) = container.map_or((0, 0), |c| (c.policy.priority, c.shown.since));
        let waits_since = node.waiting_since(key);
        (*key == waiter, waits_since.is_some(), priority, Reverse(waits_since), since)
    };
    let first = movable.into_iter().filter(|_| helps).min_by_key(turn).cloned();
    if let Some(key) = first {
        disk_step::begin_for_waiter(node, key);
    }
}

/// Whether the offload of a resident container on these GPUs did not lack host memory, so that it can
/// be evicted for the waiter once it is unused.
fn others_may_leave(node: &NodeState, waiter: &Key, uuids: &BTreeSet<String>) -> bool {
    let may_leave = |c: &Container| {
        c.goal.is_resident()
            && c.shown.state != State::Queued
            && c.offload_failures.short_in_a_row == 0
    };
    evictable_holders(node, waiter, uuids, may_leave).next().is_some()
}

/// Whether an offloaded container may be restored without a call, and fits into the free VRAM.
fn may_return(node: &NodeState, key: &Key) -> bool {
    let permits = |c: &Container| {
        c.rests_offloaded()
            && c.cause != Reason::Requested
            && !matches!(c.policy.mode, Mode::Manual | Mode::Off)
            && overrides::permitted(node, key, false).is_ok()
            && node.clock.now >= c.restore_failures.not_before
    };
    let needs = needs::container_needs(node, key);
    node.registry.containers.get(key).is_some_and(permits)
        && node
            .registry
            .processes
            .of(key)
            .all(|(_, p)| p.agent.connected && p.agent.phase.is_offloaded())
        && needs::fits(node, key, &needs, margin_bytes)
}

/// Whether the restore of `key` frees what a pool of the holder's last offload lacked.
fn frees_enough(node: &NodeState, key: &Key, holder: &Container) -> bool {
    holder
        .short_of
        .iter()
        .any(|pool| freed_bytes(node, key, pool) >= pool.need_bytes.saturating_sub(pool.free_bytes))
}

/// Whether the waiter fits after the offload of `holder`. `taken`: VRAM that a restore takes before.
fn makes_room(
    node: &NodeState,
    waiter: &Key,
    needs: &[DeviceBytes],
    taken: &[DeviceBytes],
    holder: &Key,
) -> bool {
    let on = |all: &[DeviceBytes], uuid: &str| -> u64 {
        all.iter().filter(|held| held.uuid == uuid).map(|held| held.bytes).sum()
    };
    let freed = needs::vram_freed_by(node, holder, true);
    needs.iter().all(|need| {
        let gpu = node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid);
        gpu.is_some_and(|gpu| {
            let free_bytes = gpu.total_bytes.saturating_sub(gpu.used_bytes);
            let needed_bytes = need.bytes
                + needs::margin_for(node, waiter)(gpu.total_bytes)
                + on(taken, &need.uuid);
            free_bytes + on(&freed, &need.uuid) >= needed_bytes
        })
    })
}
