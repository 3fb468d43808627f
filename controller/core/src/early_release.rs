//! VRAM that a copy out in progress is freeing, and the restore of a waiter into this VRAM. The two
//! copies then run at the same time, in both directions of the bus.
//!
//! ```text
//! a container waits ──> victim: CopyOut, releases early ──Releasing──> its VRAM counts as free for
//!                                                                      a waiter that is copied out
//! grant, proof: free VRAM + VRAM being freed ≥ need ──> waiter: RestoreAsFreed, waits for each piece
//! ```
//!
//! Only a restore that just copies memory in may count VRAM that is not free yet. If the VRAM does not
//! become free, such a restore fails and nothing is lost: the container waits in the queue again. The
//! driver's restore of a checkpointed process, or an allocation, needs VRAM that is free already.

use std::collections::BTreeSet;

use affinode_proto::{
    state::State,
    wire::{Capabilities, Phase, message::Action},
};

use super::{
    DeviceBytes, GpuSample, Key, Millis, ProcessId, needs,
    node_state::NodeState,
    process::{PendingOrder, Process, VramRelease, subtract_vram},
};

/// Handles the report of an agent that its copy out cannot be cancelled any more and frees VRAM from
/// now on. Ignored if no such copy out was ordered.
pub(super) fn begins(node: &mut NodeState, id: ProcessId) {
    let now = node.clock.now;
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    if let Some(pending) = &mut process.pending
        && matches!(pending.action, Action::CopyOut { how, .. } if how.release_early)
        && pending.release == VramRelease::NotReported
    {
        pending.release = VramRelease::Since(now);
    }
}

/// Ignores the present reports that VRAM is being freed, after a restore into this VRAM has failed.
pub(super) fn has_failed(node: &mut NodeState) {
    let now = node.clock.now;
    for process in node.registry.processes.values_mut().filter(|p| frees_vram(now, p)) {
        if let Some(pending) = &mut process.pending {
            pending.release = VramRelease::NotBelieved;
        }
    }
}

/// Whether the copy out of a process should free VRAM early: a container waits for VRAM of its GPUs.
pub(super) fn is_useful(node: &NodeState, key: &Key, process: &Process) -> bool {
    process.can(Capabilities::RELEASES_EARLY) && frees_vram_for_a_waiter(node, key)
}

/// Whether another container waits for VRAM of a GPU that the offload of `key` frees.
pub(super) fn frees_vram_for_a_waiter(node: &NodeState, key: &Key) -> bool {
    let processes = node.registry.processes.of(key);
    let freed: BTreeSet<&str> = processes
        .flat_map(|(_, process)| process.memory.offloaded_vram().unwrap_or_default())
        .map(|on| on.uuid.as_str())
        .collect();
    // A container whose last turn failed is not in the queue for a moment, but waits too.
    let pausing = node.registry.containers.iter();
    let pausing = pausing.filter(|(_, c)| c.shown.state == State::Queued).map(|(key, _)| key);
    let waiters = node.admission.queue.keys().chain(pausing);
    let waits = |waiter: &&Key| *waiter != key && !node.admission.grants.contains_key(*waiter);
    waiters.filter(waits).any(|waiter| {
        let want = needs::alloc_wait_beside_restore(node, waiter);
        let needs = needs::needs_with(node, waiter, want);
        needs.iter().any(|need| freed.contains(need.uuid.as_str()))
    })
}

/// Whether any process is freeing VRAM by a copy out.
pub(super) fn is_in_progress(node: &NodeState) -> bool {
    node.registry.processes.values().any(|process| frees_vram(node.clock.now, process))
}

/// Whether a process of the container is freeing VRAM by a copy out.
pub(super) fn is_releasing(node: &NodeState, key: &Key) -> bool {
    node.registry.processes.of(key).any(|(_, process)| frees_vram(node.clock.now, process))
}

/// Whether a container fits if VRAM that other containers are freeing counts as free. Always false if
/// none is being freed, or if the container cannot wait for it. `want`: the waiting allocation in
/// `needs`, which cannot wait for it. The other parameters and rules are those of [`needs::fits`].
pub(super) fn fits(
    node: &NodeState,
    key: &Key,
    needs: &[DeviceBytes],
    want: Option<(ProcessId, u64)>,
    margin: fn(u64) -> u64,
) -> bool {
    want.is_none() && may_await(node, key) && covers(node, key, needs, margin)
}

/// Whether the free VRAM and the VRAM that other containers are freeing suffice for a container.
/// Always false if none is being freed. The parameters are those of [`needs::fits`].
pub(super) fn covers(
    node: &NodeState,
    key: &Key,
    needs: &[DeviceBytes],
    margin: fn(u64) -> u64,
) -> bool {
    is_in_progress(node) && needs::fits_in(node, key, needs, &samples_for(node, key), margin)
}

/// Whether the restore of a container may count VRAM that is being freed: it only copies memory in,
/// and its processes can wait for VRAM.
pub(super) fn may_await(node: &NodeState, key: &Key) -> bool {
    let may = |p: &Process| match p.agent.phase {
        Phase::CopiedOut => p.can(Capabilities::RELEASES_EARLY),
        phase => !phase.is_offloaded(),
    };
    node.registry.processes.of(key).all(|(_, p)| may(p))
}

/// The GPUs' last samples, in which VRAM that other containers are freeing counts as free.
pub(super) fn samples_for(node: &NodeState, key: &Key) -> Vec<GpuSample> {
    let mut samples = node.gpus.samples.clone();
    let others = node.registry.processes.values().filter(|p| p.key != *key);
    let releasing = others.filter(|p| frees_vram(node.clock.now, p));
    for freed in releasing.flat_map(left_to_free) {
        if let Some(gpu) = samples.iter_mut().find(|gpu| gpu.uuid == freed.uuid) {
            gpu.used_bytes = gpu.used_bytes.saturating_sub(freed.bytes);
        }
    }
    samples
}

/// Records the VRAM of the processes that are freeing VRAM, from the same sample as the VRAM in use.
/// Without this, VRAM that was freed since the last sample would count twice.
pub(super) fn take_vram(node: &mut NodeState, gpus: &[GpuSample]) {
    let now = node.clock.now;
    for process in node.registry.processes.values_mut().filter(|p| frees_vram(now, p)) {
        let held = vram_in(gpus, process.identity.pid);
        process.memory.set_vram(held, &node.gpus.unreadable);
    }
}

/// VRAM of a process in samples of the GPUs.
pub(super) fn vram_in(gpus: &[GpuSample], pid: u32) -> Vec<DeviceBytes> {
    let held = gpus.iter().flat_map(|gpu| gpu.processes.iter().map(move |held| (gpu, held)));
    held.filter(|(_, (other, _))| *other == pid)
        .map(|(gpu, (_, bytes))| DeviceBytes { uuid: gpu.uuid.clone(), bytes: *bytes })
        .collect()
}

/// Whether a process is freeing VRAM. A process that takes far longer than expected does not count,
/// because its report may be false.
fn frees_vram(now: Millis, process: &Process) -> bool {
    const SLOWEST_BYTES_PER_MS: u64 = 1 << 20;
    const GRACE_MS: Millis = 5_000;
    let Some(PendingOrder { release: VramRelease::Since(since), .. }) = process.pending else {
        return false;
    };
    let offloaded = process.memory.offloaded_vram().unwrap_or_default();
    let copy_ms = offloaded.iter().map(|on| on.bytes).sum::<u64>() / SLOWEST_BYTES_PER_MS;
    now.saturating_sub(since) < GRACE_MS + copy_ms
}

/// VRAM that the copy out of a process has still to free: what the process holds now, without what
/// stays on the GPU.
fn left_to_free(process: &Process) -> Vec<DeviceBytes> {
    let before = process.memory.offloaded_vram().unwrap_or_default();
    let stays = subtract_vram(before, &process.memory.freed_by_copy_of(before));
    subtract_vram(&process.memory.vram, &stays)
}
