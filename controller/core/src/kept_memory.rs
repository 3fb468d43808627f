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
    end_prefaults(node, key, |prefault| matches!(prefault, HostPoolPrefault::Filling { .. }));
}

/// Ends the prefaults of other containers, because the host pool has too little memory for the
/// offload of `key`. Returns whether memory is being freed: a prefault ends now, or the memory of
/// earlier ones suffices.
pub(super) fn prefaults_give_way(node: &mut NodeState, key: &Key, pools: &[MemoryPool]) -> bool {
    let missing = |pool: &MemoryPool| pool.need_bytes.saturating_sub(pool.free_bytes);
    // Prefaulted memory is not charged to the cgroups of containers.
    let is_group = |pool: &MemoryPool| matches!(pool.place, MemoryPlace::Cgroup(_));
    if pools.iter().any(|pool| is_group(pool) && missing(pool) > 0) {
        return false;
    }
    let is_on = |prefault: HostPoolPrefault| prefault.registers_since().is_some();
    if end_prefaults(node, key, is_on) {
        return true;
    }
    let now = node.clock.now;
    let frees = |p: &Process| {
        let asked_at = p.activity.kept_asked_at;
        p.key != *key && asked_at.is_some_and(|at| now.saturating_sub(at) < FREEING_MS)
    };
    let freeing = node.registry.processes.values().filter(|p| frees(p));
    let coming_bytes: u64 = freeing.map(|p| freeable_bytes(p, &MemoryPlace::HostPool)).sum();
    coming_bytes > 0 && pools.iter().all(|pool| missing(pool) <= coming_bytes)
}

/// Ends the prefaults of other containers for which `which` is true, and asks their processes to free
/// the memory. Returns whether there were any.
fn end_prefaults(
    node: &mut NodeState,
    key: &Key,
    which: impl Fn(HostPoolPrefault) -> bool,
) -> bool {
    let not_before = node.clock.now.saturating_add(ASK_AGAIN_MS);
    let mut ended = Vec::new();
    for (other, container) in &mut node.registry.containers {
        if other != key && which(container.host_pool_prefault) {
            container.host_pool_prefault = HostPoolPrefault::Off { not_before };
            ended.push(other.clone());
        }
    }
    let ids = |other: &Key| node.registry.processes.ids_of(other).collect::<Vec<_>>();
    let ids: Vec<ProcessId> = ended.iter().flat_map(ids).collect();
    ids.into_iter().for_each(|id| ask_to_free(node, id));
    !ended.is_empty()
}

fn ask_to_free(node: &mut NodeState, id: ProcessId) {
    if let Some(process) = node.registry.processes.get_mut(&id) {
        process.activity.kept_asked_at = Some(node.clock.now);
    }
    node.output.effects.push(Effect::Send(id, ControllerMessage::FreeHostMemory));
}
