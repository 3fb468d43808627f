//! Interprets the report of an agent on an order. [`OrderReport::record`] changes only the process,
//! and [`OrderReport::verdict`] changes nothing. `completions.rs` acts on the verdict.

use affinode_proto::{
    reason::Reason,
    wire::{
        Hazards, Phase,
        message::{Action, BUSY_LOADER, BUSY_NVML, DISK_UNREADABLE, Outcome},
    },
};

use super::{
    DeviceBytes,
    eligibility::hazard_reason,
    input::SwapStatus,
    process::{PendingOrder, Process},
};

/// Error that the driver returns for each call after its `exit` handler has run.
const CUDA_ERROR_DEINITIALIZED: u32 = 4;
/// Error that the driver returns for a lock while GPU work is in progress.
const CUDA_ERROR_NOT_READY: u32 = 600;
/// Error that the driver returns for a checkpoint of managed memory.
const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

/// Report of an agent on an order.
#[derive(Clone, Copy, Debug)]
pub(super) struct OrderReport {
    /// Number of the order to which the report belongs.
    pub order: u64,
    pub outcome: Outcome,
    /// Phase in which the agent left the process.
    pub phase: Phase,
    pub cuda_error: u32,
    pub swap: SwapStatus,
}

/// Changes that a report made to the controller's record of its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportRecord {
    /// Phase of the process after the report.
    pub phase: Phase,
    /// Whether the report claims an offload that no controller ordered. It is then not believed.
    pub is_false: bool,
    /// Whether the process was copied out before the report.
    pub was_copied_out: bool,
    /// VRAM that the process needed for its restore before the report, if it was copied out.
    /// `None`: it was not copied out, or the need was unknown.
    pub was_to_restore: Option<Vec<DeviceBytes>>,
}

/// Meaning of an agent's report, by which the controller decides what to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReportVerdict {
    /// The order was carried out.
    Done,
    /// The order arrived too late and was not carried out.
    Late,
    /// The process is about to exit, and its driver has shut down. This does not count as a failed
    /// offload: the container's other processes are restored or stay resident.
    Exiting,
    /// The restore on another GPU failed, for this reason. A restore on the container's own GPU may
    /// still succeed.
    MigrationFailed(String),
    /// The offload failed for this reason and detail. The mark is to be recorded for the process.
    OffloadFailed(Reason, String, ProcessMark),
    /// The offload failed because host memory is short.
    NoHostMemory,
    /// The copy out was cancelled, because the offload had been given up.
    GivenUp,
    /// A restore was carried out only in part, with this error.
    RestoreIncomplete(String),
    /// A restore failed, with this error.
    RestoreFailed(String),
    /// An order failed, and no other verdict fits. Contains a description.
    OrderFailed(String),
}

/// What a failed offload shows about its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessMark {
    /// The failure shows nothing about the process.
    None,
    /// The process's driver has no checkpoint functions.
    NoCheckpointApi,
    /// The process has managed memory (`cuMemAllocManaged`).
    ManagedMemory,
    /// The agent could not copy the process's memory.
    CopyFailed,
    /// The copier did not copy the process's memory.
    CopierFailed,
}

impl ProcessMark {
    /// Records in `process` what the mark states: a hazard or a failed move.
    pub fn set(self, process: &mut Process) {
        match self {
            ProcessMark::None => {}
            ProcessMark::NoCheckpointApi => process.agent.hazards.0 |= Hazards::NO_CHECKPOINT_API.0,
            ProcessMark::ManagedMemory => process.agent.hazards.0 |= Hazards::MANAGED_MEMORY.0,
            ProcessMark::CopyFailed => process.failed_moves.copy = true,
            ProcessMark::CopierFailed => process.failed_moves.copier_in_a_row += 1,
        }
    }
}

impl OrderReport {
    /// Records the phase and memory that the report states for the process, whatever the outcome of
    /// the order is.
    pub fn record(&self, process: &mut Process, pending: PendingOrder) -> ReportRecord {
        let moving = process.is_migrating();
        process.pending = None;
        // An order that arrived late or in a wrong phase was not carried out, whatever the phase is
        // now.
        let tried = !matches!(self.outcome, Outcome::Late | Outcome::WrongPhase);
        if moving && tried && self.phase != Phase::Checkpointed {
            let to = process.memory.target_gpu().map(str::to_owned);
            process.memory.finish_migration(to.as_deref());
        } else if moving && tried {
            process.failed_moves.migration = true;
        }
        if moving {
            process.memory.set_target_gpu(None);
        }
        // A process can register in the middle of an offload, locked and with its memory copied
        // out. It then reports the phase `CopiedOut` only after it was unlocked.
        let was_off =
            process.agent.phase.is_offloaded() || process.memory.swap.copied_out_bytes > 0;
        // A report of an offloaded phase is false if no controller offloaded the process. Such a
        // report must not give the container a claim on VRAM.
        let is_false = self.phase.is_offloaded() && process.memory.offloaded.is_none() && !was_off;
        let phase = if is_false { Phase::Open } else { self.phase };
        let was_copied_out = process.agent.phase == Phase::CopiedOut;
        let was_to_restore = if was_copied_out { process.vram_to_restore() } else { None };
        process.agent.phase = phase;
        process.memory.swap = match was_off || process.memory.offloaded.is_some() {
            true => self.swap,
            // If no controller offloaded the process, its swappable bytes are accepted, but not its
            // copied-out bytes.
            false => SwapStatus { copied_out_bytes: 0, local_memory_bytes: 0, ..self.swap },
        };
        self.record_offload(process, pending);
        ReportRecord { phase, is_false, was_copied_out, was_to_restore }
    }

    /// Updates the offload data of the process, and clears the data if no offload took place.
    /// Counts a failure of the copier if the process was checkpointed although the copier did not
    /// copy its memory.
    fn record_offload(&self, process: &mut Process, pending: PendingOrder) {
        let phase = process.agent.phase;
        let left = pending.takes_vram_away();
        // The offload did not happen, so there is no VRAM to restore.
        if left && !phase.is_offloaded() {
            process.memory.offloaded = None;
        }
        if let Action::CopyOut { how, .. } = pending.action
            && phase.is_offloaded()
        {
            // A copy out uses up the prefaulted host memory.
            process.prefault.ordered = false;
            process.host_pool.was_used = how.host_pool;
        }
        if let Action::CopyOut { how, .. } = pending.action
            && self.outcome == Outcome::GivenUp
        {
            // The pages of a copy that was given up stay for the next one.
            process.host_pool.was_used |= how.host_pool;
        }
        if phase != Phase::Checkpointed {
            process.memory.set_copy_out_incomplete(false);
        }
        if self.outcome == Outcome::NotCopied && phase == Phase::Checkpointed {
            process.record_copy_out_failure();
        }
        if phase == Phase::Checkpointed && self.outcome == Outcome::Done && left {
            process.failed_moves.copier_in_a_row = 0;
        }
    }

    /// Determines what the report on the order `action` means. `phase`: the phase that was recorded
    /// for the process after the report.
    pub fn verdict(&self, process: &Process, action: Action, phase: Phase) -> ReportVerdict {
        let pid = process.identity.pid;
        match (action, self.outcome) {
            (_, Outcome::Done | Outcome::WrongPhase) => ReportVerdict::Done,
            (_, Outcome::Late) => ReportVerdict::Late,
            (_, Outcome::DriverError) if self.cuda_error == CUDA_ERROR_DEINITIALIZED => {
                ReportVerdict::Exiting
            }
            (Action::RestoreOnGpu { .. }, _) if phase == Phase::Checkpointed => {
                ReportVerdict::MigrationFailed(match self.outcome {
                    Outcome::Unreachable => {
                        "the process cannot access every GPU of the node, or the driver is too old"
                            .to_owned()
                    }
                    _ => self.failed("cuCheckpointProcessRestore", pid),
                })
            }
            // If the agent found a hazard during the offload, it reported the hazard before this
            // refusal.
            (_, Outcome::Unsupported) => match hazard_reason(process.agent.hazards) {
                Some(reason) => offload_failed(reason, name(pid)),
                None => ReportVerdict::OffloadFailed(
                    Reason::DriverTooOld,
                    name(pid),
                    ProcessMark::NoCheckpointApi,
                ),
            },
            (_, Outcome::Imported) => {
                let detail = format!(
                    "process {pid} has memory imported from a copier, which only the engines full and copy can offload"
                );
                offload_failed(Reason::DriverError, detail)
            }
            (Action::Close { .. }, _) => offload_failed(Reason::Busy, name(pid)),
            (Action::Lock { .. } | Action::CopyOut { .. } | Action::Checkpoint { .. }, _) => {
                self.failed_offload(action, pid)
            }
            (_, Outcome::NotCopied) => not_copied(pid),
            (action, _) if action.is_restore() && phase == Phase::CopiedOut => {
                ReportVerdict::RestoreIncomplete(self.failed("mapping the memory", pid))
            }
            (Action::Restore, _) if phase == Phase::Checkpointed => {
                ReportVerdict::RestoreFailed(self.failed("cuCheckpointProcessRestore", pid))
            }
            _ => ReportVerdict::OrderFailed(self.failed("an order", pid)),
        }
    }

    /// The verdict on a lock, a copy out or a checkpoint that failed.
    fn failed_offload(&self, action: Action, pid: u32) -> ReportVerdict {
        let is_busy = self.outcome == Outcome::Busy;
        match action {
            Action::Lock { .. } if is_busy || self.cuda_error == CUDA_ERROR_NOT_READY => {
                offload_failed(Reason::Busy, self.busy_with(pid))
            }
            Action::Lock { .. } => {
                let detail = self.failed("cuCheckpointProcessLock", pid);
                offload_failed(Reason::DriverError, detail)
            }
            Action::CopyOut { .. } if is_busy => offload_failed(Reason::Busy, self.busy_with(pid)),
            Action::CopyOut { .. } if self.outcome == Outcome::NoHostMemory => {
                ReportVerdict::NoHostMemory
            }
            Action::CopyOut { .. } if self.outcome == Outcome::GivenUp => ReportVerdict::GivenUp,
            Action::CopyOut { .. } => ReportVerdict::OffloadFailed(
                Reason::DriverError,
                self.failed("copying the memory", pid),
                ProcessMark::CopyFailed,
            ),
            _ if self.outcome == Outcome::NotCopied => not_copied(pid),
            _ if self.cuda_error == CUDA_ERROR_NOT_SUPPORTED => ReportVerdict::OffloadFailed(
                Reason::ManagedMemory,
                self.failed("cuCheckpointProcessCheckpoint", pid),
                ProcessMark::ManagedMemory,
            ),
            _ => {
                let detail = self.failed("cuCheckpointProcessCheckpoint", pid);
                offload_failed(Reason::DriverError, detail)
            }
        }
    }

    fn failed(&self, call: &str, pid: u32) -> String {
        if self.cuda_error == DISK_UNREADABLE {
            return format!(
                "process {pid}: its content on disk cannot be read; it is tried again and again: \
                 check the disk of memory.disk_folder"
            );
        }
        format!("process {pid}: {call} failed with CUDA error {}", self.cuda_error)
    }

    /// Describes, for a message, the work in a process that made an order fail.
    fn busy_with(&self, pid: u32) -> String {
        match self.cuda_error {
            BUSY_NVML => format!("a thread of process {pid} is inside NVML"),
            BUSY_LOADER => format!("a thread of process {pid} loads a library"),
            CUDA_ERROR_NOT_READY => format!("work of process {pid} is running on the GPU"),
            _ => name(pid),
        }
    }
}

fn name(pid: u32) -> String {
    format!("process {pid}")
}

fn offload_failed(reason: Reason, detail: String) -> ReportVerdict {
    ReportVerdict::OffloadFailed(reason, detail, ProcessMark::None)
}

fn not_copied(pid: u32) -> ReportVerdict {
    let detail = format!(
        "the copier did not copy out the memory of process {pid}, although the process's host \
         memory was prefaulted"
    );
    ReportVerdict::OffloadFailed(Reason::DriverError, detail, ProcessMark::CopierFailed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcome: Outcome, cuda_error: u32) -> OrderReport {
        let (phase, swap) = (Phase::Open, SwapStatus::default());
        OrderReport { order: 1, outcome, phase, cuda_error, swap }
    }

    #[test]
    fn unreadable_disk_is_named() {
        let detail = report(Outcome::DriverError, DISK_UNREADABLE).failed("mapping the memory", 7);
        assert!(detail.contains("process 7") && detail.contains("memory.disk_folder"), "{detail}");
    }

    #[test]
    fn busy_process_says_with_what() {
        for (code, names) in
            [(BUSY_NVML, "NVML"), (BUSY_LOADER, "library"), (CUDA_ERROR_NOT_READY, "GPU"), (0, "")]
        {
            let detail = report(Outcome::Busy, code).busy_with(7);
            assert!(detail.contains(names) && detail.contains("process 7"), "{detail}");
        }
    }

    #[test]
    fn failed_steps_of_an_offload_have_reasons() {
        let lock = Action::Lock { timeout_ms: 1 };
        let checkpoint = Action::Checkpoint { vram_bytes: 1 };
        for (action, outcome, code, expected) in [
            (lock, Outcome::DriverError, CUDA_ERROR_NOT_READY, Reason::Busy),
            (lock, Outcome::Busy, BUSY_NVML, Reason::Busy),
            (lock, Outcome::DriverError, 999, Reason::DriverError),
            (checkpoint, Outcome::DriverError, CUDA_ERROR_NOT_SUPPORTED, Reason::ManagedMemory),
            (checkpoint, Outcome::DriverError, 999, Reason::DriverError),
            (checkpoint, Outcome::NotCopied, 0, Reason::DriverError),
        ] {
            let verdict = report(outcome, code).failed_offload(action, 7);
            let ReportVerdict::OffloadFailed(reason, detail, _) = verdict else {
                panic!("{action:?} {outcome:?} {code}: {verdict:?}")
            };
            assert_eq!(reason, expected, "{action:?} {outcome:?} {code}");
            assert!(detail.contains("process 7"), "{detail}");
        }
    }
}
