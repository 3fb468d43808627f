//! Asks containers to free host memory that they keep after a restore, when the offload of another
//! container needs it.
//!
//! A library keeps the pages of its last offload for a moment after the restore, and with the
//! setting `retain_host_copy` for as long as host memory suffices. While several containers take
//! turns on a GPU, these pages would otherwise be the memory that the next offload lacks.
//!
//! The host memory of a container that is being restored will be kept in the same way, so an
//! offload waits for it too.
//!
//! ```text
//! host memory is short ──others keep enough──> FreeHostMemory, read again at each tick ──> promised
//!                      └─too little is kept, or the time is over──> refused
//! ```

use std::path::Path;

use affinode_proto::wire::{Capabilities, Phase, message::ControllerMessage};

use super::{
    Effect, Key, Millis, ProcessId,
    container::Container,
    host_memory::{HostPoolPrefault, MemoryPlace, MemoryPool},
    node_state::NodeState,
    process::Process,
};

/// Time within which a process frees host memory after it was asked.
const FREEING_MS: Millis = 3_000;
/// Maximum time for which an offload waits until other containers have freed host memory, from its
/// beginning.
pub(super) const MAX_WAIT_MS: Millis = 10_000;
/// Minimum interval between two requests to a process that has not freed its memory. Processes
/// count the memory that they keep themselves, so a process could otherwise delay the offloads of
/// other containers again and again.
const ASK_AGAIN_MS: Millis = 60_000;

/// Whether other containers free enough host memory for an offload of `key`, which lacks memory in
/// one of the pools `short`. Asks processes to free it, if they were not asked yet.
pub(super) fn is_being_freed(node: &mut NodeState, key: &Key, short: &[MemoryPool]) -> bool {
    short.iter().any(|pool| {
        let missing_bytes = pool.need_bytes.saturating_sub(pool.free_bytes);
        let (mut coming_bytes, can_free) = kept_by_others(node, key, &pool.place);
        let mut ask = Vec::new();
        for (id, bytes) in can_free {
            if coming_bytes < missing_bytes {
                coming_bytes = coming_bytes.saturating_add(bytes);
                ask.push(id);
            }
        }
        let suffices = coming_bytes >= missing_bytes;
        if suffices {
            ask.into_iter().for_each(|id| ask_to_free(node, id));
        }
        suffices
    })
}

/// Returns the bytes in this place that processes of other containers are freeing or will keep
/// after a restore in progress, and the processes that can be asked to free more, the largest
/// first.
fn kept_by_others(
    node: &NodeState,
    key: &Key,
    place: &MemoryPlace,
) -> (u64, Vec<(ProcessId, u64)>) {
    let (mut coming_bytes, mut can_free) = (0_u64, Vec::new());
    for id in node.registry.processes.ids() {
        let process = node.registry.processes.get(&id).filter(|process| process.key != *key);
        let Some(process) = process else { continue };
        // A container that is to be offloaded needs its memory itself.
        if !node.registry.containers.get(&process.key).is_some_and(|c| c.goal.is_resident()) {
            continue;
        }
        if process.pending.is_some_and(|order| order.action.is_restore()) {
            coming_bytes = coming_bytes.saturating_add(restoring_bytes(process, place));
            continue;
        }
        let bytes = freeable_bytes(process, place);
        let asked_at = process.activity.kept_asked_at;
        match asked_at.map(|at| node.clock.now.saturating_sub(at)) {
            Some(age_ms) if age_ms < FREEING_MS => {
                coming_bytes = coming_bytes.saturating_add(bytes)
            }
            Some(age_ms) if age_ms < ASK_AGAIN_MS => {}
            _ if bytes > 0 => can_free.push((id, bytes)),
            _ => {}
        }
    }
    can_free.sort_by_key(|(id, bytes)| (std::cmp::Reverse(*bytes), *id));
    (coming_bytes, can_free)
}

/// Host memory in this place that a process can free after its restore in progress, in bytes.
fn restoring_bytes(process: &Process, place: &MemoryPlace) -> u64 {
    let bytes = process.memory.swap.copied_out_bytes.min(process.offloaded_vram_bytes());
    // Content on disk does not return to host memory.
    let bytes = bytes.saturating_sub(process.disk_bytes());
    if is_there(process, place) && can_free(process) { bytes } else { 0 }
}

/// Host memory in this place that a resident process can free, in bytes. The process counts this
/// memory itself. It cannot keep more than it had in VRAM, which NVML measures.
fn freeable_bytes(process: &Process, place: &MemoryPlace) -> u64 {
    let is_idle = process.agent.phase == Phase::Open && process.pending.is_none();
    match is_there(process, place) && is_idle && can_free(process) && !process.prefault.ordered {
        true => process.activity.counters.as_ref().map_or(0, |page| page.kept_bytes),
        false => 0,
    }
    .min(process.vram_bytes())
}

/// Host memory in this place that the content of an offloaded process uses, in bytes.
pub(super) fn offloaded_bytes_in(process: &Process, place: &MemoryPlace) -> u64 {
    let elsewhere_bytes = process.memory.swap.zero_bytes.saturating_add(process.disk_bytes());
    let bytes = process.offloaded_vram_bytes().saturating_sub(elsewhere_bytes);
    if is_there(process, place) { bytes } else { 0 }
}

fn can_free(process: &Process) -> bool {
    process.agent.connected && process.can(Capabilities::FREES_HOST_MEMORY)
}

/// Whether host memory that the process keeps is in this place.
fn is_there(process: &Process, place: &MemoryPlace) -> bool {
    match place {
        MemoryPlace::Node => true,
        MemoryPlace::HostPool => process.uses_host_pool(),
        MemoryPlace::Cgroup(path) => {
            !process.uses_host_pool()
                && Path::new(&process.identity.memory_cgroup).starts_with(path)
        }
    }
}

/// Ends prefaults in progress in other containers, because their promises delay the offload of `key`.
pub(super) fn end_prefaults_in_progress(node: &mut NodeState, key: &Key) {
    let is_filling =
        |c: &Container| matches!(c.host_pool_prefault, HostPoolPrefault::Filling { .. });
    let filling = prefaulted(node, key).filter(|(_, c)| is_filling(c));
    let ended: Vec<Key> = filling.map(|(other, _)| other.clone()).collect();
    end_prefaults(node, ended);
}

/// Ends prefaults of other containers, as many as needed, because the host pool or the node has too
/// little memory for the offload of `key`. Returns whether enough memory is being freed. If all
/// prefaults together would not suffice, none ends.
pub(super) fn prefaults_give_way(
    node: &mut NodeState,
    key: &Key,
    pools: &[MemoryPool],
    asked_at: Millis,
) -> bool {
    let now = node.clock.now;
    let missing = |pool: &MemoryPool| node.host_ledger.missing_bytes(key, pool, asked_at, now);
    // Prefaulted memory is not charged to the cgroups of containers.
    let is_group = |pool: &MemoryPool| matches!(pool.place, MemoryPlace::Cgroup(_));
    if pools.iter().any(|pool| is_group(pool) && missing(pool) > 0) {
        return false;
    }
    let missing_bytes = pools.iter().map(missing).max().unwrap_or(0);
    let mut coming_bytes = bytes_being_freed(node, key);
    let mut others: Vec<(u64, Key)> = prefaulted(node, key)
        .map(|(other, _)| (prefaulted_bytes(node, other), other.clone()))
        .collect();
    others.sort_by(|a, b| b.cmp(a));
    let mut ended = Vec::new();
    for (bytes, other) in others {
        if coming_bytes < missing_bytes {
            coming_bytes = coming_bytes.saturating_add(bytes);
            ended.push(other);
        }
    }
    let suffices = coming_bytes > 0 && coming_bytes >= missing_bytes;
    if suffices {
        end_prefaults(node, ended);
    }
    suffices
}

/// Memory of the host pool that other processes were asked to free and are freeing, in bytes.
fn bytes_being_freed(node: &NodeState, key: &Key) -> u64 {
    let now = node.clock.now;
    let frees = |p: &&Process| {
        let asked_at = p.activity.kept_asked_at;
        p.key != *key && asked_at.is_some_and(|at| now.saturating_sub(at) < FREEING_MS)
    };
    let freeing = node.registry.processes.values().filter(frees);
    freeing.map(|p| freeable_bytes(p, &MemoryPlace::HostPool)).sum()
}

/// Memory that the end of a container's prefault gives back, in bytes: what its processes have, and
/// at least what is promised to them.
fn prefaulted_bytes(node: &NodeState, key: &Key) -> u64 {
    let processes = node.registry.processes.of(key);
    let bytes: u64 = processes.map(|(_, p)| freeable_bytes(p, &MemoryPlace::HostPool)).sum();
    bytes.max(node.host_ledger.promised_host_pool_bytes(key))
}

/// The containers with a prefault, except `key`. A container that is to be offloaded needs the memory
/// itself.
fn prefaulted<'a>(
    node: &'a NodeState,
    key: &'a Key,
) -> impl Iterator<Item = (&'a Key, &'a Container)> {
    let is_on = |c: &Container| c.host_pool_prefault.registers_since().is_some();
    let others = node.registry.containers.iter();
    others.filter(move |(other, c)| *other != key && is_on(c) && c.goal.is_resident())
}

/// Ends the prefaults of these containers, and asks their processes to free the memory.
fn end_prefaults(node: &mut NodeState, keys: Vec<Key>) {
    let not_before = node.clock.now.saturating_add(ASK_AGAIN_MS);
    for key in keys {
        if let Some(container) = node.registry.containers.get_mut(&key) {
            container.host_pool_prefault = HostPoolPrefault::Off { not_before };
        }
        let ids: Vec<ProcessId> = node.registry.processes.ids_of(&key).collect();
        ids.into_iter().for_each(|id| ask_to_free(node, id));
    }
}

fn ask_to_free(node: &mut NodeState, id: ProcessId) {
    if let Some(process) = node.registry.processes.get_mut(&id) {
        process.activity.kept_asked_at = Some(node.clock.now);
    }
    node.output.effects.push(Effect::Send(id, ControllerMessage::FreeHostMemory));
}
