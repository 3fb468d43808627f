//! Calculates the VRAM that containers need and hold.

use std::collections::BTreeMap;

use affinode_proto::{reason::Reason, wire::Phase};

use super::{
    DeviceBytes, GpuSample, Key, Millis, ProcessId,
    ledger::{Ledger, margin_bytes},
    merge_needs,
    node_state::NodeState,
    offload_level,
    plan::OffloadMethod,
    process::{Process, Termination},
};

/// Time limit for the exit of a process that was ordered to end. Until then, its VRAM counts as
/// about to be freed.
const EXIT_TIMEOUT_MS: Millis = 30_000;

/// VRAM that an offloaded process needs for its restore. If the journal was lost, the need is
/// unknown. The process is then assumed to need, on each GPU, a context and all memory that its
/// counters show.
pub(super) fn needs(node: &NodeState, process: &Process) -> Vec<DeviceBytes> {
    const CONTEXT_BYTES: u64 = 1 << 30;
    if let Some(gone) = process.vram_to_restore() {
        return gone;
    }
    let claimed = process.activity.counters.as_ref().map_or(0, |page| page.allocated_bytes);
    let claimed = claimed.max(process.memory.swap.swappable_bytes);
    node.gpus
        .samples
        .iter()
        .map(|gpu| DeviceBytes {
            uuid: gpu.uuid.clone(),
            bytes: claimed.saturating_add(CONTEXT_BYTES).min(most_of(gpu.total_bytes)),
        })
        .collect()
}

/// VRAM that the offloaded processes of a container need in total for their restore.
pub(super) fn container_needs(node: &NodeState, key: &Key) -> Vec<DeviceBytes> {
    let needs: Vec<DeviceBytes> = node
        .registry
        .processes
        .of(key)
        .filter(|(_, p)| p.agent.phase.is_offloaded())
        .flat_map(|(_, p)| needs(node, p))
        .collect();
    let mut needs = if needs.len() > 1 { merge_needs(&needs) } else { needs };
    // Estimates are limited to the VRAM of a GPU without other users: the processes cannot have
    // had more before their offload.
    let known = |uuid: &str| -> u64 {
        let of_key = node.registry.processes.of(key).filter(|(_, p)| p.agent.phase.is_offloaded());
        let devices = of_key.filter_map(|(_, p)| p.vram_to_restore()).flatten();
        devices.filter(|need| need.uuid == uuid).map(|need| need.bytes).sum()
    };
    for need in &mut needs {
        if let Some(gpu) = node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid) {
            let others = most_of(gpu.total_bytes).saturating_sub(held_bytes(node, key, &need.uuid));
            if need.bytes > others {
                need.bytes = need.bytes.min(others.max(known(&need.uuid)));
            }
        }
    }
    needs
}

/// VRAM that a container needs for its restore. If the allocation `named` still waits for VRAM, its
/// size is added.
pub(super) fn needs_with(
    node: &NodeState,
    key: &Key,
    named: Option<(ProcessId, u64)>,
) -> Vec<DeviceBytes> {
    let want = node
        .alloc_wait_of(key)
        .filter(|(id, want)| named == Some((*id, want.ticket)))
        .map(|(_, want)| &want.need);
    let offloaded = container_needs(node, key);
    if want.is_some() { merge_needs(offloaded.iter().chain(want)) } else { offloaded }
}

/// The waiting allocation that is served together with the container's restore. `None` if CUDA
/// calls wait at the gate and the VRAM does not suffice for both. The restore is then served first,
/// so that these calls do not also wait for the allocation.
pub(super) fn alloc_wait_beside_restore(node: &NodeState, key: &Key) -> Option<(ProcessId, u64)> {
    let (id, want) = node.alloc_wait_of(key)?;
    let offloaded = container_needs(node, key);
    let called = node.registry.containers.get(key).is_some_and(|c| c.wake_began.is_some());
    let together = merge_needs(offloaded.iter().chain([&want.need]));
    // Memory that a copy out left on the GPU takes VRAM in addition to what the restore needs.
    let held = |uuid: &str| held_bytes(node, key, uuid);
    let fits = |need: &DeviceBytes| {
        let gpu = node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid);
        let room = |gpu: &super::GpuSample| gpu.total_bytes - margin_bytes(gpu.total_bytes);
        gpu.is_some_and(|gpu| need.bytes.saturating_add(held(&need.uuid)) <= room(gpu))
    };
    let alone = offloaded.is_empty();
    (alone || (!called && together.iter().all(fits))).then_some((id, want.ticket))
}

/// VRAM that must stay free on a GPU in addition to the container's grant. For a restore it is the
/// margin of the ledger, because a restore must not fail. For an allocation it is 0, because an
/// allocation may fail and may need all VRAM.
pub(super) fn margin_for(node: &NodeState, key: &Key) -> fn(u64) -> u64 {
    if container_needs(node, key).is_empty() { |_| 0 } else { margin_bytes }
}

/// VRAM that a container holds on one GPU now, in bytes.
pub(super) fn held_bytes(node: &NodeState, key: &Key, uuid: &str) -> u64 {
    let devices = node.registry.processes.of(key).flat_map(|(_, p)| &p.memory.vram);
    devices.filter(|held| held.uuid == uuid).map(|held| held.bytes).sum()
}

/// VRAM that the restore of a process needs, in bytes over all GPUs.
pub(super) fn offloaded_bytes_of(node: &NodeState, id: ProcessId) -> u64 {
    node.registry.processes.get(&id).map_or(0, Process::offloaded_vram_bytes)
}

/// Whether a container fits in addition to the VRAM that is promised to other containers. `needs`:
/// the VRAM that it needs on each GPU.
pub(super) fn fits(
    node: &NodeState,
    key: &Key,
    needs: &[DeviceBytes],
    margin: fn(u64) -> u64,
) -> bool {
    fits_in(node, key, needs, &node.gpus.samples, margin)
}

/// Like [`fits`], with these samples of the GPUs.
pub(super) fn fits_in(
    node: &NodeState,
    key: &Key,
    needs: &[DeviceBytes],
    samples: &[GpuSample],
    margin: fn(u64) -> u64,
) -> bool {
    node.admission.ledger.fits(key, needs, |uuid| held_bytes(node, key, uuid), samples, margin)
}

/// VRAM that an offload of the container frees. With `deep`, this includes the VRAM of its CUDA
/// contexts. If the container is copied out already, only the VRAM that it still holds is counted.
pub(super) fn vram_freed_by(node: &NodeState, key: &Key, deep: bool) -> Vec<DeviceBytes> {
    let moves = offload_level::moves(node, key);
    let has_second_level = offload_level::has_second_level(node, key);
    let stays = |p: &Process| p.keeps_context() || !has_second_level;
    let of_each = node.registry.processes.of(key).map(|(_, p)| match moves(p) {
        OffloadMethod::Copy if stays(p) && p.agent.phase == Phase::CopiedOut => Vec::new(),
        OffloadMethod::Copy if stays(p) => p.vram_freed_by_copy(),
        OffloadMethod::Copy if p.agent.phase != Phase::CopiedOut && !deep => p.vram_freed_by_copy(),
        _ => p.memory.vram.clone(),
    });
    merge_needs(&of_each.flatten().collect::<Vec<_>>())
}

/// VRAM of a GPU that no offload can free, in bytes. 0 if the GPU is not in the last NVML sample.
/// See [`super::Node::unmovable_bytes`].
pub(super) fn unmovable_bytes(node: &NodeState, uuid: &str) -> u64 {
    unmovable_bytes_if(node, uuid, Reason::is_lasting)
}

/// VRAM of a GPU that no offload can free, in bytes. `is_lasting`: whether a container with this
/// reason keeps its VRAM.
fn unmovable_bytes_if(node: &NodeState, uuid: &str, is_lasting: fn(Reason) -> bool) -> u64 {
    if !node.gpus.samples.iter().any(|gpu| gpu.uuid == uuid) {
        return 0;
    }
    let stays = |process: &&Process| stays_on_gpu(node, process, is_lasting);
    let staying = node.registry.processes.values().filter(stays);
    // A process that has registered since the sample counts with the VRAM that is recorded for it.
    let is_registered = |pid: u32| node.registry.processes.values().any(|p| p.identity.pid == pid);
    let foreign = node.gpus.foreign.iter().filter(|held| held.uuid == uuid);
    let foreign = foreign.filter(|held| held.pid.is_none_or(|pid| !is_registered(pid)));
    let staying = staying.map(|process| bytes_on(process, uuid));
    foreign.map(|held| held.bytes).chain(staying).fold(0, u64::saturating_add)
}

/// Whether no offload can free the VRAM that a process holds.
fn stays_on_gpu(node: &NodeState, process: &Process, is_lasting: fn(Reason) -> bool) -> bool {
    let container = node.registry.containers.get(&process.key);
    (process.agent.phase.is_offloaded() && process.keeps_context())
        || container.is_none_or(|c| is_lasting(c.shown.reason.0))
}

/// VRAM that a process holds on a GPU, in bytes.
fn bytes_on(process: &Process, uuid: &str) -> u64 {
    let on_gpu = process.memory.vram.iter().filter(|on| on.uuid == uuid);
    on_gpu.map(|on| on.bytes).fold(0, u64::saturating_add)
}

/// Whether a container with this reason keeps its VRAM from every waiter. A container that lacks host
/// memory does not: restores of other containers can free host memory, also below a limit.
fn keeps_vram(reason: Reason) -> bool {
    reason.is_lasting() && !reason.is_host_shortage()
}

/// VRAM of each GPU that no offload could free for a waiter, in bytes, by UUID.
pub(super) fn unmovable_for_waiters(node: &NodeState) -> BTreeMap<String, u64> {
    let of_gpu = |gpu: &GpuSample| unmovable_bytes_if(node, &gpu.uuid, keeps_vram);
    node.gpus.samples.iter().map(|gpu| (gpu.uuid.clone(), of_gpu(gpu))).collect()
}

/// Whether the container could be served if all VRAM that offloads can free were free. `needs`: the
/// VRAM that it needs on each GPU. `margin`: as in [`fits`]. `unmovable`: the result of
/// [`unmovable_for_waiters`]. A GPU without a sample counts as large enough.
pub(super) fn may_ever_fit(
    node: &NodeState,
    key: &Key,
    needs: &[DeviceBytes],
    margin: fn(u64) -> u64,
    unmovable: &BTreeMap<String, u64>,
) -> bool {
    let own = || node.registry.processes.of(key).map(|(_, process)| process);
    needs.iter().all(|need| {
        let Some(gpu) = node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid) else {
            return true;
        };
        // The container's own VRAM may be unmovable too, and counts once.
        let stays = |process: &&Process| stays_on_gpu(node, process, keeps_vram);
        let own_staying_bytes: u64 = own().filter(stays).map(|p| bytes_on(p, &need.uuid)).sum();
        let others_bytes = unmovable.get(&need.uuid).copied().unwrap_or(0);
        let others_bytes = others_bytes.saturating_sub(own_staying_bytes);
        let alone = GpuSample {
            used_bytes: others_bytes + held_bytes(node, key, &need.uuid),
            ..gpu.clone()
        };
        let held = |uuid: &str| held_bytes(node, key, uuid);
        Ledger::default().fits(key, std::slice::from_ref(need), held, &[alone], margin)
    })
}

/// VRAM of the processes that were ordered to end and are still expected to exit in time.
pub(super) fn termination_of(node: &NodeState) -> impl Iterator<Item = &DeviceBytes> {
    let hoped =
        |ending: &Termination| node.clock.now.saturating_sub(ending.since) < EXIT_TIMEOUT_MS;
    let ending =
        node.registry.processes.values().filter(move |p| p.termination.as_ref().is_some_and(hoped));
    ending.flat_map(|p| &p.memory.vram)
}

/// Maximum VRAM that processes can have on a GPU without other users, in bytes. It is the GPU's
/// size minus the margin and the driver's share.
fn most_of(total_bytes: u64) -> u64 {
    total_bytes.saturating_sub(margin_bytes(total_bytes)).saturating_sub(total_bytes / 64)
}
