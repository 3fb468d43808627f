//! The steps of an offload: read host memory and GPUs (the survey), close the gates, lock, read
//! again, then copy out or checkpoint. If a step fails, the completed steps are undone.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Capabilities, Phase,
        message::{Action, CopyOptions},
    },
};

use super::{
    JournalStep, Key, ProcessId,
    container::{Goal, Offload},
    copier_use, early_release,
    eligibility::Refusal,
    grants, holds,
    host_promises::{self, HostVerdict},
    input::{Request, Survey},
    measurements,
    node_state::NodeState,
    offload_check, offload_level,
    plan::{self, OffloadMethod, OffloadPlan, OffloadStep, ProcessPosition},
    prefault, prefault_host_pool,
    process::{OffloadedMemory, Process},
};

/// Begins an offload with a survey of host memory and GPUs. No process is changed before the
/// survey shows that the offload can succeed.
pub(super) fn begin_offload(node: &mut NodeState, key: &Key, why: Reason, offload: Offload) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(key) else {
        return;
    };
    container.goal = Goal::OffloadRequested(Offload { requested_at: Some(now), ..offload });
    let in_vain = container.prewake.take().map(|prewake| prewake.why);
    container.usage.prewake_missed = in_vain == Some(Reason::Expected);
    container.cause = why;
    container.shown.reason = (why, String::new());
    if let Some(by) = in_vain {
        node.publish_prewake(key, by, false);
    }
    // End the grant, because it is for an allocation only: once offloaded, the container needs
    // VRAM for its restore too.
    grants::end_alloc_grant(node, key);
    node.admission.queue.leave(key);
    // A container without memory to copy is offloaded only if an operator or a waiter requests
    // it. The offload then checkpoints its context.
    let is_void =
        offload_level::has_second_level(node, key) && offload_level::has_nothing_to_copy(node, key);
    let container = node.registry.containers.get_mut(key);
    if let Some(offload) = container.and_then(|c| c.goal.offload_mut()) {
        offload.evict_context |= is_void;
    }
    host_promises::survey(node, key);
}

pub(super) fn surveyed(node: &mut NodeState, key: &Key, survey: Survey) {
    let Some(container) = node.registry.containers.get_mut(key) else {
        return;
    };
    // If no survey is pending, the container's processes have ended since the survey was
    // requested.
    let Some(asked_at) = container.survey_asked.take() else { return };
    let cause = container.cause;
    let verdict = match survey.gpus {
        Ok(gpus) => {
            measurements::take_survey(node, key, &gpus);
            survey.host.and_then(|pools| check_vram(node, key).map(|()| pools))
        }
        Err(error) => Err((Reason::VramUnknown, error)),
    };
    // The offload was given up while host memory and GPUs were read.
    let Some(container) = node.registry.containers.get(key).filter(|c| !c.goal.is_resident())
    else {
        if let Ok(memory) = verdict {
            prefault_host_pool::surveyed(node, key, memory, asked_at);
        }
        return node.resume(key);
    };
    let is_requested = container.goal.is_requested();
    let verdict = match verdict {
        Ok(pools) => host_promises::promise_host_memory(node, key, pools, asked_at),
        Err((reason, detail)) => HostVerdict::Refused(reason, detail),
    };
    match verdict {
        HostVerdict::Refused(reason, detail) => fail_offload(node, key, reason, &detail),
        // The next tick repeats the survey. A call of `advance` here would repeat the survey at
        // once, in a loop.
        HostVerdict::Waits(reason, detail) => {
            if let Some(container) = node.registry.containers.get_mut(key) {
                container.shown.reason = (reason, detail);
            }
        }
        HostVerdict::Promised if is_requested => {
            if let Some(container) = node.registry.containers.get_mut(key) {
                container.goal.proceed();
            }
            // A process that started while the container was offloaded has paused its
            // allocations until its siblings are restored. Its gate closes next, and a gate
            // does not close during a pause.
            holds::release_siblings(node, key);
            node.set_state(key, State::Closing, cause, "", 0, 0);
            node.resume(key);
        }
        HostVerdict::Promised => {
            if let OffloadPlan::Run(step, processes) =
                plan::plan_offload(&node.positions(key), offload_level::deadlines(node, key))
            {
                for process in processes {
                    run_offload_step(node, key, process, step);
                }
            }
            node.resume(key);
        }
    }
}

/// Checks that NVML shows the VRAM of every process and that there is VRAM to offload. If the VRAM
/// of a process were unknown, so would be the VRAM that its restore needs. `Err`: the reason to
/// refuse the offload.
fn check_vram(node: &NodeState, key: &Key) -> Result<(), Refusal> {
    if let Some(error) = offload_check::vram_error(node, key) {
        return Err((Reason::VramUnknown, error.to_owned()));
    }
    let unseen = |p: &Process| {
        let claims = p.activity.counters.as_ref().is_some_and(|page| page.allocated_bytes > 0);
        !p.agent.phase.is_offloaded() && p.memory.vram.is_empty() && claims
    };
    if let Some((_, p)) = node.registry.processes.of(key).find(|(_, p)| unseen(p)) {
        let text = format!(
            "NVML reports no VRAM of process {}, but Affinode's library in the process counts allocations",
            p.identity.pid
        );
        return Err((Reason::NoVram, text));
    }
    // Before this reading of the GPUs, the GPU of the process may have been unknown.
    if let Some(gpu) =
        node.registry.processes.of(key).find_map(|(_, p)| offload_check::cut_gpu_of(node, p))
    {
        return Err((Reason::Mig, format!("GPU {gpu}")));
    }
    let has_memory = |p: &Process| p.vram_bytes() > 0 || p.agent.phase.is_offloaded();
    match node.registry.processes.of(key).any(|(_, p)| has_memory(p)) {
        true => Ok(()),
        false => Err((Reason::NoVram, String::new())),
    }
}

/// Runs one step of the offload for a process. Before this step, the gates of all processes of the
/// container were closed and host memory was promised. First records the VRAM that the process's
/// restore will need.
pub(super) fn run_offload_step(node: &mut NodeState, key: &Key, id: ProcessId, step: OffloadStep) {
    node.set_state(key, State::Offloading, node.cause(key), "", 0, 0);
    let Some(process) = node.registry.processes.get_mut(&id) else {
        return;
    };
    if process.agent.phase != Phase::CopiedOut || process.memory.offloaded.is_none() {
        let mut vram = process.memory.vram.clone();
        // NVML may count the process's memory for a copier at this moment. The process has at
        // least as much VRAM as its agent can copy.
        if let [all] = vram.as_mut_slice() {
            let total = node.gpus.samples.iter().find(|gpu| gpu.uuid == all.uuid);
            let swappable =
                process.memory.swap.swappable_bytes.min(total.map_or(0, |gpu| gpu.total_bytes));
            all.bytes = all.bytes.max(swappable);
        }
        process.memory.offloaded = Some(OffloadedMemory::of(vram));
    }
    let offloaded = process.memory.offloaded_vram().unwrap_or_default();
    let vram_bytes = offloaded.iter().map(|d| d.bytes).max().unwrap_or(0);
    node.host_ledger.begin_move(key);
    // The journal must be on disk before the order is sent: if the controller ends now, the
    // next one must know how much VRAM this process needs.
    node.journal(key, JournalStep::Checkpoint);
    if step == OffloadStep::CopyOut {
        copier_use::attach_for_offload(node, id);
    }
    node.order(
        id,
        match step {
            OffloadStep::CopyOut => {
                Action::CopyOut { vram_bytes, how: copy_options(node, key, id) }
            }
            OffloadStep::Checkpoint => Action::Checkpoint { vram_bytes },
        },
    );
}

/// Returns the options of a copy out that the policy requests and the library supports.
fn copy_options(node: &NodeState, key: &Key, id: ProcessId) -> CopyOptions {
    let (Some(container), Some(process)) =
        (node.registry.containers.get(key), node.registry.processes.get(&id))
    else {
        return CopyOptions::default();
    };
    let copies_both = offload_level::moves(node, key)(process) == OffloadMethod::CopyAndCheckpoint;
    CopyOptions {
        keep: container.policy.retain_host_copy && process.can(Capabilities::RETAINS_HOST_COPY),
        // A copier needs VRAM for its copy, so the copier may copy only while no grant exists.
        then_checkpoint: !node.admission.has_active_grant()
            && process.prefault.ordered
            && copies_both
            && process.can(Capabilities::PREFAULTS),
        check: container.policy.checksum && process.can(Capabilities::CHECKS),
        host_pool: node.host_ledger.uses_host_pool(key)
            && process.can(Capabilities::USES_HOST_POOL),
        release_early: early_release::is_useful(node, key, process),
    }
}

pub(super) fn advance_offload(node: &mut NodeState, key: &Key, positions: &[ProcessPosition]) {
    match plan::plan_offload(positions, offload_level::deadlines(node, key)) {
        OffloadPlan::Wait => {}
        OffloadPlan::Send(orders) => {
            for (process, action) in orders {
                node.order(process, action);
            }
        }
        OffloadPlan::Run(..) => host_promises::survey(node, key),
        OffloadPlan::Done => finish_offload(node, key),
    }
}

pub(super) fn finish_offload(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    let bytes = node.offloaded_bytes(key);
    let Some(container) = node.registry.containers.get_mut(key) else {
        return;
    };
    if container.shown.state == State::Offloaded {
        return;
    }
    let offload = container.goal.offload_mut();
    let began = offload.and_then(|offload| {
        offload.forced = false;
        offload.began.take()
    });
    let elapsed = began.map_or(0, |began| now.saturating_sub(began));
    if began.is_some() {
        container.figures.offloaded(elapsed);
        container.offload_failures.clear();
    }
    container.connections.restart();
    let cause = container.cause;
    node.set_state(key, State::Offloaded, cause, "", bytes, elapsed);
    node.answer(key, Request::Offload, true, bytes, elapsed);
    let wanted = node.alloc_wait_of(key).map(|_| Reason::AllocationWaits);
    let Some(container) = node.registry.containers.get_mut(key) else { return };
    let called = container.wake_began.map(|_| Reason::Called);
    let asked = container.commands.iter().find(|(_, request)| *request == Request::Restore);
    // The container was already waiting for its restore when its context was evicted. It
    // continues to wait.
    if let Some(cause) = wanted.or(called).or(asked.map(|_| Reason::Requested)) {
        container.goal.become_resident();
        container.cause = cause;
        node.resume(key);
    }
}

/// Cancels an offload because a process of the container exits. This does not count as a failure.
pub(super) fn turn_back(node: &mut NodeState, key: &Key) {
    let Some(container) = node.registry.containers.get_mut(key).filter(|c| !c.goal.is_resident())
    else {
        return;
    };
    container.goal.become_resident();
    container.cause = Reason::NotRegistered;
    container.shown.reason =
        (Reason::NotRegistered, "a process of the container is exiting".into());
    node.answer(key, Request::Offload, false, 0, 0);
}

/// Cancels an offload after a failure, counts the failure, and undoes the completed steps.
///
/// If the memory is already copied out and only the checkpoint of the contexts failed, the
/// container stays copied out if a waiter needs the contexts' VRAM, or if host memory was short. A
/// restore would take VRAM from the waiter that needs the contexts' VRAM.
pub(super) fn fail_offload(node: &mut NodeState, key: &Key, reason: Reason, detail: &str) {
    let now = node.clock.now;
    let is_out = node
        .registry
        .processes
        .of(key)
        .all(|(_, p)| p.agent.phase.is_offloaded() && !p.is_partly_out());
    let Some(container) = node.registry.containers.get_mut(key) else {
        return;
    };
    // Only the contexts are left to evict: the offload ends without them.
    if let Goal::Offloaded(offload) = &mut container.goal
        && is_out
        && reason.is_host_shortage()
        && !offload.evict_context
        && !offload.keeps_context
        && container.wake_began.is_none()
    {
        offload.keeps_context = true;
        return node.resume(key);
    }
    let forced = container.goal.is_forced();
    if is_out && container.goal.evicts_context() && container.wake_began.is_none() {
        container.goal = Goal::Offloaded(Offload { keeps_context: true, ..Offload::default() });
    } else {
        container.goal.become_resident();
    }
    container.cause = reason;
    container.shown.reason = (reason, detail.to_owned());
    container.offload_failures.has_stayed(now, reason, forced);
    container.offload_failures.count(now, container.policy.idle_timeout_ms, reason);
    let is_asked = container.commands.iter().any(|(_, request)| *request == Request::Offload);
    let is_repeated = reason.is_host_shortage() && container.offload_failures.short_in_a_row > 1;
    prefault::prefault_failed(node, key);
    // Attempts that lack host memory follow each other closely, so only the first is reported.
    if is_asked || !is_repeated {
        node.publish_refusal(key, reason, detail);
    }
    node.answer(key, Request::Offload, false, 0, 0);
    node.resume(key);
}

/// Evicts a container, because another container waits for its VRAM.
pub(super) fn evict(node: &mut NodeState, victim: &Key, mut offload: Offload) {
    if offload_check::may_evict_context(node, victim) {
        // The container is copied out already. The same offload continues and checkpoints its
        // context. It was counted and timed when the copy out ended.
        offload.began = None;
        offload.evict_context = true;
    }
    begin_offload(node, victim, Reason::Pressure, offload);
}
