//! Frees host memory for an offload by the restore of another container. Without this, containers
//! could wait for each other for ever when VRAM and host memory are both full.
//!
//! ```text
//! first waiter ──needs VRAM of──> holder ──lacks host memory──> content of an offloaded container
//!                                                               that fits into the free VRAM
//! after 5 s:
//!  ├── that container waits too ──> it is served before the first waiter (`passing`)
//!  └── no call waits for it ──────> it is restored, and stays resident for 10 s
//! then the holder is offloaded for the first waiter
//! ```

use std::collections::BTreeSet;

use affinode_proto::reason::Reason;

use super::{
    DeviceBytes, Key, Millis, container::Container, host_memory::MemoryPool, kept_memory,
    ledger::margin_bytes, needs, node_state::NodeState, overrides, policy::Mode,
};

/// Time for which the first waiter must have waited. Most shortages of host memory end earlier.
const HEAD_WAIT_MS: Millis = 5_000;
/// Time for which a container that was restored to free host memory stays resident.
const STAY_MS: Millis = 10_000;

/// Whether the waiter cannot be served because a container on these GPUs lacks host memory for its
/// offload, and no offload in progress frees VRAM for the waiter.
pub(super) fn is_blocked(node: &NodeState, waiter: &Key, uuids: &BTreeSet<String>) -> bool {
    let waits_long = |began: Millis| node.clock.now.saturating_sub(began) >= HEAD_WAIT_MS;
    let is_leaving = |(key, c): (&Key, &Container)| {
        !c.goal.is_resident() && !c.rests_offloaded() && holds(node, key, uuids)
    };
    node.waiting_since(waiter).is_some_and(waits_long)
        && short_holders(node, waiter, uuids).next().is_some()
        && !node.registry.containers.iter().any(is_leaving)
}

/// Returns the containers with VRAM on these GPUs whose last offload lacked host memory, and which
/// were not used since. Their offload would free VRAM for `waiter`.
pub(super) fn short_holders<'a>(
    node: &'a NodeState,
    waiter: &'a Key,
    uuids: &'a BTreeSet<String>,
) -> impl Iterator<Item = (&'a Key, &'a Container)> {
    node.registry.containers.iter().filter(move |(key, c)| {
        *key != waiter
            && (c.goal.is_resident() || c.goal.is_requested())
            && c.offload_failures.short_in_a_row > 0
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

/// Restores a container that no call waits for, if this frees enough host memory for the offload of
/// a container whose VRAM the blocked waiter needs. `needs`: the VRAM that the waiter needs.
pub(super) fn relieve(node: &mut NodeState, waiter: &Key, needs: &[DeviceBytes]) {
    let uuids: BTreeSet<String> = needs.iter().map(|need| need.uuid.clone()).collect();
    if !is_blocked(node, waiter, &uuids) {
        return;
    }
    let Some(key) = find_relief(node, waiter, needs, &uuids) else { return };
    let until = node.clock.now + STAY_MS;
    if let Some(container) = node.registry.containers.get_mut(&key) {
        container.goal.become_resident();
        container.cause = Reason::FreesHostMemory;
        // The container's next evaluation requests its restore.
        container.resident_until = until;
    }
}

/// Returns the smallest offloaded container whose restore suffices.
fn find_relief(
    node: &NodeState,
    waiter: &Key,
    needs: &[DeviceBytes],
    uuids: &BTreeSet<String>,
) -> Option<Key> {
    let holders: Vec<(&Key, &Container)> = short_holders(node, waiter, uuids).collect();
    let suffices = |key: &Key| {
        holders.iter().any(|(holder, c)| {
            frees_enough(node, key, c) && makes_room(node, waiter, needs, key, holder)
        })
    };
    let keys = node.registry.containers.keys();
    keys.filter(|key| may_return(node, key) && suffices(key))
        .min_by_key(|key| needs::container_needs(node, key).iter().map(|n| n.bytes).sum::<u64>())
        .cloned()
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
        && node.registry.processes.of(key).all(|(_, p)| p.agent.phase.is_offloaded())
        && needs::fits(node, key, &needs, margin_bytes)
}

/// Whether the restore of `key` frees what a pool of the holder's last offload lacked.
fn frees_enough(node: &NodeState, key: &Key, holder: &Container) -> bool {
    holder
        .short_of
        .iter()
        .any(|pool| freed_bytes(node, key, pool) >= pool.need_bytes.saturating_sub(pool.free_bytes))
}

/// Whether the waiter fits after the restore of `key` and the offload of `holder`.
fn makes_room(
    node: &NodeState,
    waiter: &Key,
    needs: &[DeviceBytes],
    key: &Key,
    holder: &Key,
) -> bool {
    let on = |all: &[DeviceBytes], uuid: &str| -> u64 {
        all.iter().filter(|held| held.uuid == uuid).map(|held| held.bytes).sum()
    };
    let (taken, freed) =
        (needs::container_needs(node, key), needs::vram_freed_by(node, holder, true));
    needs.iter().all(|need| {
        let gpu = node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid);
        gpu.is_some_and(|gpu| {
            let free_bytes = gpu.total_bytes.saturating_sub(gpu.used_bytes);
            let needed_bytes = need.bytes
                + needs::margin_for(node, waiter)(gpu.total_bytes)
                + on(&taken, &need.uuid);
            free_bytes + on(&freed, &need.uuid) >= needed_bytes
        })
    })
}
