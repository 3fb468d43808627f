//! Handles periodic readings: the counters of processes, and the memory and utilisation of GPUs.

use std::collections::BTreeMap;

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    state::State,
    wire::{Hazards, Phase, ProcessFlags, counters::CounterSnapshot},
};

use super::{
    DeviceBytes, Key, ProcessId, early_release,
    event::NodeEvent,
    host_promises, idle,
    input::GpuSample,
    node_state::{ForeignVram, NodeState},
    texts::{damaged_text, hidden_text, ipc_refused_text},
};

/// Records hazards of a process. A hazard stays recorded until the process ends.
pub(super) fn learn_hazards(node: &mut NodeState, id: ProcessId, hazards: Hazards) {
    let Some(process) = node.registry.processes.get_mut_uncounted(&id) else { return };
    let is_damaged = |hazards: Hazards| hazards.intersects(Hazards::DAMAGED_MEMORY);
    let is_news = is_damaged(hazards) && !is_damaged(process.agent.hazards);
    let is_hidden = |hazards: Hazards| hazards.intersects(Hazards::HIDDEN_WAY);
    let is_hidden_news = is_hidden(hazards) && !is_hidden(process.agent.hazards);
    process.agent.hazards.0 |= hazards.0;
    if !is_news && !is_hidden_news {
        return;
    }
    let (key, pid) = (process.key.clone(), process.identity.pid);
    if is_hidden_news {
        let event = NodeEvent::new(EventKind::HiddenWay, hidden_text(pid));
        node.publish(&key, event.because(Reason::HiddenWay));
    }
    if is_news {
        let event = NodeEvent::new(EventKind::Damaged, damaged_text(pid));
        node.publish(&key, event.because(Reason::DamagedMemory));
    }
}

pub(super) fn page(node: &mut NodeState, id: ProcessId, page: CounterSnapshot) {
    learn_hazards(node, id, page.hazards);
    let now = node.clock.now;
    let Some(process) = node.registry.processes.get_mut_uncounted(&id) else {
        return;
    };
    let older = process.activity.counters.as_ref();
    let moved = idle::moved(older, &page);
    let progressed = older.is_none_or(|older| older.calls != page.calls);
    let process_was_free =
        process.activity.counters.as_ref().is_some_and(|older| older.inflight == 0);
    let ipc_refused = |page: &CounterSnapshot| page.notes.intersects(ProcessFlags::IPC_REFUSED);
    let news = ipc_refused(&page) && !process.activity.counters.as_ref().is_some_and(ipc_refused);
    process.memory.swap.swappable_bytes = page.swappable_bytes;
    // The agent's report of an incomplete copy may have gone to an earlier controller that has
    // ended. The counters show the incomplete copy too.
    let is_incomplete = process.agent.phase == Phase::Checkpointed
        && page.notes.intersects(ProcessFlags::EXPORTED_TO_COPIER);
    process.memory.set_copy_out_incomplete(is_incomplete);
    process.activity.set_counters(page);
    if !moved && !news {
        return;
    }
    let key = process.key.clone();
    if news {
        let text = ipc_refused_text(process.identity.pid);
        node.publish(&key, NodeEvent::new(EventKind::Process, text));
    }
    if !moved {
        return;
    }
    let Some(container) = node.registry.containers.get_mut(&key) else {
        return;
    };
    let pause =
        if process_was_free { container.pause_ends(now, &mut node.prediction.pauses) } else { 0 };
    container.usage.last_use = now;
    container.usage.last_called = now;
    if progressed {
        container.usage.last_progress = now;
    }
    container.usage.used(now);
    container.offload_failures.short_in_a_row = 0;
    container.connections.used(now);
    let ahead = container.prewake.take().map(|prewake| prewake.why);
    if let Some(by) = ahead {
        if by == Reason::Expected {
            container.usage.history.prewake_hit();
        }
        container.usage.history.returned(pause);
    }
    // The calls of a queued container wait for VRAM, also while its contexts are evicted.
    let is_queued = container.shown.state == State::Queued;
    if container.goal.is_requested() && container.gives_way_to_calls() && !is_queued {
        container.goal.become_resident();
    }
    let was_idle = container.shown.state == State::Idle;
    if let Some(by) = ahead {
        node.prediction.prewake_hits += 1;
        node.publish_prewake(&key, by, true);
    }
    if was_idle {
        node.set_state(&key, State::Active, Reason::Called, "", 0, 0);
    }
}

/// Ignores the counters of a process from now on, because they are invalid. Without them the
/// controller cannot see whether the process is idle, so the process stays resident. If it is
/// offloaded already, it is still restored.
pub(super) fn bad_page(node: &mut NodeState, id: ProcessId, why: String) {
    let Some(process) = node.registry.processes.get_mut(&id) else {
        return;
    };
    if process.activity.counter_error.is_some() {
        return;
    }
    process.activity.counter_error = Some(why.clone());
    let (key, pid) = (process.key.clone(), process.identity.pid);
    node.publish_refusal(&key, Reason::BadPeer, &format!("process {pid}: {why}"));
}

pub(super) fn gpus_read(node: &mut NodeState, gpus: Result<Vec<GpuSample>, String>) {
    match gpus {
        Ok(gpus) => {
            node.gpus.error = None;
            node.gpus.read_at = node.clock.now;
            take_gpus(node, gpus);
        }
        Err(error) => node.gpus.error = Some(error),
    }
}

/// Moves the GPUs that could not be read out of a reading, and records them. All other functions
/// therefore see only complete samples.
pub(super) fn take_unreadable(node: &mut NodeState, gpus: &mut Vec<GpuSample>) {
    node.gpus.unreadable = gpus.extract_if(.., |gpu| gpu.error.is_some()).collect();
}

/// Records the total and used memory of the GPUs. The recorded VRAM of each process does not
/// change. A GPU without a new sample loses its old one, which could otherwise prove free VRAM on a
/// GPU that has failed.
pub(super) fn take_memory(node: &mut NodeState, gpus: &[GpuSample]) {
    node.gpus.samples.retain(|known| gpus.iter().any(|gpu| gpu.uuid == known.uuid));
    node.gpus.freed_since_sample.retain(|left| gpus.iter().all(|gpu| gpu.uuid != left.uuid));
    for gpu in gpus {
        match node.gpus.samples.iter_mut().find(|known| known.uuid == gpu.uuid) {
            Some(known) => {
                (known.total_bytes, known.used_bytes) = (gpu.total_bytes, gpu.used_bytes);
                known.mig = gpu.mig;
            }
            None => node.gpus.samples.push(gpu.clone()),
        }
    }
}

/// Records the memory of GPUs and the VRAM of one container's processes.
pub(super) fn take_survey(node: &mut NodeState, key: &Key, gpus: &[GpuSample]) {
    node.gpus.error = None;
    take_memory(node, gpus);
    early_release::take_vram(node, gpus);
    for id in node.members(key) {
        let Some(process) = node.registry.processes.get_mut(&id) else { continue };
        let held = early_release::vram_in(gpus, process.identity.pid);
        process.memory.set_vram(held, &node.gpus.unreadable);
    }
}

/// VRAM of a sample that NVML attributes to no process.
fn unattributed(gpu: &GpuSample) -> ForeignVram {
    let attributed_bytes = gpu.processes.iter().map(|(_, bytes)| bytes).sum();
    let bytes = gpu.used_bytes.saturating_sub(attributed_bytes);
    ForeignVram { uuid: gpu.uuid.clone(), pid: None, bytes }
}

/// Records the memory of GPUs and the VRAM of all processes. A process that is not in the
/// sample has no VRAM, except on GPUs that could not be read.
pub(super) fn take_gpus(node: &mut NodeState, gpus: Vec<GpuSample>) {
    let mut by_pid: BTreeMap<u32, Vec<DeviceBytes>> = BTreeMap::new();
    for gpu in &gpus {
        for (pid, bytes) in &gpu.processes {
            let device = DeviceBytes { uuid: gpu.uuid.clone(), bytes: *bytes };
            by_pid.entry(*pid).or_default().push(device);
        }
    }
    for process in node.registry.processes.values_mut() {
        let held = by_pid.remove(&process.identity.pid).unwrap_or_default();
        process.memory.set_vram(held, &node.gpus.unreadable);
    }
    node.gpus.freed_since_sample.clear();
    let by_others =
        by_pid.into_iter().flat_map(|(pid, held)| held.into_iter().map(move |on| (pid, on)));
    node.gpus.foreign = by_others
        .map(|(pid, on)| ForeignVram { uuid: on.uuid, pid: Some(pid), bytes: on.bytes })
        .chain(gpus.iter().map(unattributed))
        .collect();
    node.gpus.samples = gpus;
    host_promises::take_gpus_of_unseen(node);
}
