//! Decides when processes use the copiers of their GPUs. A copier is a process of Affinode that
//! copies memory for other processes. This file also prevents copiers from allocating VRAM while
//! the controller proves that VRAM is free. The state of the copiers is in `copiers.rs`.

use affinode_proto::wire::{Capabilities, ProcessFlags, copier::CopierReport};

use super::{
    DeviceBytes, Effect, ProcessId, copiers::CopierId, dedup_domain, driver_limit, early_release,
    grant::Stage, needs, node_state::NodeState, offload_level, plan::OffloadMethod,
    process::Process,
};

/// Connects a process to the copier of its GPU if the offload will copy its memory out and then
/// checkpoint it.
pub(super) fn attach_for_offload(node: &mut NodeState, id: ProcessId) {
    if let Some((uuid, most_bytes)) = offloads_through_copier(node, id)
        && !node.copiers.was_attached_ahead(id, &uuid)
    {
        attach(node, id, &uuid, most_bytes, false);
    }
}

pub(super) fn attach(
    node: &mut NodeState,
    id: ProcessId,
    uuid: &str,
    most_bytes: u64,
    ahead: bool,
) -> bool {
    if !may_have_copier(node, uuid) {
        return false;
    }
    let domain = dedup_domain::domain_of(node, id);
    let process = (id, uuid);
    node.copiers.attach(
        node.clock.now,
        process,
        most_bytes,
        domain,
        ahead,
        &mut node.output.effects,
    )
}

/// Whether a process may use a copier on a GPU now. A new copier allocates VRAM. Therefore none is
/// started while a container waits for VRAM or VRAM is being proven free.
fn may_have_copier(node: &NodeState, uuid: &str) -> bool {
    node.settings.copiers && (node.is_settled() || node.copiers.has_ready(uuid))
}

/// Orders the copier to fill the memory of a process: to copy its content back into VRAM while the
/// driver restores the process.
pub(super) fn fill_memory(node: &mut NodeState, id: ProcessId) {
    let most_bytes = needs::offloaded_bytes_of(node, id);
    node.copiers.fill(node.clock.now, id, most_bytes, &mut node.output.effects);
}

pub(super) fn copier_reported(node: &mut NodeState, id: CopierId, report: CopierReport) {
    node.copiers.report(id, report);
}

pub(super) fn copier_ended(node: &mut NodeState, id: CopierId) {
    node.copiers.ended(node.clock.now, id, &mut node.output.effects);
}

pub(super) fn copier_exited(node: &mut NodeState, id: CopierId) {
    node.copiers.exited(node.clock.now, id, &mut node.output.effects);
}

/// Ends copiers on GPUs where a container waits for VRAM, and copiers that serve no process.
pub(super) fn keep_copiers(node: &mut NodeState) {
    let mut copiers = std::mem::take(&mut node.copiers);
    let leaves = |process| node.is_leaving(process);
    let mut effects = Vec::new();
    copiers.make_room(node.clock.now, &node.gpus.under_pressure, leaves, &mut effects);
    copiers.tick(node.clock.now, &mut effects);
    if !node.admission.has_active_grant() {
        copiers.hold(false, &mut effects);
    }
    node.output.effects.append(&mut effects);
    node.copiers = copiers;
}

/// Requests NVML's proof of free VRAM for each grant in the stage `AwaitingCopiers`, in which the
/// processes have paused their allocations. Requests no proof while a copier is starting or ending,
/// because the copier may allocate VRAM right after NVML is read. No other function requests
/// proofs.
pub(super) fn prove_when_copiers_rest(node: &mut NodeState) {
    let waits = |stage: &Stage| *stage == Stage::AwaitingCopiers;
    if !node.admission.grants.values().any(|grant| waits(&grant.stage)) {
        return;
    }
    // Registrations are paused first, so that no registration begins while the grants wait for
    // a starting copier.
    node.copiers.hold(true, &mut node.output.effects);
    if node.copiers.is_moving(node.clock.now) {
        return;
    }
    // The driver's own limits are lifted before the proof, so that they refuse no restore.
    driver_limit::update(node);
    let with_processes = early_release::is_in_progress(node);
    for (key, grant) in node.admission.grants.iter_mut().filter(|(_, grant)| waits(&grant.stage)) {
        node.admission.last_proof += 1;
        grant.stage = Stage::Proving(node.admission.last_proof);
        let (key, number) = (key.clone(), node.admission.last_proof);
        node.output.effects.push(Effect::Prove { key, number, with_processes });
    }
}

/// Returns the GPU of a process whose memory a copier can copy out, and the number of its swappable
/// bytes. `None` if the library cannot use a copier, or if the offload is not a copy out with a
/// checkpoint. Also `None` if the process has memory on several GPUs, or if its counters report
/// that no copier can restore it.
pub(super) fn offloads_through_copier(node: &NodeState, id: ProcessId) -> Option<(String, u64)> {
    let process = node.registry.processes.get(&id).filter(|p| p.can(Capabilities::USES_COPIER))?;
    for_copier(node, process, process.memory.offloaded_vram()?)
}

/// Like `offloads_through_copier`, returns the GPU and the swappable bytes of a process whose
/// memory a copier can copy out. Does not check the capabilities of the library. `held`: the VRAM
/// that the process has now, or had before its offload.
pub(super) fn for_copier(
    node: &NodeState,
    process: &Process,
    held: &[DeviceBytes],
) -> Option<(String, u64)> {
    let both =
        offload_level::moves(node, &process.key)(process) == OffloadMethod::CopyAndCheckpoint;
    let vain = process
        .activity
        .counters
        .as_ref()
        .is_some_and(|page| page.notes.intersects(ProcessFlags::NO_COPIER));
    match held {
        [on] if both && !vain => {
            Some((on.uuid.clone(), on.bytes.min(process.memory.swap.swappable_bytes)))
        }
        _ => None,
    }
}
