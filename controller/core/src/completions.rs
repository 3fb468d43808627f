//! Handles the reports of agents on the controller's orders, and orders whose report is late. An
//! agent is the thread of Affinode's library in a CUDA process.
//!
//! A report contains the phase in which the agent left the process, such as `CopiedOut`. The
//! controller records this phase first, whatever the outcome of the order is. The outcome then
//! decides whether the offload or restore continues, is given up, or is tried again.

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    wire::{Phase, message::Action},
};

use super::{
    DeviceBytes, JournalStep, Key, Millis, ProcessId,
    container::{Container, IncompleteRestore},
    event::NodeEvent,
    grants, holds, host_pool, host_promises, measurements,
    node_state::NodeState,
    offload,
    order_report::{OrderReport, ReportRecord, ReportVerdict},
    process::subtract_vram,
    registration::NEVER_MOVED,
    restore,
};

/// Grace period after the deadline of an order to close the gate or to lock the process. If the
/// agent has not reported by then, the controller gives up the offload.
const LATE_MS: Millis = 5_000;
/// Time after which an order without a deadline is shown to users as slow. The controller never
/// interrupts the driver call that the order caused.
pub(super) const SLOW_MS: Millis = 60_000;

/// Handles an agent's report on an order.
pub(super) fn report(node: &mut NodeState, id: ProcessId, report: OrderReport) {
    // Orders to pause allocations are not in `pending`: they serve a grant, and a process may
    // have such an order and an order of a move at the same time.
    if holds::hold_reported(node, id, report.order, report.outcome) {
        return;
    }
    let Some(process) = node.registry.processes.get_mut(&id) else {
        return;
    };
    let Some(pending) = process.pending.filter(|pending| pending.order == report.order) else {
        return;
    };
    let record = report.record(process, pending);
    let key = process.key.clone();
    if record.is_false {
        let pid = process.identity.pid;
        measurements::bad_page(node, id, NEVER_MOVED.into());
        offload::fail_offload(node, &key, Reason::BadPeer, &format!("process {pid}"));
        return node.resume(&key);
    }
    let phase = record.phase;
    count_moved_vram(node, id, pending.action, record);
    act_on_report(node, &key, id, &report, pending.action, phase);
    node.resume(&key);
}

/// Updates the recorded VRAM of a process after an offload or a restore. Until the next NVML
/// sample, evictions are decided by this record.
fn count_moved_vram(node: &mut NodeState, id: ProcessId, action: Action, record: ReportRecord) {
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    if record.phase == Phase::Checkpointed {
        node.gpus.freed_since_sample.append(&mut process.memory.vram);
    } else if record.phase == Phase::CopiedOut
        && let (Some(all), Some(gone)) =
            (process.memory.offloaded_vram(), process.vram_to_restore())
    {
        // Until the next NVML sample, the process's VRAM is the memory that was not copied.
        process.memory.vram = subtract_vram(all, &gone);
        node.gpus.freed_since_sample.extend(gone);
    } else if action.is_restore() {
        // Until the next NVML sample, the process's VRAM is the restored VRAM.
        process.memory.vram =
            process.memory.offloaded_vram().map(<[DeviceBytes]>::to_vec).unwrap_or_default();
        if record.was_copied_out {
            process.memory.set_offloaded_vram(record.was_to_restore);
        }
    }
}

fn act_on_report(
    node: &mut NodeState,
    key: &Key,
    id: ProcessId,
    report: &OrderReport,
    action: Action,
    phase: Phase,
) {
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    let pid = process.identity.pid;
    match report.verdict(process, action, phase) {
        ReportVerdict::Done => restore::end_incomplete_restore(node, key),
        // The process or this controller was stopped for some time. Other processes may have
        // ended their pauses meanwhile, so the VRAM must be proven free again.
        ReportVerdict::Late => restore::restore_incomplete(node, key, IncompleteRestore::Late),
        ReportVerdict::Exiting => offload::turn_back(node, key),
        // The container waits for VRAM of its own GPU.
        ReportVerdict::MigrationFailed(why) => {
            grants::abort_grant(node, key);
            node.journal(key, JournalStep::Checkpoint);
            let text = format!("process {pid} cannot be restored on another GPU: {why}");
            node.publish(key, NodeEvent::new(EventKind::Process, text));
        }
        ReportVerdict::OffloadFailed(reason, detail, mark) => {
            mark.set(process);
            offload::fail_offload(node, key, reason, &detail);
        }
        ReportVerdict::NoHostMemory => {
            let (reason, detail) = host_promises::host_shortage(node, key, pid);
            let short = node.host_ledger.short_pool(key).cloned();
            if let Some(container) = node.registry.containers.get_mut(key) {
                container.short_of = short.into_iter().collect();
            }
            if node.host_ledger.uses_host_pool(key) {
                host_pool::has_failed(node, key);
            }
            offload::fail_offload(node, key, reason, &detail);
        }
        // The container stays resident already, unless another offload has been requested
        // meanwhile or the process was never told to cancel.
        ReportVerdict::GivenUp => {
            let container = node.registry.containers.get(key);
            if container.is_some_and(|container| !container.goal.is_resident()) {
                let detail = format!("process {pid} has cancelled its copy");
                offload::fail_offload(node, key, Reason::Busy, &detail);
            }
        }
        ReportVerdict::RestoreIncomplete(why) => {
            restore::restore_incomplete(node, key, IncompleteRestore::NoVram(why));
        }
        ReportVerdict::RestoreFailed(why) => restore::restore_failed(node, key, &why),
        ReportVerdict::OrderFailed(why) => {
            let event = NodeEvent::new(EventKind::Refused, why);
            node.publish(key, event.because(Reason::DriverError));
        }
    }
}

/// Handles orders whose report is late. If an order to close the gate or to lock is late, the
/// controller gives up the offload. If an order that runs a driver call is late, the order is only
/// shown to users as slow.
pub(super) fn check_overdue(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    let late = node.registry.processes.of(key).find_map(|(_, p)| {
        let pending = p.pending?;
        let (limit, gives_up) = match pending.action {
            Action::Close { deadline_ms } => (Millis::from(deadline_ms) + LATE_MS, true),
            Action::Lock { timeout_ms } => (Millis::from(timeout_ms) + LATE_MS, true),
            _ => (SLOW_MS, false),
        };
        (now.saturating_sub(pending.since) > limit).then_some((p.identity.pid, gives_up))
    });
    let Some((pid, gives_up)) = late else { return };
    let out = node.registry.containers.get(key).is_some_and(|c: &Container| c.goal.is_offloaded());
    if gives_up && out {
        offload::fail_offload(node, key, Reason::AgentSilent, &format!("process {pid}"));
    } else if let Some(container) = node.registry.containers.get_mut(key) {
        container.shown.reason = (Reason::AgentSilent, format!("process {pid}"));
    }
}
