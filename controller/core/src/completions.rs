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
    JournalStep, Key, Millis, Node, ProcessId,
    container::{Container, IncompleteRestore},
    event::NodeEvent,
    order_report::{OrderReport, ReportRecord, ReportVerdict},
    process::subtract_vram,
    registration::NEVER_MOVED,
};

/// Time after the deadline of a close or lock order after which a missing report counts as late.
/// The offload is then given up.
const LATE_MS: Millis = 5_000;
/// Time after which an order without a deadline is shown as slow. The driver call that the order
/// caused is never interrupted.
pub(super) const SLOW_MS: Millis = 60_000;
impl Node {
    pub(super) fn report(&mut self, id: ProcessId, report: OrderReport) {
        // Orders to pause allocations are not in `pending`: they serve a grant, and a process may
        // have such an order and an order of a move at the same time.
        if self.hold_reported(id, report.order, report.outcome) {
            return;
        }
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        let Some(pending) = process.pending.filter(|pending| pending.order == report.order) else {
            return;
        };
        let record = report.record(process, pending);
        let key = process.key.clone();
        if record.is_false {
            let pid = process.identity.pid;
            self.bad_page(id, NEVER_MOVED.into());
            self.fail_offload(&key, Reason::BadPeer, &format!("process {pid}"));
            return self.resume(&key);
        }
        let phase = record.phase;
        self.count_moved_vram(id, pending.action, record);
        self.act_on_report(&key, id, &report, pending.action, phase);
        self.resume(&key);
    }

    /// Updates the VRAM figures after a move, because evictions before the next NVML sample use
    /// them.
    fn count_moved_vram(&mut self, id: ProcessId, action: Action, record: ReportRecord) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        if record.phase == Phase::Checkpointed {
            self.freed_since_sample.append(&mut process.vram);
        } else if record.phase == Phase::CopiedOut
            && let (Some(all), Some(gone)) = (&process.offloaded_vram, process.vram_to_restore())
        {
            // Until the next NVML sample, the process's VRAM is the memory that was not copied.
            process.vram = subtract_vram(all, &gone);
            self.freed_since_sample.extend(gone);
        } else if action.is_restore() {
            // Until the next NVML sample, the process's VRAM is the restored VRAM.
            process.vram = process.offloaded_vram.clone().unwrap_or_default();
            if record.was_copied_out {
                process.offloaded_vram = record.was_to_restore;
            }
        }
    }

    fn act_on_report(
        &mut self,
        key: &Key,
        id: ProcessId,
        report: &OrderReport,
        action: Action,
        phase: Phase,
    ) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        let pid = process.identity.pid;
        match report.verdict(process, action, phase) {
            ReportVerdict::Done => self.end_incomplete_restore(key),
            // The process or this controller was stopped for some time. Other processes may have
            // ended their pauses meanwhile, so the VRAM must be proven free again.
            ReportVerdict::Late => self.restore_incomplete(key, IncompleteRestore::Late),
            ReportVerdict::Exiting => self.turn_back(key),
            // The container waits for VRAM of its own GPU.
            ReportVerdict::MigrationFailed(why) => {
                self.abort_grant(key);
                self.journal(key, JournalStep::Checkpoint);
                let text = format!("process {pid} cannot be restored on another GPU: {why}");
                self.publish(key, NodeEvent::new(EventKind::Process, text));
            }
            ReportVerdict::OffloadFailed(reason, detail, mark) => {
                mark.set(process);
                self.fail_offload(key, reason, &detail);
            }
            ReportVerdict::NoHostMemory => {
                let (reason, detail) = self.host_shortage(key, pid);
                self.fail_offload(key, reason, &detail);
            }
            ReportVerdict::RestoreIncomplete(why) => {
                self.restore_incomplete(key, IncompleteRestore::NoVram(why));
            }
            ReportVerdict::RestoreFailed(why) => self.restore_failed(key, &why),
            ReportVerdict::OrderFailed(why) => {
                let event = NodeEvent::new(EventKind::Refused, why);
                self.publish(key, event.because(Reason::DriverError));
            }
        }
    }

    /// Handles orders whose report is late. If a close or lock order is late, the offload is given
    /// up. If an order that runs a driver call is late, it is only shown as slow.
    pub(super) fn check_overdue(&mut self, key: &Key) {
        let now = self.now;
        let late = self.processes.of(key).find_map(|(_, p)| {
            let pending = p.pending?;
            let (limit, gives_up) = match pending.action {
                Action::Close { deadline_ms } => (Millis::from(deadline_ms) + LATE_MS, true),
                Action::Lock { timeout_ms } => (Millis::from(timeout_ms) + LATE_MS, true),
                _ => (SLOW_MS, false),
            };
            (now.saturating_sub(pending.since) > limit).then_some((p.identity.pid, gives_up))
        });
        let Some((pid, gives_up)) = late else { return };
        let out = self.containers.get(key).is_some_and(|c: &Container| c.goal.is_offloaded());
        if gives_up && out {
            self.fail_offload(key, Reason::AgentSilent, &format!("process {pid}"));
        } else if let Some(container) = self.containers.get_mut(key) {
            container.shown.reason = (Reason::AgentSilent, format!("process {pid}"));
        }
    }
}
