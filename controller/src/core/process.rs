//! One CUDA process under management.

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, counters::CounterSnapshot, message::Action,
};

use super::{
    DeviceBytes, Key, Millis,
    holds::HoldRecord,
    input::{Identity, SwapStatus},
    plan::OffloadMethod,
};

/// An order that was sent and has no report yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingOrder {
    /// Number of the order; the report repeats it.
    pub order: u64,
    /// What the process was ordered to do.
    pub action: Action,
    /// When the order was sent.
    pub since: Millis,
}

/// An allocation that found no VRAM and waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingAlloc {
    /// Number of the allocation, given by the process.
    pub ticket: u64,
    /// GPU and bytes that the allocation needs.
    pub need: DeviceBytes,
    /// Number of attempts that found no VRAM.
    pub attempts: u32,
    /// When the wait began.
    pub since: Millis,
    /// When the process was told to try again; `None`: not yet.
    pub resumed_at: Option<Millis>,
}

/// Work on a GPU, as NVML's utilisation samples show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWork {
    /// When the work was seen last.
    pub at: Millis,
    /// Share of the sample, in percent.
    pub percent: u32,
}

/// An order to a process to end, so that another container gets its VRAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Termination {
    /// When the process was asked to end.
    pub since: Millis,
    /// The process did not end in time and is killed.
    pub by_force: bool,
}

/// The state of one process. Only [`super::Node`] changes it.
#[derive(Clone, Debug)]
pub struct Process {
    /// The container that the process belongs to.
    pub key: Key,
    /// Pid, start time and command of the process, from the kernel.
    pub identity: Identity,
    /// Whether its agent is connected.
    pub connected: bool,
    /// The phase that its agent reported last.
    pub phase: Phase,
    /// Number of times that its gate has closed.
    pub generation: u64,
    /// Hazards: what makes a checkpoint unsafe.
    pub hazards: Hazards,
    /// What its library can do.
    pub capabilities: Capabilities,
    /// The order in progress, at most one.
    pub pending: Option<PendingOrder>,
    /// Number of grants for which it holds its allocations.
    pub holds: u32,
    /// Its VRAM now, by NVML.
    pub vram: Vec<DeviceBytes>,
    /// Its VRAM when the offload began; `None`: not offloaded, or unknown.
    pub offloaded_vram: Option<Vec<DeviceBytes>>,
    /// UUID of the GPU promised to it in a migration.
    pub target_gpu: Option<String>,
    /// A restore on another GPU failed: this controller does not try again.
    pub migration_refused: bool,
    /// What its agent can copy, and has copied.
    pub swap: SwapStatus,
    /// It is checkpointed, but no copier copied its swappable memory, which is still on the GPU.
    pub copy_out_incomplete: bool,
    /// Its agent's copy failed: from then on its offloads use the driver's checkpoint.
    pub copy_failed: bool,
    /// It was ordered to prefault host memory for its next offload.
    pub prefault_ordered: bool,
    /// Start of the idle period of the last prefault order: one order per idle period.
    pub prefault_ordered_for_idle: Option<Millis>,
    /// Offloads in a row in which no copier copied the memory that the process had exported.
    pub failed_copy_outs: u32,
    /// It holds its allocations until the rest of its container is restored.
    pub waits_for_siblings: bool,
    /// Why its counters are not used; `None`: they are valid. Permanent.
    pub counter_error: Option<String>,
    /// Refused and kept orders to hold allocations.
    pub hold_record: HoldRecord,
    /// The last work on a GPU, possibly without a CUDA call in progress.
    pub working: Option<DeviceWork>,
    /// The order to end, if there is one.
    pub termination: Option<Termination>,
    /// When it registered, or was restored last. 0: before this controller started.
    pub resident_since: Millis,
    /// Its allocation that waits for VRAM.
    pub alloc_wait: Option<PendingAlloc>,
    /// The last reading of its counters.
    pub counters: Option<CounterSnapshot>,
}

impl Process {
    /// Whether its library can do all of this.
    #[must_use]
    pub fn can(&self, capabilities: Capabilities) -> bool {
        self.capabilities.contains(capabilities)
    }

    /// Whether its context stays on the GPU because a checkpoint of it would be unsafe.
    #[must_use]
    pub fn keeps_context(&self) -> bool {
        self.hazards.intersects(Hazards::KEEPS_CONTEXT)
    }

    /// Its VRAM now in bytes, over all GPUs.
    #[must_use]
    pub fn vram_bytes(&self) -> u64 {
        self.vram.iter().map(|d| d.bytes).sum()
    }

    /// Host memory that an offload by `moves` takes, in bytes, without the driver's own. A host
    /// copy that was retained from the last offload already counts for its container.
    #[must_use]
    pub fn host_need_bytes(&self, moves: OffloadMethod) -> u64 {
        let kept = self.counters.as_ref().map_or(0, |page| page.kept_bytes);
        let copied = moves != OffloadMethod::DriverCheckpoint && !self.phase.is_offloaded();
        let kept = if copied { kept.min(self.swap.swappable_bytes) } else { 0 };
        self.vram_bytes().saturating_sub(kept)
    }

    /// VRAM that it freed and needs for its restore; `None`: unknown. A process that is copied out
    /// needs what was copied: the rest never left the GPU.
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
        Some(proportional_part(offloaded, self.swap.copied_out_bytes))
    }

    /// Records a checkpoint without the copier's copy. The swappable memory is still on the GPU,
    /// so the restore needs only the rest, and only on the same GPU.
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

    /// Ends a migration: its VRAM now counts on the GPU `to`. `None`: the process stays on its own
    /// GPU.
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

    /// VRAM that it freed and needs for its restore, in bytes over all GPUs.
    #[must_use]
    pub fn offloaded_vram_bytes(&self) -> u64 {
        self.vram_to_restore().iter().flatten().map(|d| d.bytes).sum()
    }
}

/// The same VRAM, on the GPU `to` if there is one.
pub(super) fn on_gpu(all: &[DeviceBytes], to: Option<&str>) -> Vec<DeviceBytes> {
    let mut all = all.to_vec();
    if let Some(to) = to {
        all.iter_mut().for_each(|device| to.clone_into(&mut device.uuid));
    }
    all
}

/// `all` without `gone`, per GPU.
pub(super) fn subtract_vram(all: &[DeviceBytes], gone: &[DeviceBytes]) -> Vec<DeviceBytes> {
    let gone_from = |uuid: &str| gone.iter().find(|g| g.uuid == uuid).map_or(0, |g| g.bytes);
    all.iter()
        .map(|d| DeviceBytes { bytes: d.bytes.saturating_sub(gone_from(&d.uuid)), ..d.clone() })
        .collect()
}

/// The part of `all` that amounts to `bytes`. The agent reports no bytes per GPU, so each GPU has
/// a proportional share.
fn proportional_part(all: &[DeviceBytes], bytes: u64) -> Vec<DeviceBytes> {
    let sum: u64 = all.iter().map(|d| d.bytes).sum();
    let part = bytes.min(sum);
    let share = |bytes: u64| {
        let bytes = u128::from(bytes) * u128::from(part);
        u64::try_from(bytes.div_ceil(u128::from(sum.max(1)))).unwrap_or(u64::MAX)
    };
    all.iter().map(|d| DeviceBytes { bytes: share(d.bytes), ..d.clone() }).collect()
}
