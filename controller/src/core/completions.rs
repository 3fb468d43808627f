//! How orders end: what an agent reports, and orders that it does not report on.

use affinode_proto::{
    api::control::Event,
    reason::Reason,
    wire::{
        Hazards, Phase,
        message::{Action, Outcome},
    },
};

use super::{
    Key, Millis, Node, ProcessId,
    container::{Container, Goal},
    eligibility,
    input::SwapStatus,
    process::subtract_vram,
    registration::NEVER_MOVED,
    transitions::CHECKPOINT,
};

/// Beyond its own deadline an order is late after this, and the offload is given up.
const LATE_MS: Millis = 5_000;
/// A driver call that takes longer than this is shown as such; it is never cut off.
const SLOW_MS: Millis = 60_000;
/// What the driver answers to every call once `exit` has run its handler.
const CUDA_ERROR_DEINITIALIZED: u32 = 4;
/// What the driver answers when a lock finds work in progress.
const CUDA_ERROR_NOT_READY: u32 = 600;
/// What the driver answers to a checkpoint with managed memory.
const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

impl Node {
    pub(super) fn report(
        &mut self,
        id: ProcessId,
        order: u64,
        outcome: Outcome,
        phase: Phase,
        cuda_error: u32,
        carried: SwapStatus,
    ) {
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
        // Of one that was late nothing was done, wherever it is now.
        let tried = !matches!(outcome, Outcome::Late | Outcome::WrongPhase);
        if moving && tried && phase != Phase::Checkpointed {
            process.finish_migration(to);
        } else if moving && tried {
            process.migration_refused = true;
        }
        // Parked memory of one that came forward in the middle shows when it is unlocked.
        let was_off = process.phase.is_offloaded() || process.carried.copied_out_bytes > 0;
        let lies = phase.is_offloaded() && process.offloaded_vram.is_none() && !was_off;
        let phase = if lies { Phase::Open } else { phase };
        let came_from_parked = process.phase == Phase::CopiedOut;
        let gone = if came_from_parked { process.vram_to_restore() } else { None };
        process.phase = phase;
        process.carried = match was_off || process.offloaded_vram.is_some() {
            true => carried,
            // Nobody has moved it: a claim on room, and no more.
            false => SwapStatus { copied_out_bytes: 0, ..carried },
        };
        let key = process.key.clone();
        let pid = process.identity.pid;
        let left = matches!(pending.action, Action::CopyOut { .. } | Action::Checkpoint { .. });
        if left && !phase.is_offloaded() {
            process.offloaded_vram = None;
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
        if phase == Phase::Checkpointed {
            self.freed_since_sample.append(&mut process.vram);
        } else if phase == Phase::CopiedOut
            && let (Some(all), Some(gone)) = (&process.offloaded_vram, process.vram_to_restore())
        {
            // Until NVML is read again: what was not copied is what it holds.
            process.vram = subtract_vram(all, &gone);
            self.freed_since_sample.extend(gone);
        } else if pending.action.is_restore() {
            // Until NVML is read again: what it gave back it has again.
            process.vram = process.offloaded_vram.clone().unwrap_or_default();
            if came_from_parked {
                process.offloaded_vram = gone;
            }
        }
        match (pending.action, outcome) {
            (_, Outcome::Done | Outcome::WrongPhase) => {}
            // It, or this controller, was stopped for a while: all is proven anew.
            (_, Outcome::Late) => self.abort_grant(&key),
            // The process is about to end, and its driver has ended already: no failure. What
            // else there is of its container comes home, or stays there.
            (_, Outcome::DriverError) if cuda_error == CUDA_ERROR_DEINITIALIZED => {
                self.turn_back(&key);
            }
            // It waits for its own GPU: nothing says that it would not come back there.
            (Action::RestoreOnGpu { .. }, _) if phase == Phase::Checkpointed => {
                self.abort_grant(&key);
                self.journal(&key, CHECKPOINT);
                let why = match outcome {
                    Outcome::Unreachable => {
                        "it does not reach every GPU of the node, or its driver is too old"
                            .to_owned()
                    }
                    _ => failed("cuCheckpointProcessRestore"),
                };
                let text = format!("process {pid} cannot come back on another GPU: {why}");
                self.publish(&key, Event { kind: "process".into(), text, ..Event::default() });
            }
            (_, Outcome::Unsupported) => {
                // What it did on the way out it has told before this.
                let reason = eligibility::hazard_reason(process.hazards).unwrap_or_else(|| {
                    process.hazards.0 |= Hazards::NO_CHECKPOINT_API.0;
                    Reason::DriverTooOld
                });
                self.fail_offload(&key, reason, &format!("process {pid}"));
            }
            (_, Outcome::Imported) => {
                let detail = format!(
                    "process {pid} has memory of a copier's making, which only the engines full and copy move"
                );
                self.fail_offload(&key, Reason::DriverError, &detail);
            }
            (Action::Close { .. }, _) => {
                self.fail_offload(&key, Reason::Busy, &format!("process {pid}"))
            }
            (Action::Lock { .. }, Outcome::Busy) => {
                self.fail_offload(&key, Reason::Busy, &format!("process {pid}"))
            }
            (Action::Lock { .. }, _) if cuda_error == CUDA_ERROR_NOT_READY => {
                self.fail_offload(
                    &key,
                    Reason::Busy,
                    &format!("work of process {pid} is running on the GPU"),
                );
            }
            (Action::Lock { .. }, _) => {
                self.fail_offload(&key, Reason::DriverError, &failed("cuCheckpointProcessLock"))
            }
            (Action::CopyOut { .. }, Outcome::NoHostMemory) => {
                let detail = format!("others took it while process {pid} was copied");
                self.fail_offload(&key, Reason::HostMemory, &detail);
            }
            (Action::CopyOut { .. }, _) => {
                process.copy_failed = true;
                let detail = failed("copying the memory");
                self.fail_offload(&key, Reason::DriverError, &detail);
            }
            (_, Outcome::NotCopied) => {
                process.failed_copy_outs += 1;
                let detail = format!("no copier has copied process {pid}, which was prepared");
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
                self.copy_in_failed(&key, &failed("mapping the memory"));
            }
            (Action::Restore, _) if phase == Phase::Checkpointed => {
                self.restore_failed(&key, &failed("cuCheckpointProcessRestore"))
            }
            _ => self.publish(
                &key,
                Event {
                    kind: "refused".into(),
                    reason: Reason::DriverError.to_string(),
                    text: failed("an order"),
                    ..Event::default()
                },
            ),
        }
        self.advance(&key);
    }

    /// Orders that are late: an offload is given up, a driver call is only shown.
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
