//! The steps of a restore: a wake, a wait in the queue, and the restores of the processes under a
//! grant. Then each process is unlocked and its gate is opened.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Phase,
        message::{Action, ControllerMessage},
    },
};

use super::{
    Effect, JournalStep, Key, Millis, ProcessId,
    container::{Goal, IncompleteRestore},
    copier_use, early_release,
    grant::Grant,
    grants, holds, host_relief,
    input::Request,
    migration,
    node_state::NodeState,
    oom_wait,
    plan::{self, ProcessPosition},
    process::Process,
    requests,
};

/// Handles a wake: the report of an agent that a CUDA call waits at the gate of its process.
/// Returns whether the controller must acknowledge the report.
pub(super) fn wake(node: &mut NodeState, id: ProcessId, generation: u64) -> bool {
    let Some(process) = node.registry.processes.get_mut(&id) else {
        return false;
    };
    if process.agent.phase == Phase::Open && process.pending.is_none() {
        // The gate of the process is open. If its allocations are paused for another container,
        // the acknowledgement shows its agent that the controller still runs. If they are not
        // paused, the gate has opened since the wake was sent.
        return process.holds.count > 0;
    }
    process.agent.generation = generation;
    let key = process.key.clone();
    called(node, &key)
}

/// Handles a CUDA call that waits at the gate of a process of this container. Gives up an offload
/// in progress, and requests the restore of an offloaded container. False: the container does not
/// exist.
pub(super) fn called(node: &mut NodeState, key: &Key) -> bool {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(key) else {
        return false;
    };
    if container.wake_began.is_none() {
        container.wake_began = Some(now);
        container.left_early(now);
        container.offload_failures.short_in_a_row = 0;
        container.usage.hint = None;
        let pause = container.pause_ends(now, &mut node.prediction.pauses);
        container.usage.history.returned(pause);
        container.usage.prewake_missed = false;
        container.connections.used(now);
    }
    container.usage.last_use = now;
    let forced = container.goal.is_forced() && container.shown.state != State::Offloaded;
    // If the container is queued already, its context is being evicted for an earlier waiter.
    // Repeated wakes must not end that eviction.
    let gives_up_context = container.shown.state == State::Queued;
    if !container.goal.is_resident() && !forced && !gives_up_context {
        let meanwhile = container.shown.state != State::Offloaded;
        container.goal.become_resident();
        container.cause = if meanwhile { Reason::WokenMeanwhile } else { Reason::Called };
        container.shown.reason = (container.cause, String::new());
        if meanwhile {
            node.answer(key, Request::Offload, false, 0, 0);
        }
        node.resume(key);
    }
    true
}

/// Informs an agent that its wake was received, and at which position its container is in the
/// queue.
pub(super) fn acknowledge_wake(node: &mut NodeState, id: ProcessId, generation: u64) {
    let Some(process) = node.registry.processes.get(&id) else { return };
    let is_open = process.agent.phase == Phase::Open && process.pending.is_none();
    let place = node.admission.queue.position(&process.key, node.clock.now).filter(|_| !is_open);
    let position = place.unwrap_or(0);
    let position = u32::try_from(position).unwrap_or(u32::MAX);
    node.output.effects.push(Effect::Send(id, ControllerMessage::WakeAck { generation, position }));
}

/// Sends a process the order to restore, on its own GPU or on the target GPU of a migration.
fn send_restore(node: &mut NodeState, key: &Key, id: ProcessId) {
    let process = node.registry.processes.get(&id);
    if process.is_some_and(|process| process.memory.target_gpu().is_some()) {
        return migration::send_restore(node, key, id);
    }
    let awaits_vram = node.admission.grants.get(key).is_some_and(|grant| grant.awaits_vram);
    node.order(id, if awaits_vram { Action::RestoreAsFreed } else { Action::Restore });
    copier_use::fill_memory(node, id);
}

pub(super) fn advance_restore(node: &mut NodeState, key: &Key, positions: &[ProcessPosition]) {
    let lost = node.registry.containers.get(key).is_some_and(|c| c.shown.state == State::Lost);
    // A process that waits for its siblings pauses its allocations. If an offload was given up,
    // this pause has ended and must begin again.
    let open = positions.iter().filter(|p| p.phase == Phase::Open && !p.occupied && !lost);
    open.for_each(|p| holds::hold_for_siblings(node, p.process));
    let plan = plan::plan_restore(positions, lost);
    for (process, action) in plan.send {
        node.order(process, action);
    }
    if plan.done {
        finish_restore(node, key);
    } else if !plan.restore.is_empty() {
        let grant = node.admission.grants.get(key);
        let granted = grant.is_some_and(Grant::is_granted);
        let covered = |g: &Grant| plan.restore.iter().all(|id| g.covers.contains(id));
        // Only a process that is copied out can wait for VRAM.
        let is_copied_out = |id: &ProcessId| {
            let process = node.registry.processes.get(id);
            process.is_some_and(|process| process.agent.phase == Phase::CopiedOut)
        };
        let can_wait = |g: &Grant| !g.awaits_vram || plan.restore.iter().all(is_copied_out);
        let proven = grant.is_some_and(|g| covered(g) && can_wait(g) && !g.doubted);
        if granted && !proven {
            // The proof is in doubt or does not cover a process, which registered later or is not in
            // the phase in which it was then.
            grants::abort_grant(node, key);
            grants::enqueue(node, key);
        } else if granted {
            let container = node.registry.containers.get_mut(key);
            if let Some(restore) = container.and_then(|c| c.goal.restore_mut()) {
                restore.began.get_or_insert(node.clock.now);
            }
            node.set_state(key, State::Restoring, node.cause(key), "", 0, 0);
            // The journal must be on disk before the order: if the controller ends now, the
            // next one must count this VRAM as promised.
            node.journal(key, JournalStep::Restore);
            for process in plan.restore {
                send_restore(node, key, process);
            }
        } else if !node.admission.grants.contains_key(key) {
            grants::enqueue(node, key);
        }
    }
}

/// Completes a restore after the gate of every process is open.
pub(super) fn finish_restore(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(key) else {
        return;
    };
    if matches!(container.shown.state, State::Active | State::Idle | State::Unregistered) {
        // The container was about to be offloaded, and stays resident. It needs no VRAM, so a
        // grant for its restore ends.
        let only_restores =
            node.admission.grants.get(key).is_some_and(|grant| grant.want.is_none());
        if only_restores {
            grants::close_grant(node, key);
        }
        forget_offload(node, key);
        oom_wait::serve_alloc_wait(node, key);
        return;
    }
    let restore_began = container.goal.restore_mut().and_then(|restore| restore.began);
    container.goal = Goal::default();
    let mut became_resident = false;
    let was_offloaded = node.registry.processes.of(key).any(|(_, p)| p.memory.offloaded.is_some());
    let bytes: u64 = node.registry.processes.of(key).map(|(_, p)| p.offloaded_vram_bytes()).sum();
    let since = |began: Option<Millis>| began.map_or(0, |began| now.saturating_sub(began));
    let elapsed = since(container.wake_began.take());
    let restore_ms = since(restore_began);
    if !matches!(container.cause, Reason::Expected | Reason::Connection | Reason::FreesHostMemory) {
        container.usage.last_use = now;
    }
    container.restore_failures.in_a_row = 0;
    if was_offloaded
        && matches!(
            container.shown.state,
            State::Restoring | State::Queued | State::Lost | State::Offloaded
        )
    {
        container.figures.restored(now, elapsed, restore_ms);
        became_resident = true;
        container.shown.reason = (container.cause, String::new());
    }
    let (reason, detail) = container.shown.reason.clone();
    let members = node.members(key);
    host_relief::permit_refused_offloads(node, &members);
    for id in members {
        if let Some(process) = node.registry.processes.get_mut(&id) {
            process.memory.offloaded = None;
            process.activity.resident_since =
                if became_resident { now } else { process.activity.resident_since };
        }
    }
    holds::release_siblings(node, key);
    if !oom_wait::serve_alloc_wait(node, key) {
        grants::close_grant(node, key);
        node.admission.queue.leave(key);
        oom_wait::queue_alloc_wait(node, key);
    }
    node.clear_journal(key);
    node.set_state(key, State::Active, reason, &detail, bytes, elapsed);
    node.answer(key, Request::Restore, true, bytes, elapsed.max(restore_ms));
    requests::resume_offload_request(node, key);
}

/// Forgets what was recorded for the restore of a container that is resident without one: a call
/// that waited for its gates, and the offload of a process that has restored itself.
fn forget_offload(node: &mut NodeState, key: &Key) {
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.wake_began = None;
    }
    let is_recorded = node.registry.processes.of(key).any(|(_, p)| p.memory.offloaded.is_some());
    if is_recorded {
        for id in node.members(key) {
            if let Some(process) = node.registry.processes.get_mut(&id) {
                process.memory.offloaded = None;
            }
        }
        node.clear_journal(key);
    }
}

/// Handles the report of a process that was not restored as ordered. The grant stays while other
/// processes of the container are being restored, because they allocate the promised VRAM.
pub(super) fn restore_incomplete(node: &mut NodeState, key: &Key, why: IncompleteRestore) {
    let container = node.registry.containers.get_mut(key);
    if let Some(restore) = container.and_then(|c| c.goal.restore_mut()) {
        restore.incomplete = Some(why);
    }
    end_incomplete_restore(node, key);
}

/// Ends the grant of an incomplete restore once no process of the container is being restored.
pub(super) fn end_incomplete_restore(node: &mut NodeState, key: &Key) {
    let restores = |p: &Process| p.pending.is_some_and(|order| order.action.is_restore());
    if node.registry.processes.of(key).any(|(_, p)| p.agent.connected && restores(p)) {
        return;
    }
    let restore = node.registry.containers.get_mut(key).and_then(|c| c.goal.restore_mut());
    match restore.and_then(|restore| restore.incomplete.take()) {
        None => {}
        Some(IncompleteRestore::Late) => grants::abort_grant(node, key),
        Some(IncompleteRestore::NoVram(detail)) => copy_in_failed(node, key, &detail),
    }
}

/// Handles a copy back into VRAM that found too little free VRAM. The host copy is still complete,
/// so the container waits in the queue again.
fn copy_in_failed(node: &mut NodeState, key: &Key, detail: &str) {
    const AGAIN_MS: Millis = 500;
    if node.admission.grants.get(key).is_some_and(|grant| grant.awaits_vram) {
        early_release::has_failed(node);
    }
    grants::end_grant(node, key);
    node.admission.ledger.release(key);
    node.admission.queue.leave(key);
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.restore_failures.not_before =
            container.restore_failures.not_before.max(node.clock.now + AGAIN_MS);
    }
    node.set_state(key, State::Queued, Reason::WaitingForVram, detail, 0, 0);
}

/// Handles a restore that the driver refused. The controller tries it again every 10 s. It may
/// never succeed, but an attempt does no harm.
pub(super) fn restore_failed(node: &mut NodeState, key: &Key, detail: &str) {
    const AGAIN_MS: Millis = 10_000;
    grants::end_grant(node, key);
    node.admission.ledger.release(key);
    node.admission.queue.leave(key);
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.restore_failures.not_before = node.clock.now + AGAIN_MS;
    }
    holds::release_siblings(node, key);
    node.set_state(key, State::Lost, Reason::DriverLost, detail, 0, 0);
    node.answer(key, Request::Restore, false, 0, 0);
    node.answer(key, Request::Offload, false, 0, 0);
}
