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

use affinode_proto::wire::{Capabilities, Phase, message::Action};

use super::{
    DeviceBytes, GpuSample, Key, Millis, ProcessId,
    node_state::NodeState,
    process::{Process, subtract_vram},
};

/// Handles the report of an agent that its copy out cannot be cancelled any more and frees VRAM from
/// now on. Ignored if no such copy out was ordered.
pub(super) fn begins(node: &mut NodeState, id: ProcessId) {
    let now = node.clock.now;
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    if let Some(pending) = &mut process.pending
        && matches!(pending.action, Action::CopyOut { how, .. } if how.release_early)
    {
        pending.releasing_since.get_or_insert(now);
    }
}

/// Whether the copy out of a process should free VRAM early: a container waits for VRAM.
pub(super) fn is_useful(node: &NodeState, process: &Process) -> bool {
    !node.admission.queue.is_empty() && process.can(Capabilities::RELEASES_EARLY)
}

/// Whether any process is freeing VRAM by a copy out.
pub(super) fn is_in_progress(node: &NodeState) -> bool {
    node.registry.processes.values().any(|process| is_releasing(node.clock.now, process))
}

/// Whether the restore of a container may count VRAM that is being freed: it only copies memory in,
/// and its processes can wait for VRAM.
pub(super) fn may_await(node: &NodeState, key: &Key) -> bool {
    let may = |p: &Process| match p.agent.phase {
        Phase::CopiedOut => p.can(Capabilities::RELEASES_EARLY),
        phase => !phase.is_offloaded(),
    };
    node.alloc_wait_of(key).is_none() && node.registry.processes.of(key).all(|(_, p)| may(p))
}

/// The GPUs' last samples, in which VRAM that other containers are freeing counts as free.
pub(super) fn samples_for(node: &NodeState, key: &Key) -> Vec<GpuSample> {
    let mut samples = node.gpus.samples.clone();
    let others = node.registry.processes.values().filter(|p| p.key != *key);
    let releasing = others.filter(|p| is_releasing(node.clock.now, p));
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
    for process in node.registry.processes.values_mut().filter(|p| is_releasing(now, p)) {
        process.memory.vram = vram_in(gpus, process.identity.pid);
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
fn is_releasing(now: Millis, process: &Process) -> bool {
    const SLOWEST_BYTES_PER_MS: u64 = 1 << 20;
    const GRACE_MS: Millis = 5_000;
    let since = process.pending.and_then(|pending| pending.releasing_since);
    since.is_some_and(|since| {
        let copy_ms = process.memory.swap.swappable_bytes / SLOWEST_BYTES_PER_MS;
        now.saturating_sub(since) < GRACE_MS + copy_ms
    })
}

/// VRAM that the copy out of a process has still to free: what the process holds now, without what
/// stays on the GPU.
fn left_to_free(process: &Process) -> Vec<DeviceBytes> {
    let before = process.memory.offloaded_vram().unwrap_or_default();
    let stays = subtract_vram(before, &process.memory.freed_by_copy_of(before));
    subtract_vram(&process.memory.vram, &stays)
}
