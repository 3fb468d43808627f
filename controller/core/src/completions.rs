//! Handles reports of agents on orders, and orders whose report is late.
//!
//! A report contains the phase in which the agent left the process. The controller records this
//! phase first, whatever the outcome is. The outcome then decides whether the offload or restore
//! continues, is given up, or is tried again.

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    wire::{
        Hazards, Phase,
        message::{Action, BUSY_LOADER, BUSY_NVML, Outcome},
    },
};

use super::{
    JournalStep, Key, Millis, Node, ProcessId,
    container::{Container, Goal, IncompleteRestore},
    eligibility,
    event::NodeEvent,
    input::SwapStatus,
    process::subtract_vram,
    registration::NEVER_MOVED,
};

/// Time after the deadline of a close or lock order until its missing report counts as late. The
/// offload is then given up.
const LATE_MS: Millis = 5_000;
/// Time after which an order without a deadline is shown as slow. The driver call is never
/// interrupted.
pub(super) const SLOW_MS: Millis = 60_000;
/// The driver's error for each call after the driver's `exit` handler has run.
const CUDA_ERROR_DEINITIALIZED: u32 = 4;
/// The driver's error for a lock while GPU work is in progress.
const CUDA_ERROR_NOT_READY: u32 = 600;
/// The driver's error for a checkpoint of managed memory.
const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

impl Node {
    pub(super) fn report(
        &mut self,
        id: ProcessId,
        order: u64,
        outcome: Outcome,
        phase: Phase,
        cuda_error: u32,
        swap: SwapStatus,
    ) {
        // Orders to hold are not in `pending`: they serve a grant and may overlap with the order of
        // a move.
        if self.hold_reported(id, order, outcome) {
            return;
        }
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        let Some(pending) = process.pending.filter(|pending| pending.order == order) else {
            return;
        };
        let moving = process.is_migrating();
        process.pending = None;
        let to = process.target_gpu.take_if(|_| moving);
        // A late order was not carried out, whatever the phase is now.
        let tried = !matches!(outcome, Outcome::Late | Outcome::WrongPhase);
        if moving && tried && phase != Phase::Checkpointed {
            process.finish_migration(to);
        } else if moving && tried {
            process.migration_refused = true;
        }
        // A process can register in the middle of an offload, locked and with its memory copied
        // out. It then reports the phase `CopiedOut` only after it was unlocked.
        let was_off = process.phase.is_offloaded() || process.swap.copied_out_bytes > 0;
        // A report of an offloaded phase is false if no controller offloaded the process. It must
        // not give the container a claim on VRAM.
        let lies = phase.is_offloaded() && process.offloaded_vram.is_none() && !was_off;
        let phase = if lies { Phase::Open } else { phase };
        let came_from_parked = process.phase == Phase::CopiedOut;
        let gone = if came_from_parked { process.vram_to_restore() } else { None };
        process.phase = phase;
        process.swap = match was_off || process.offloaded_vram.is_some() {
            true => swap,
            // No controller offloaded the process: accept its swappable bytes, but no copied-out
            // bytes.
            false => SwapStatus { copied_out_bytes: 0, local_memory_bytes: 0, ..swap },
        };
        let key = process.key.clone();
        let pid = process.identity.pid;
        let left = pending.takes_vram_away();
        // The offload did not happen, so there is no VRAM to restore.
        if left && !phase.is_offloaded() {
            process.offloaded_vram = None;
        }
        // A copy out uses up the prefaulted host memory.
        if matches!(pending.action, Action::CopyOut { .. }) && phase.is_offloaded() {
            process.prefault_ordered = false;
        }
        process.copy_out_incomplete &= phase == Phase::Checkpointed;
        if outcome == Outcome::NotCopied && phase == Phase::Checkpointed {
            process.record_copy_out_failure();
        }
        if phase == Phase::Checkpointed && outcome == Outcome::Done && left {
            process.failed_copy_outs = 0;
        }
        if lies {
            self.bad_page(id, NEVER_MOVED.into());
            self.fail_offload(&key, Reason::BadPeer, &format!("process {pid}"));
            return self.advance(&key);
        }
        let failed = |call: &str| format!("{call} of process {pid} returned {cuda_error}");
        // Update the VRAM figures now, because evictions before the next NVML sample use them.
        if phase == Phase::Checkpointed {
            self.freed_since_sample.append(&mut process.vram);
        } else if phase == Phase::CopiedOut
            && let (Some(all), Some(gone)) = (&process.offloaded_vram, process.vram_to_restore())
        {
            // Until the next NVML sample, the process's VRAM is the memory that was not copied.
            process.vram = subtract_vram(all, &gone);
            self.freed_since_sample.extend(gone);
        } else if pending.action.is_restore() {
            // Until the next NVML sample, the process's VRAM is the restored VRAM.
            process.vram = process.offloaded_vram.clone().unwrap_or_default();
            if came_from_parked {
                process.offloaded_vram = gone;
            }
        }
        match (pending.action, outcome) {
            (_, Outcome::Done | Outcome::WrongPhase) => self.end_incomplete_restore(&key),
            // The process or this controller was stopped for some time, so other processes may have
            // ended their holds: prove the VRAM again.
            (_, Outcome::Late) => self.restore_incomplete(&key, IncompleteRestore::Late),
            // The process is about to exit and its driver has shut down. This is not a failure of
            // the offload: the other processes of the container are restored, or stay resident.
            (_, Outcome::DriverError) if cuda_error == CUDA_ERROR_DEINITIALIZED => {
                self.turn_back(&key);
            }
            // The migration failed. A restore on the container's own GPU may still succeed, so the
            // container waits for VRAM of that GPU.
            (Action::RestoreOnGpu { .. }, _) if phase == Phase::Checkpointed => {
                self.abort_grant(&key);
                self.journal(&key, JournalStep::Checkpoint);
                let why = match outcome {
                    Outcome::Unreachable => {
                        "the process cannot access every GPU of the node, or its driver is too old"
                            .to_owned()
                    }
                    _ => failed("cuCheckpointProcessRestore"),
                };
                let text = format!("process {pid} cannot be restored on another GPU: {why}");
                self.publish(&key, NodeEvent::new(EventKind::Process, text));
            }
            (_, Outcome::Unsupported) => {
                // If the agent found a hazard during the offload, it has reported the hazard before
                // this.
                let reason = eligibility::hazard_reason(process.hazards).unwrap_or_else(|| {
                    process.hazards.0 |= Hazards::NO_CHECKPOINT_API.0;
                    Reason::DriverTooOld
                });
                self.fail_offload(&key, reason, &format!("process {pid}"));
            }
            (_, Outcome::Imported) => {
                let detail = format!(
                    "process {pid} has memory imported from a copier, which only the engines full and copy can offload"
                );
                self.fail_offload(&key, Reason::DriverError, &detail);
            }
            (Action::Close { .. }, _) => {
                self.fail_offload(&key, Reason::Busy, &format!("process {pid}"))
            }
            (Action::Lock { .. } | Action::CopyOut { .. }, Outcome::Busy) => {
                self.fail_offload(&key, Reason::Busy, &busy_detail(pid, cuda_error));
            }
            (Action::Lock { .. }, _) if cuda_error == CUDA_ERROR_NOT_READY => {
                self.fail_offload(&key, Reason::Busy, &busy_detail(pid, cuda_error));
            }
            (Action::Lock { .. }, _) => {
                self.fail_offload(&key, Reason::DriverError, &failed("cuCheckpointProcessLock"))
            }
            (Action::CopyOut { .. }, Outcome::NoHostMemory) => {
                let (reason, detail) = self.host_shortage(&key, pid);
                self.fail_offload(&key, reason, &detail);
            }
            (Action::CopyOut { .. }, _) => {
                process.copy_failed = true;
                let detail = failed("copying the memory");
                self.fail_offload(&key, Reason::DriverError, &detail);
            }
            (_, Outcome::NotCopied) => {
                process.failed_copy_outs += 1;
                let detail = format!(
                    "the copier did not copy out process {pid}, although its host memory was \
                     prefaulted"
                );
                self.fail_offload(&key, Reason::DriverError, &detail);
            }
            (Action::Checkpoint { .. }, _) if cuda_error == CUDA_ERROR_NOT_SUPPORTED => {
                process.hazards.0 |= Hazards::MANAGED_MEMORY.0;
                self.fail_offload(
                    &key,
                    Reason::ManagedMemory,
                    &failed("cuCheckpointProcessCheckpoint"),
                );
            }
            (Action::Checkpoint { .. }, _) => {
                self.fail_offload(
                    &key,
                    Reason::DriverError,
                    &failed("cuCheckpointProcessCheckpoint"),
                );
            }
            (action, _) if action.is_restore() && phase == Phase::CopiedOut => {
                let why = IncompleteRestore::NoVram(failed("mapping the memory"));
                self.restore_incomplete(&key, why);
            }
            (Action::Restore, _) if phase == Phase::Checkpointed => {
                self.restore_failed(&key, &failed("cuCheckpointProcessRestore"))
            }
            _ => self.publish(
                &key,
                NodeEvent::new(EventKind::Refused, failed("an order")).because(Reason::DriverError),
            ),
        }
        self.advance(&key);
    }

    /// Handles late orders. If a close or lock is late, the offload is given up. If a driver call
    /// is late, it is only shown as slow.
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
        let out = self.containers.get(key).is_some_and(|c: &Container| c.goal == Goal::Offloaded);
        if gives_up && out {
            self.fail_offload(key, Reason::AgentSilent, &format!("process {pid}"));
        } else if let Some(container) = self.containers.get_mut(key) {
            container.reason = (Reason::AgentSilent, format!("process {pid}"));
        }
    }
}

/// Text that names the work in progress in a process, from the `cuda_error` of its report.
fn busy_detail(pid: u32, cuda_error: u32) -> String {
    match cuda_error {
        BUSY_NVML => format!("a thread of process {pid} is inside NVML"),
        BUSY_LOADER => format!("a thread of process {pid} loads a library"),
        CUDA_ERROR_NOT_READY => format!("work of process {pid} is running on the GPU"),
        _ => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_process_says_with_what() {
        let codes = [BUSY_NVML, BUSY_LOADER, CUDA_ERROR_NOT_READY, 0];
        let details = codes.map(|code| busy_detail(7, code));
        for (detail, names) in details.iter().zip(["NVML", "library", "GPU", "process 7"]) {
            assert!(detail.contains(names) && detail.contains("process 7"), "{detail}");
        }
    }
}
