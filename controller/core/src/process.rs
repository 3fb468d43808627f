//! State of one CUDA process that Affinode manages.

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, counters::CounterSnapshot, message::Action,
};

use super::{
    DeviceBytes, Key, Millis,
    completions::SLOW_MS,
    holds::HoldRecord,
    input::{Identity, SwapStatus},
    plan::OffloadMethod,
};

/// An order that was sent and has no report yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingOrder {
    /// Number of the order; the report repeats it.
    pub order: u64,
    /// The action that was ordered.
    pub action: Action,
    /// When the order was sent.
    pub since: Millis,
}

impl PendingOrder {
    /// Whether the process's memory may leave the GPU when this order is carried out.
    #[must_use]
    pub fn takes_vram_away(&self) -> bool {
        matches!(self.action, Action::CopyOut { .. } | Action::Checkpoint { .. })
    }
}

/// An allocation that found no VRAM and waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingAlloc {
    /// Number of the allocation, chosen by the process.
    pub ticket: u64,
    /// GPU and bytes that the allocation needs.
    pub need: DeviceBytes,
    /// Number of attempts that failed for lack of VRAM.
    pub attempts: u32,
    /// When the wait began.
    pub since: Millis,
    /// When the process was ordered to try again. `None`: it was not ordered yet.
    pub resumed_at: Option<Millis>,
}

/// Work on a GPU, from NVML's utilisation samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWork {
    /// When the work was seen last.
    pub at: Millis,
    /// Share of the sample period in which the work ran, in percent.
    pub percent: u32,
}

/// An order to end a process, because another container needs its VRAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Termination {
    /// When the process was ordered to end.
    pub since: Millis,
    /// Whether the process did not end in time and was killed.
    pub by_force: bool,
}

/// The state of one process. Only [`super::Node`] changes it.
#[derive(Clone, Debug)]
pub struct Process {
    /// The container that the process belongs to.
    pub key: Key,
    /// Pid, start time and command of the process, from the kernel.
    pub identity: Identity,
    /// Whether the agent of the process is connected.
    pub connected: bool,
    /// The phase in the agent's last report.
    pub phase: Phase,
    /// Number of times that the gate of the process has closed.
    pub generation: u64,
    /// Properties of the process that make a checkpoint unsafe.
    pub hazards: Hazards,
    /// Capabilities of the process's library.
    pub capabilities: Capabilities,
    /// The order in progress. A process has at most one.
    pub pending: Option<PendingOrder>,
    /// Number of grants for which the process pauses its allocations.
    pub holds: u32,
    /// VRAM of the process now, as NVML reports it.
    pub vram: Vec<DeviceBytes>,
    /// VRAM of the process when its offload began. `None`: the process is not offloaded, or the
    /// VRAM is unknown.
    pub offloaded_vram: Option<Vec<DeviceBytes>>,
    /// UUID of the GPU on which VRAM was promised for a migration.
    pub target_gpu: Option<String>,
    /// Whether a restore on another GPU failed. This controller then does not try it again.
    pub migration_refused: bool,
    /// Memory that the agent can copy, and memory that it has copied.
    pub swap: SwapStatus,
    /// Whether the process is checkpointed although no copier has copied its swappable memory. That
    /// memory is then still on the GPU.
    pub copy_out_incomplete: bool,
    /// Whether a copy by the agent failed. Later offloads then use the driver's checkpoint.
    pub copy_failed: bool,
    /// Whether the process was ordered to prefault host memory for its next offload.
    pub prefault_ordered: bool,
    /// Start of the idle period in which prefaulting was last ordered. In each period it is ordered
    /// at most once.
    pub prefault_ordered_for_idle: Option<Millis>,
    /// Number of offloads in a row in which no copier copied the memory that the process had
    /// exported.
    pub failed_copy_outs: u32,
    /// Whether the process pauses its allocations until the other processes of its container are
    /// restored.
    pub waits_for_siblings: bool,
    /// The permanent reason for which the counters of the process are ignored. `None`: they are
    /// valid.
    pub counter_error: Option<String>,
    /// Counts of refused and completed orders to pause allocations.
    pub hold_record: HoldRecord,
    /// The last work on a GPU, as NVML reports it. It may run without a CUDA call in progress.
    pub working: Option<DeviceWork>,
    /// The order to end the process. `None`: the process was not ordered to end.
    pub termination: Option<Termination>,
    /// When the process registered or was last restored. 0: before this controller started.
    pub resident_since: Millis,
    /// The process's waiting allocation. `None`: no allocation waits for VRAM.
    pub alloc_wait: Option<PendingAlloc>,
    /// The last reading of the process's counters.
    pub counters: Option<CounterSnapshot>,
}

impl Process {
    /// Whether the library of the process has all of these capabilities.
    #[must_use]
    pub fn can(&self, capabilities: Capabilities) -> bool {
        self.capabilities.contains(capabilities)
    }

    /// Whether an order in progress may take the process's memory off the GPU. A slow order does
    /// not count: it may hang in the driver, and the other processes of the container must not wait
    /// for it.
    #[must_use]
    pub fn may_leave(&self, now: Millis) -> bool {
        self.pending.is_some_and(|pending| {
            pending.takes_vram_away() && now.saturating_sub(pending.since) < SLOW_MS
        })
    }

    /// Hazards that do not prevent a copy out. With an older library, hazards of single allocations
    /// do prevent it, because that library cannot leave these allocations on the GPU.
    #[must_use]
    pub fn copyable_hazards(&self) -> Hazards {
        let known = self.can(Capabilities::LEAVES_IN_PART);
        let refused = if known { Hazards::default() } else { Hazards::KEEPS_MEMORY };
        Hazards::KEEPS_CONTEXT.without(refused)
    }

    /// Whether the context of the process stays on the GPU because its checkpoint would be unsafe.
    #[must_use]
    pub fn keeps_context(&self) -> bool {
        self.hazards.intersects(Hazards::KEEPS_CONTEXT)
    }

    /// Present VRAM of the process in bytes, over all GPUs.
    #[must_use]
    pub fn vram_bytes(&self) -> u64 {
        self.vram.iter().map(|d| d.bytes).sum()
    }

    /// Host memory that an offload by the method `moves` takes, in bytes, without the memory that
    /// the driver takes for itself. A retained host copy is subtracted, because the container is
    /// charged for that copy already.
    #[must_use]
    pub fn host_need_bytes(&self, moves: OffloadMethod) -> u64 {
        let kept = self.counters.as_ref().map_or(0, |page| page.kept_bytes);
        let vram_bytes = match moves {
            // A copy moves only the swappable memory. All other memory stays on the GPU.
            OffloadMethod::Copy => self.vram_bytes().min(self.swap.swappable_bytes),
            OffloadMethod::DriverCheckpoint | OffloadMethod::CopyAndCheckpoint => self.vram_bytes(),
        };
        let copied = moves != OffloadMethod::DriverCheckpoint && !self.phase.is_offloaded();
        let kept = if copied { kept.min(self.swap.swappable_bytes) } else { 0 };
        vram_bytes.saturating_sub(kept)
    }

    /// VRAM that the process freed and needs for its restore. `None`: unknown. A process that is
    /// copied out needs only the copied part and its local memory, because the other memory never
    /// left the GPU.
    #[must_use]
    pub fn vram_to_restore(&self) -> Option<Vec<DeviceBytes>> {
        let offloaded = self.offloaded_vram.as_ref()?;
        if self.copy_out_incomplete {
            return Some(subtract_vram(
                offloaded,
                &proportional_part(offloaded, self.swap.swappable_bytes),
            ));
        }
        if self.phase != Phase::CopiedOut {
            return Some(on_gpu(offloaded, self.target_gpu.as_deref()));
        }
        let left_bytes = self.swap.copied_out_bytes.saturating_add(self.swap.local_memory_bytes);
        Some(proportional_part(offloaded, left_bytes))
    }

    /// Records that the process was checkpointed without a copy by its copier. The swappable memory
    /// is still on the GPU. Therefore the restore needs only the other VRAM, and only a restore on
    /// the same GPU can be complete.
    pub fn record_copy_out_failure(&mut self) {
        self.vram =
            subtract_vram(&self.vram, &proportional_part(&self.vram, self.swap.swappable_bytes));
        (self.copy_out_incomplete, self.migration_refused) = (true, true);
    }

    /// Whether a restore on another GPU is in progress.
    #[must_use]
    pub fn is_migrating(&self) -> bool {
        self.pending.is_some_and(|pending| matches!(pending.action, Action::RestoreOnGpu { .. }))
    }

    /// Ends a migration. From now on, the VRAM of the process counts on the GPU `to`, or on the
    /// process's own GPU if `to` is `None`.
    pub fn finish_migration(&mut self, to: Option<String>) {
        self.offloaded_vram =
            self.offloaded_vram.take().map(|offloaded| on_gpu(&offloaded, to.as_deref()));
        self.target_gpu = None;
    }

    /// VRAM that a copy out frees, without the context.
    #[must_use]
    pub fn vram_freed_by_copy(&self) -> Vec<DeviceBytes> {
        proportional_part(&self.vram, self.swap.swappable_bytes)
    }

    /// VRAM that the process freed and needs for its restore, in bytes over all GPUs.
    #[must_use]
    pub fn offloaded_vram_bytes(&self) -> u64 {
        self.vram_to_restore().iter().flatten().map(|d| d.bytes).sum()
    }
}

/// Returns the VRAM `all` with each GPU replaced by the GPU `to`. If `to` is `None`, the GPUs stay.
pub(super) fn on_gpu(all: &[DeviceBytes], to: Option<&str>) -> Vec<DeviceBytes> {
    let mut all = all.to_vec();
    if let Some(to) = to {
        all.iter_mut().for_each(|device| to.clone_into(&mut device.uuid));
    }
    all
}

/// Subtracts the VRAM `gone` from the VRAM `all`, for each GPU.
pub(super) fn subtract_vram(all: &[DeviceBytes], gone: &[DeviceBytes]) -> Vec<DeviceBytes> {
    let gone_from = |uuid: &str| gone.iter().find(|g| g.uuid == uuid).map_or(0, |g| g.bytes);
    all.iter()
        .map(|d| DeviceBytes { bytes: d.bytes.saturating_sub(gone_from(&d.uuid)), ..d.clone() })
        .collect()
}

/// Returns a part of the VRAM `all` with this number of bytes in total. The agent does not report
/// bytes per GPU, so the part has the same share of each GPU.
fn proportional_part(all: &[DeviceBytes], bytes: u64) -> Vec<DeviceBytes> {
    let sum: u64 = all.iter().map(|d| d.bytes).sum();
    let part = bytes.min(sum);
    let share = |bytes: u64| {
        let bytes = u128::from(bytes) * u128::from(part);
        u64::try_from(bytes.div_ceil(u128::from(sum.max(1)))).unwrap_or(u64::MAX)
    };
    all.iter().map(|d| DeviceBytes { bytes: share(d.bytes), ..d.clone() }).collect()
}
