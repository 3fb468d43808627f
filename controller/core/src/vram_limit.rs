//! The limit of a container's VRAM (`affinode.io/vram-limit`).
//!
//! ```text
//! library: an allocation is larger than the allowance of its process
//!   AskVram ─> recall the allowances of all processes of the container ─> read NVML
//!           <─ VramAllowance: what the limit leaves
//!   VramTaken ─> the next request of the container
//! ```
//!
//! An allowance is the amount of VRAM that a process may allocate without a message to the
//! controller. It is computed from NVML's reading, not from a sum of allocations. NVML also counts
//! VRAM that the library does not see: contexts, modules, and the driver's rounding. Freed memory
//! needs no report, because the next reading shows it.
//!
//! The order of the steps keeps the container below its limit. A recall makes the present
//! allowances of the container invalid: no process begins another allocation under them.
//! Allocations that began before the recall are pending. NVML's reading may not contain them yet,
//! so their bytes are added to it. If the reading does contain them, they count twice. If an
//! allowance is too small only because of pending bytes, the GPUs are therefore read again.
//!
//! The process sends VramTaken when it has allocated the VRAM, or cannot. Only then is the
//! container's next request served. Otherwise two processes that send requests at the same time
//! could recall each other's allowances forever.

use std::collections::{BTreeMap, BTreeSet};

use affinode_proto::wire::{
    Capabilities, Phase,
    message::{ControllerMessage, MAX_GPUS, UNLIMITED_VRAM_BYTES},
    vram_view::VramView,
};

use super::{
    DeviceBytes, Effect, GpuSample, Key, Millis, ProcessId,
    gpu_uuid::{nvml_uuid, uuid_bytes},
    node_state::NodeState,
    process::Process,
};

/// Time in which a process must send VramTaken after it got an allowance, in milliseconds.
const TAKE_MS: Millis = 1_000;
/// Maximum number of GPUs for which a process can wait at the same time.
const MAX_WAITING_GPUS: usize = 16;
/// Maximum number of readings of the GPUs for one request. NVML's reading may already contain the
/// pending bytes (allocations in progress), which then count twice. So if a request would be
/// refused only because of pending bytes, the GPUs are read again.
pub(super) const MAX_READINGS: u32 = 20;

/// Requests of processes for VRAM allowances.
#[derive(Debug, Default)]
pub(super) struct VramRequests {
    /// Processes whose library got a limit with its Welcome. Requests of other processes are ignored.
    limited: BTreeSet<ProcessId>,
    /// For each process and GPU, the last request that has no reply yet. The first number of the
    /// value is the request's number in the order of arrival.
    waiting: BTreeMap<(ProcessId, [u8; 16]), (u64, VramRequest)>,
    /// The request for which the GPUs are being read. The node reads for one request at a time. A
    /// restore, which also needs a reading, therefore waits for at most one of these readings.
    reading: Option<VramReading>,
    /// For each container, the process that got an allowance last, and the time until which
    /// VramTaken is awaited.
    granted: BTreeMap<Key, (ProcessId, Millis)>,
    /// For each container, when one of its requests was last served. The value is taken from the
    /// counter `arrivals`. The container with the lowest value is served next.
    last_served: BTreeMap<Key, u64>,
    /// For each container with a limit, the content of the file that shows the container its VRAM.
    shown: BTreeMap<Key, Vec<VramView>>,
    /// Number of events so far: each arrival and each service of a request is one. Requests and
    /// containers are ordered by the numbers of their events.
    arrivals: u64,
    /// Number of recalls of allowances so far.
    recalls: u64,
}

/// The request of one process for one GPU.
#[derive(Clone, Copy, Debug)]
struct VramRequest {
    ticket: u32,
    bytes: u64,
    uuid: [u8; 16],
    /// Number of readings for this request so far.
    readings: u32,
}

/// A request for which the GPUs are being read.
#[derive(Clone, Debug)]
struct VramReading {
    key: Key,
    process: ProcessId,
    request: VramRequest,
}

/// Returns the limit that the library of a new process enforces, in bytes. 0: the library enforces
/// no limit. Recalls the allowances of the container's other processes, because they were computed
/// without the new process.
pub(super) fn limit_newcomer(node: &mut NodeState, key: &Key, id: ProcessId) -> u64 {
    let limit_bytes = limit_bytes(node, key);
    let able = node
        .registry
        .processes
        .get(&id)
        .is_some_and(|process| process.agent.capabilities.contains(Capabilities::LIMITS_VRAM));
    if limit_bytes == 0 || !able {
        return 0;
    }
    node.vram_requests.limited.insert(id);
    let processes = node.members(key);
    if processes.len() > 1 {
        let epoch = next_epoch(node);
        node.output.effects.push(Effect::RecallVram { epoch, processes });
    }
    limit_bytes
}

/// Returns the number of the next recall. The start time distinguishes the recalls of this
/// controller from those of an earlier one.
fn next_epoch(node: &mut NodeState) -> u64 {
    node.vram_requests.recalls += 1;
    node.clock.started_ticks.wrapping_shl(20).wrapping_add(node.vram_requests.recalls)
}

/// Handles the request of a process for an allowance.
pub(super) fn asked(node: &mut NodeState, id: ProcessId, ticket: u32, bytes: u64, uuid: [u8; 16]) {
    let requests = &mut node.vram_requests;
    let of_process = requests.waiting.range((id, [0; 16])..=(id, [u8::MAX; 16])).count();
    let is_known = requests.waiting.contains_key(&(id, uuid));
    if !requests.limited.contains(&id) || (!is_known && of_process >= MAX_WAITING_GPUS) {
        return;
    }
    requests.arrivals += 1;
    let request = VramRequest { ticket, bytes, uuid, readings: 0 };
    requests.waiting.insert((id, uuid), (requests.arrivals, request));
    taken(node, id);
    serve_next(node);
}

/// Records that a process has used the allowance that it got, or no longer needs it. The controller
/// then serves the next request of the container.
pub(super) fn taken(node: &mut NodeState, id: ProcessId) {
    node.vram_requests.granted.retain(|_, (to, _)| *to != id);
    serve_next(node);
}

/// Stops waiting for VramTaken if its time has passed.
pub(super) fn check_taken(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    if node.vram_requests.granted.get(key).is_some_and(|(_, until)| now >= *until) {
        node.vram_requests.granted.remove(key);
        serve_next(node);
    }
}

/// Begins to read the GPUs for the next request, if no reading is in progress. Among the containers
/// that do not owe a VramTaken, the one that was served longest ago is next.
fn serve_next(node: &mut NodeState) {
    let requests = &node.vram_requests;
    if requests.reading.is_some() {
        return;
    }
    let candidates = requests.waiting.iter().filter_map(|((id, _), (arrival, request))| {
        let key = &node.registry.processes.get(id)?.key;
        let last = requests.last_served.get(key).copied().unwrap_or_default();
        (!requests.granted.contains_key(key)).then_some(((last, *arrival), *id, key, *request))
    });
    let Some((_, process, key, request)) = candidates.min_by_key(|(place, ..)| *place) else {
        return;
    };
    let key = key.clone();
    let requests = &mut node.vram_requests;
    requests.waiting.remove(&(process, request.uuid));
    requests.arrivals += 1;
    requests.last_served.insert(key.clone(), requests.arrivals);
    let request = VramRequest { readings: request.readings + 1, ..request };
    requests.reading = Some(VramReading { key: key.clone(), process, request });
    let (epoch, processes) = (next_epoch(node), node.members(&key));
    node.output.effects.push(Effect::ReadVram { key, epoch, processes });
}

/// Replies to the request for which the GPUs were read. `pending` contains the pending bytes of
/// each process: allocations that it began under an earlier allowance. They were read after the
/// recall of the allowances, and before the GPUs were read.
pub(super) fn read(
    node: &mut NodeState,
    key: &Key,
    epoch: u64,
    pending: &[(ProcessId, u64)],
    gpus: Result<Vec<GpuSample>, String>,
) {
    let Some(reading) = node.vram_requests.reading.take_if(|reading| reading.key == *key) else {
        return;
    };
    if node.registry.processes.get(&reading.process).is_none_or(|process| process.key != *key) {
        return serve_next(node);
    }
    let VramRequest { ticket, bytes, uuid, readings } = reading.request;
    let pending = pending.iter().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let unpromised = unpromised_bytes(node, key, &nvml_uuid(&uuid), gpus);
    let free_bytes = unpromised.map_or(u64::MAX, |unpromised| unpromised.saturating_sub(pending));
    if free_bytes < bytes
        && unpromised.is_some_and(|unpromised| unpromised >= bytes)
        && readings < MAX_READINGS
    {
        return read_again(node, reading);
    }
    // Other processes of the container may need VRAM soon. A recall costs both sides time.
    let members = node.members(key).len().max(1) as u64;
    let (allowance, free_bytes) = match unpromised {
        // NVML cannot be read. The process gets what it needs now, because it must not fail for
        // that.
        None => (bytes, limit_bytes(node, key).max(bytes)),
        Some(UNLIMITED_VRAM_BYTES) => (UNLIMITED_VRAM_BYTES, UNLIMITED_VRAM_BYTES),
        Some(_) => {
            let rest = free_bytes.checked_sub(bytes);
            (rest.map_or(0, |rest| bytes + rest / members), free_bytes)
        }
    };
    let reply =
        ControllerMessage::VramAllowance { ticket, uuid, bytes: allowance, free_bytes, epoch };
    node.output.effects.push(Effect::Send(reading.process, reply));
    // A process that only wants to know what is free allocates nothing under the reply.
    if bytes > 0 {
        let until = node.clock.now + TAKE_MS;
        node.vram_requests.granted.insert(key.clone(), (reading.process, until));
    }
    serve_next(node);
}

/// Puts a request back, so that the GPUs are read for it again. Requests of other containers come
/// first. A container can forge its pending bytes, and must not delay the others by its readings.
fn read_again(node: &mut NodeState, reading: VramReading) {
    let requests = &mut node.vram_requests;
    // The process may have sent a newer request meanwhile. Its reply also answers this one.
    let place = (reading.process, reading.request.uuid);
    // The arrival 0 makes it the first request of its container.
    requests.waiting.entry(place).or_insert((0, reading.request));
    serve_next(node);
}

/// Returns the limit of a container's VRAM on each GPU, in bytes. 0: there is none, or each GPU of
/// the node is at most as large as the limit. A limit is a multiple of 1 MiB, so a GPU that is less
/// than 1 MiB larger counts as equal.
pub(super) fn limit_bytes(node: &NodeState, key: &Key) -> u64 {
    let limit = node.registry.containers.get(key).map_or(0, |known| known.policy.vram_limit_bytes);
    let gpus = &node.gpus.samples;
    let holds =
        gpus.is_empty() || gpus.iter().any(|gpu| gpu.total_bytes >= limit.saturating_add(1 << 20));
    if holds { limit } else { 0 }
}

/// Returns the VRAM that a container may still use on a GPU under its limit, in bytes. Pending
/// bytes are not subtracted. `UNLIMITED_VRAM_BYTES`: the limit does not apply to this GPU. `None`:
/// NVML, or this GPU, cannot be read.
fn unpromised_bytes(
    node: &NodeState,
    key: &Key,
    uuid: &str,
    gpus: Result<Vec<GpuSample>, String>,
) -> Option<u64> {
    let gpus = gpus.ok()?;
    if node.gpus.error_of(uuid).is_some() {
        return None;
    }
    // NVML reports the VRAM of whole GPUs only, not of parts (MIG).
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == uuid && !gpu.mig) else {
        return Some(UNLIMITED_VRAM_BYTES);
    };
    let limit_bytes = limit_bytes(node, key);
    if limit_bytes == 0 {
        return Some(UNLIMITED_VRAM_BYTES);
    }
    let processes = node.registry.processes.of(key);
    let held = processes.map(|(_, process)| held_bytes(process, gpu));
    Some(limit_bytes.saturating_sub(held.fold(0, u64::saturating_add)))
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

/// Forgets the requests of a process that has ended, or that will send them again.
pub(super) fn forget(node: &mut NodeState, id: ProcessId) {
    let requests = &mut node.vram_requests;
    requests.limited.remove(&id);
    requests.waiting.retain(|(process, _), _| *process != id);
    taken(node, id);
}

/// Forgets a container that was deleted.
pub(super) fn forget_container(node: &mut NodeState, key: &Key) {
    for id in node.members(key) {
        forget(node, id);
    }
    node.vram_requests.granted.remove(key);
    node.vram_requests.last_served.remove(key);
}

/// Updates the file that shows a container its VRAM, for each container with a limit. Called after
/// a sample of all GPUs.
pub(super) fn show(node: &mut NodeState) {
    let mut shown = BTreeMap::new();
    for key in node.registry.containers.keys() {
        let limit = limit_bytes(node, key);
        if limit > 0 {
            shown.insert(key.clone(), views(node, key, limit));
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

/// Limit and VRAM in use of a container, one record for each GPU. GPUs that are divided into MIG
/// instances are left out.
fn views(node: &NodeState, key: &Key, limit_bytes: u64) -> Vec<VramView> {
    let whole = node.gpus.samples.iter().filter(|gpu| !gpu.mig);
    let view = |gpu: &GpuSample| {
        let held = node.registry.processes.of(key).map(|(_, process)| held_bytes(process, gpu));
        Some(VramView { uuid: uuid_bytes(&gpu.uuid)?, limit_bytes, used_bytes: held.sum() })
    };
    whole.filter_map(view).take(MAX_GPUS).collect()
}
