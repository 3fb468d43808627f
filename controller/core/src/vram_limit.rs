//! The limit of a container's VRAM (`affinode.io/vram-limit`).
//!
//! ```text
//! library: an allocation is larger than the allowance of its process
//!   AskVram ─> recall the allowances of all processes of the container ─> read NVML
//!           <─ VramAllowance: what the limit leaves
//!   VramTaken ─> the next request of the container
//! ```
//!
//! A process may allocate until its allowance is used up, without a message. NVML counts what the
//! library does not see: contexts, modules, and the driver's own rounding. An allowance therefore
//! starts from NVML's reading, not from a sum of allocations, and needs no report of freed memory.
//!
//! The order of the steps keeps the container below its limit. After the recall, no process begins
//! an allocation under its old allowance. What was begun before is pending, and is added to NVML's
//! reading: it may not be in the reading yet. Memory that is in both sums counts twice until the
//! next request, so an error only makes an allowance too small.
//!
//! A container's next request is served after VramTaken: the process has allocated, or has seen that
//! it cannot. Otherwise two processes that ask at the same time could recall each other's
//! allowances forever.

use std::collections::BTreeMap;

use affinode_proto::wire::{
    Capabilities, Phase,
    message::{ControllerMessage, MAX_GPUS},
    vram_view::VramView,
};

use super::{
    DeviceBytes, Effect, GpuSample, Key, Millis, ProcessId,
    gpu_uuid::{nvml_uuid, uuid_bytes},
    node_state::NodeState,
    policy::Policy,
    process::Process,
};

/// Allowance without a limit. Sums of it with real sizes do not overflow.
const UNLIMITED_BYTES: u64 = u64::MAX >> 1;
/// Time in which a process must send VramTaken after it got an allowance, in milliseconds.
const TAKE_MS: Millis = 1_000;

/// Requests of processes for VRAM allowances.
#[derive(Debug, Default)]
pub(super) struct VramRequests {
    /// For each process that waits for a reply, its most recent request.
    waiting: BTreeMap<ProcessId, VramRequest>,
    /// For each container, the request that the controller serves now.
    served: BTreeMap<Key, ServedRequest>,
    /// What the file of each container with a limit shows.
    shown: BTreeMap<Key, Vec<VramView>>,
    /// Number of the last recall.
    recalls: u64,
}

/// The request of one process.
#[derive(Clone, Copy, Debug)]
struct VramRequest {
    ticket: u32,
    bytes: u64,
    uuid: [u8; 16],
}

/// The stage of a request that is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServedRequest {
    /// The VRAM is being read for this process.
    Reading(ProcessId),
    /// The process got its allowance, and has until this time to send VramTaken.
    Granted(ProcessId, Millis),
}

/// The limit that a process's library enforces, in bytes. 0: none.
pub(super) fn limit_bytes(policy: &Policy, capabilities: Capabilities) -> u64 {
    if capabilities.contains(Capabilities::LIMITS_VRAM) { policy.vram_limit_bytes } else { 0 }
}

/// Handles the request of a process for an allowance.
pub(super) fn asked(node: &mut NodeState, id: ProcessId, ticket: u32, bytes: u64, uuid: [u8; 16]) {
    let Some(process) = node.registry.processes.get(&id) else { return };
    let key = process.key.clone();
    node.vram_requests.waiting.insert(id, VramRequest { ticket, bytes, uuid });
    taken(node, id);
    read_next(node, &key);
}

/// Records that a process has used the allowance that it got, or no longer needs it. The controller
/// then serves the next request of the container.
pub(super) fn taken(node: &mut NodeState, id: ProcessId) {
    let is_its =
        |served: &ServedRequest| matches!(served, ServedRequest::Granted(to, _) if *to == id);
    let key = node.vram_requests.served.iter().find(|(_, served)| is_its(served));
    if let Some(key) = key.map(|(key, _)| key.clone()) {
        node.vram_requests.served.remove(&key);
        read_next(node, &key);
    }
}

/// Stops waiting for VramTaken if its time has passed.
pub(super) fn check_taken(node: &mut NodeState, key: &Key) {
    if let Some(ServedRequest::Granted(id, until)) = node.vram_requests.served.get(key).copied()
        && node.clock.now >= until
    {
        taken(node, id);
    }
}

/// Begins to read the VRAM of a container if a process of it waits for an allowance. One reading
/// serves one request.
fn read_next(node: &mut NodeState, key: &Key) {
    let members = node.members(key);
    let requests = &mut node.vram_requests;
    if requests.served.contains_key(key) {
        return;
    }
    let Some(id) = members.iter().find(|id| requests.waiting.contains_key(*id)) else { return };
    requests.served.insert(key.clone(), ServedRequest::Reading(*id));
    requests.recalls += 1;
    // The start time distinguishes the recalls of this controller from those of an earlier one.
    let epoch = node.clock.started_ticks.wrapping_shl(20).wrapping_add(requests.recalls);
    node.output.effects.push(Effect::ReadVram { key: key.clone(), epoch, processes: members });
}

/// Replies to the request for which VRAM was read. `pending` contains the pending bytes of each
/// process. They were read after the recall of the allowances, and before the GPUs were read.
pub(super) fn read(
    node: &mut NodeState,
    key: &Key,
    epoch: u64,
    pending: &[(ProcessId, u64)],
    gpus: Result<Vec<GpuSample>, String>,
) {
    if let Some(ServedRequest::Reading(id)) = node.vram_requests.served.remove(key)
        && let Some(request) = node.vram_requests.waiting.remove(&id)
    {
        let free_bytes = free_bytes(node, key, &nvml_uuid(&request.uuid), pending, gpus);
        // If NVML cannot be read, the process gets what it needs now: it must not fail because of
        // that.
        let free_bytes = free_bytes.unwrap_or(request.bytes);
        let (VramRequest { ticket, bytes, uuid }, others) =
            (request, node.members(key).len().saturating_sub(1));
        let rest_bytes = free_bytes.checked_sub(bytes);
        // Other processes of the container may need VRAM soon. A recall costs both sides time.
        let bytes = rest_bytes.map_or(0, |rest| bytes + rest / (others as u64 + 1));
        let reply = ControllerMessage::VramAllowance { ticket, uuid, bytes, free_bytes, epoch };
        node.output.effects.push(Effect::Send(id, reply));
        let granted = ServedRequest::Granted(id, node.clock.now + TAKE_MS);
        node.vram_requests.served.insert(key.clone(), granted);
    }
    read_next(node, key);
}

/// VRAM that a container may still allocate on a GPU, in bytes. `None`: NVML cannot be read.
fn free_bytes(
    node: &NodeState,
    key: &Key,
    uuid: &str,
    pending: &[(ProcessId, u64)],
    gpus: Result<Vec<GpuSample>, String>,
) -> Option<u64> {
    let limit_bytes = node.registry.containers.get(key)?.policy.vram_limit_bytes;
    let gpus = gpus.ok()?;
    // NVML reports the VRAM of whole GPUs only, not of parts (MIG).
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == uuid && !gpu.mig) else {
        return Some(UNLIMITED_BYTES);
    };
    if limit_bytes == 0 {
        return Some(UNLIMITED_BYTES);
    }
    let processes = node.registry.processes.of(key);
    let held: u64 = processes.map(|(_, process)| held_bytes(process, gpu)).sum();
    let pending: u64 = pending.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes));
    Some(limit_bytes.saturating_sub(held.saturating_add(pending)))
}

/// VRAM of a process on a GPU, in bytes. For an offloaded process, this includes the VRAM that it
/// needs for its restore.
fn held_bytes(process: &Process, gpu: &GpuSample) -> u64 {
    let read = gpu.processes.iter().filter(|(pid, _)| *pid == process.identity.pid);
    let read: u64 = read.map(|(_, bytes)| bytes).sum();
    let known = match process.agent.phase {
        Phase::Open => return read,
        phase if phase.is_offloaded() => process.memory.offloaded_vram().unwrap_or_default(),
        _ => &process.memory.vram,
    };
    let on_gpu = |held: &&DeviceBytes| held.uuid == gpu.uuid;
    read.max(known.iter().filter(on_gpu).map(|held| held.bytes).sum())
}

/// Forgets the request of a process that has ended or will send it again.
pub(super) fn forget(node: &mut NodeState, id: ProcessId) {
    node.vram_requests.waiting.remove(&id);
    taken(node, id);
}

/// Updates the files of the containers with a limit after a sample of all GPUs.
pub(super) fn show(node: &mut NodeState) {
    let mut shown = BTreeMap::new();
    for (key, container) in &node.registry.containers {
        if container.policy.vram_limit_bytes > 0 {
            shown.insert(key.clone(), views(node, key, container.policy.vram_limit_bytes));
        }
    }
    let before = std::mem::take(&mut node.vram_requests.shown);
    for key in before.keys().filter(|key| !shown.contains_key(*key)) {
        let effect = Effect::ShowVram { key: key.clone(), views: Vec::new() };
        node.output.effects.push(effect);
    }
    for (key, views) in shown.iter().filter(|(key, views)| before.get(*key) != Some(*views)) {
        let effect = Effect::ShowVram { key: key.clone(), views: views.clone() };
        node.output.effects.push(effect);
    }
    node.vram_requests.shown = shown;
}

/// VRAM of a container on each GPU that is not divided into parts (MIG).
fn views(node: &NodeState, key: &Key, limit_bytes: u64) -> Vec<VramView> {
    let whole = node.gpus.samples.iter().filter(|gpu| !gpu.mig);
    let view = |gpu: &GpuSample| {
        let held = node.registry.processes.of(key).map(|(_, process)| held_bytes(process, gpu));
        Some(VramView { uuid: uuid_bytes(&gpu.uuid)?, limit_bytes, used_bytes: held.sum() })
    };
    whole.filter_map(view).take(MAX_GPUS).collect()
}
