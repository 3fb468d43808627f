//! Restores a container on another GPU of the same model if its own GPU is full (migration).
//!
//! ```text
//! waiter ──does not fit on its GPU──> fits on another ──> promised and proven there
//!                                                             │ RestoreOnGpu
//!            restored: it stays there from now on <───────────┤
//!            the agent refuses or the driver fails: waits for its own GPU, no second attempt
//! ```
//!
//! Only containers whose processes were all checkpointed from one GPU can migrate. A copied-out
//! process still has its context on its own GPU. A process with memory on several GPUs may depend
//! on the order of its GPUs.

use affinode_proto::{
    event::EventKind,
    wire::{
        Phase, ProcessFlags,
        message::{Action, ControllerMessage, GPUS_PER_FRAME, Gpu, MAX_GPUS},
    },
};

use super::{
    DeviceBytes, Effect, JournalStep, Key, ProcessId, event::NodeEvent, gpu_uuid::uuid_bytes,
    grants, input::GpuSample, needs, node_state::NodeState, process::Process,
};

/// Chooses another GPU for a container that does not fit on its own GPU, and sets it as the
/// migration target of all its processes. `is_others` returns whether a GPU is reserved for another
/// waiter. Returns false if no GPU is suitable.
pub(super) fn choose_other_gpu(
    node: &mut NodeState,
    key: &Key,
    margin: fn(u64) -> u64,
    is_others: impl Fn(&str) -> bool,
) -> bool {
    let Some(to) = find_other_gpu(node, key, margin, is_others) else { return false };
    for id in node.members(key) {
        if let Some(process) = node.registry.processes.get_mut(&id) {
            process.memory.set_target_gpu(Some(to.clone()));
        }
    }
    true
}

fn find_other_gpu(
    node: &NodeState,
    key: &Key,
    margin: fn(u64) -> u64,
    is_others: impl Fn(&str) -> bool,
) -> Option<String> {
    let own =
        node.gpus.samples.iter().find(|gpu| Some(&gpu.uuid) == single_gpu(node, key).as_ref())?;
    let places = node.gpus.samples.len() <= MAX_GPUS && node.gpus.samples.iter().all(can_be_named);
    let needs = needs::container_needs(node, key);
    let on = |gpu: &GpuSample| -> Vec<DeviceBytes> {
        let there = |need: &DeviceBytes| DeviceBytes { uuid: gpu.uuid.clone(), ..need.clone() };
        needs.iter().map(there).collect()
    };
    node.gpus
        .samples
        .iter()
        .filter(|gpu| places && is_like(own, gpu) && !is_others(&gpu.uuid))
        .filter(|gpu| needs::fits(node, key, &on(gpu), margin))
        .max_by_key(|gpu| gpu.total_bytes.saturating_sub(gpu.used_bytes))
        .map(|gpu| gpu.uuid.clone())
}

/// Returns the GPU from which all processes of a container were offloaded. `None`: there are
/// several, or the container may not migrate.
fn single_gpu(node: &NodeState, key: &Key) -> Option<String> {
    let container = node.registry.containers.get(key)?;
    let unseen = node.registry.unclaimed_journal.keys().any(|(other, ..)| other == key);
    if !container.policy.allow_gpu_migration || unseen || node.alloc_wait_of(key).is_some() {
        return None;
    }
    let mut seats = node.registry.processes.of(key).map(|(_, process)| single_gpu_of(process));
    let first = seats.next()??.to_owned();
    seats.all(|seat| seat == Some(first.as_str())).then_some(first)
}

/// Sends the order to restore a process on the target GPU of its migration. If that GPU can no
/// longer be used, ends the grant. VRAM is then promised and proven again later.
pub(super) fn send_restore(node: &mut NodeState, key: &Key, id: ProcessId) {
    let exchange = node.registry.processes.get(&id).and_then(|process| {
        let place = |uuid: &str| {
            let at = node.gpus.samples.iter().position(|gpu| gpu.uuid == uuid)?;
            u8::try_from(at).ok()
        };
        // The order to restore names a GPU by its position in the list of all GPUs, so each GPU
        // must be in it.
        let listed =
            node.gpus.samples.len() <= MAX_GPUS && node.gpus.samples.iter().all(can_be_named);
        let (from, to) = (single_gpu_of(process).filter(|_| listed)?, process.memory.target_gpu()?);
        Some((place(from)?, place(to)?, from.to_owned(), to.to_owned()))
    });
    let Some((from, to, was, will)) = exchange else {
        grants::abort_grant(node, key);
        node.journal(key, JournalStep::Checkpoint);
        grants::enqueue(node, key);
        return;
    };
    let total = node.gpus.samples.len() as u8;
    let all: Vec<Gpu> = node.gpus.samples.iter().filter_map(named).collect();
    for (n, part) in all.chunks(GPUS_PER_FRAME).enumerate() {
        let mut gpus = [Gpu::default(); GPUS_PER_FRAME];
        gpus.iter_mut().zip(part).for_each(|(place, gpu)| *place = *gpu);
        let first = (n * GPUS_PER_FRAME) as u8;
        let message = ControllerMessage::Gpus { first, total, gpus };
        node.output.effects.push(Effect::Send(id, message));
    }
    node.order(id, Action::RestoreOnGpu { from, to });
    let pid = node.registry.processes.get(&id).map_or(0, |process| process.identity.pid);
    let text = format!("process {pid} is restored on {will}, because {was} is full");
    node.publish(key, NodeEvent::new(EventKind::Process, text));
}

/// The GPU from which a process was offloaded. `None`: the process was on several GPUs, or cannot
/// be restored on another GPU.
fn single_gpu_of(process: &Process) -> Option<&str> {
    let able = process
        .activity
        .counters
        .as_ref()
        .is_some_and(|page| page.notes.intersects(ProcessFlags::MOVABLE));
    let off = process.agent.phase == Phase::Checkpointed
        && process.agent.connected
        && process.pending.is_none();
    match process.memory.offloaded_vram() {
        Some([on]) if able && off && !process.failed_moves.migration => Some(&on.uuid),
        _ => None,
    }
}

fn is_like(own: &GpuSample, other: &GpuSample) -> bool {
    let kind = |gpu: &GpuSample| (gpu.name.clone(), gpu.total_bytes);
    other.uuid != own.uuid && !own.name.is_empty() && kind(own) == kind(other)
}

/// Whether the order to restore can name this GPU. The order lists all GPUs by UUID and device
/// file. A GPU in MIG mode, or without a device file, cannot be in that list.
fn can_be_named(gpu: &GpuSample) -> bool {
    !gpu.mig && named(gpu).is_some()
}

fn named(gpu: &GpuSample) -> Option<Gpu> {
    Some(Gpu { uuid: uuid_bytes(&gpu.uuid)?, minor: gpu.minor? })
}
