//! One CUDA process under management.

use affinode_proto::wire::{Hazards, Phase, counters::CounterSnapshot, message::Action};

use super::{
    DeviceBytes, Key, Millis,
    holds::HoldRecord,
    input::{Identity, SwapStatus},
    plan::OffloadMethod,
};

/// An order that was sent and not reported on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingOrder {
    /// Its number.
    pub order: u64,
    /// What it is.
    pub action: Action,
    /// When it was sent.
    pub since: Millis,
}

/// An allocation that found no memory and waits for room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingAlloc {
    /// Its number in the process.
    pub ticket: u64,
    /// What it needs.
    pub need: DeviceBytes,
    /// How often it was tried again.
    pub attempts: u32,
    /// Since when it waits.
    pub since: Millis,
    /// When it was told to go ahead.
    pub told: Option<Millis>,
}

/// Work that ran on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWork {
    /// When it was seen last.
    pub at: Millis,
    /// Share of that moment, in percent.
    pub percent: u32,
}

/// A process is to end, so that another one has its room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Termination {
    /// When it was asked to.
    pub since: Millis,
    /// It did not, and is killed.
    pub by_force: bool,
}

/// What is known of a process. Changed by [`super::Node`] alone.
#[derive(Clone, Debug)]
pub struct Process {
    /// The container that it belongs to.
    pub key: Key,
    /// Who it is.
    pub identity: Identity,
    /// Whether its agent is connected.
    pub connected: bool,
    /// Where it is, as its agent last observed.
    pub phase: Phase,
    /// Times its gate closed.
    pub generation: u64,
    /// What makes a checkpoint unsafe.
    pub hazards: Hazards,
    /// The order in progress: at most one.
    pub pending: Option<PendingOrder>,
    /// How many grants hold its allocations.
    pub holds: u32,
    /// VRAM now, by NVML.
    pub vram: Vec<DeviceBytes>,
    /// VRAM that it had when it left; `None` when that is not known.
    pub offloaded_vram: Option<Vec<DeviceBytes>>,
    /// The GPU that was promised to it in place of the one that it left.
    pub target_gpu: Option<String>,
    /// It could not come back on another GPU, and is not asked to by this controller again.
    pub migration_refused: bool,
    /// What its agent can copy, and has copied.
    pub carried: SwapStatus,
    /// It is away, and a copier has not copied what it can carry, which is on the device.
    pub copy_out_incomplete: bool,
    /// Its agent could not copy: it leaves through the driver's checkpoint from then on.
    pub copy_failed: bool,
    /// It was told to make host memory ready for its leaving.
    pub prefault_ordered: bool,
    /// Since when its container was idle when it was told so last.
    pub prefault_ordered_for_idle: Option<Millis>,
    /// How often in a row no copier has copied what it had handed over.
    pub failed_copy_outs: u32,
    /// It holds its allocations until the rest of its container is back.
    pub waits_for_siblings: bool,
    /// Why its page is not believed any more, if it is not. For good.
    pub counter_error: Option<String>,
    /// How it held its allocations when it was told to.
    pub hold_record: HoldRecord,
    /// Work of it that ran on a device, without a call in progress perhaps.
    pub working: Option<DeviceWork>,
    /// It is to end.
    pub termination: Option<Termination>,
    /// When it came to take VRAM, or came home to it; 0: before this controller.
    pub resident_since: Millis,
    /// Its allocation that waits for room.
    pub alloc_wait: Option<PendingAlloc>,
    /// The last reading of its page.
    pub counters: Option<CounterSnapshot>,
}

impl Process {
    /// Whether its context stays on the device, because the driver must not checkpoint it.
    #[must_use]
    pub fn keeps_context(&self) -> bool {
        self.hazards.intersects(Hazards::KEEPS_CONTEXT)
    }

    /// VRAM now in bytes, over all devices.
    #[must_use]
    pub fn vram_bytes(&self) -> u64 {
        self.vram.iter().map(|d| d.bytes).sum()
    }

    /// Host memory that it will take when it leaves so, in bytes, beside what the driver takes: what
    /// it keeps there for a copy is its container's already.
    #[must_use]
    pub fn host_need_bytes(&self, moves: OffloadMethod) -> u64 {
        let kept = self.counters.as_ref().map_or(0, |page| page.kept_bytes);
        let copied = moves != OffloadMethod::DriverCheckpoint && !self.phase.is_offloaded();
        let kept = if copied { kept.min(self.carried.swappable_bytes) } else { 0 };
        self.vram_bytes().saturating_sub(kept)
    }

    /// VRAM that it gave back and will need again; `None` when that is not known. Of a
    /// process that is parked it is what was copied: the rest never left.
    #[must_use]
    pub fn vram_to_restore(&self) -> Option<Vec<DeviceBytes>> {
        let away = self.offloaded_vram.as_ref()?;
        if self.copy_out_incomplete {
            return Some(subtract_vram(
                away,
                &proportional_part(away, self.carried.swappable_bytes),
            ));
        }
        if self.phase != Phase::CopiedOut {
            return Some(on_gpu(away, self.target_gpu.as_deref()));
        }
        Some(proportional_part(away, self.carried.copied_out_bytes))
    }

    /// It is away, but all that it can carry is on the device still: what is gone, and needed for its
    /// return, is the rest, and there.
    pub fn record_copy_out_failure(&mut self) {
        self.vram =
            subtract_vram(&self.vram, &proportional_part(&self.vram, self.carried.swappable_bytes));
        (self.copy_out_incomplete, self.migration_refused) = (true, true);
    }

    /// Whether it is on its way to another GPU than it left.
    #[must_use]
    pub fn is_migrating(&self) -> bool {
        self.pending.is_some_and(|pending| matches!(pending.action, Action::RestoreOnGpu { .. }))
    }

    /// It has arrived where it was to be, or another controller had sent it there.
    pub fn finish_migration(&mut self, to: Option<String>) {
        self.offloaded_vram = self.offloaded_vram.take().map(|away| on_gpu(&away, to.as_deref()));
        self.target_gpu = None;
    }

    /// VRAM that goes when its agent copies, and nothing more.
    #[must_use]
    pub fn vram_freed_by_copy(&self) -> Vec<DeviceBytes> {
        proportional_part(&self.vram, self.carried.swappable_bytes)
    }

    /// VRAM given back in bytes, over all devices.
    #[must_use]
    pub fn offloaded_vram_bytes(&self) -> u64 {
        self.vram_to_restore().iter().flatten().map(|d| d.bytes).sum()
    }
}

/// The same on another GPU, if there is one.
pub(super) fn on_gpu(all: &[DeviceBytes], to: Option<&str>) -> Vec<DeviceBytes> {
    let mut all = all.to_vec();
    if let Some(to) = to {
        all.iter_mut().for_each(|device| to.clone_into(&mut device.uuid));
    }
    all
}

/// What is left of all without what is gone.
pub(super) fn subtract_vram(all: &[DeviceBytes], gone: &[DeviceBytes]) -> Vec<DeviceBytes> {
    let gone_from = |uuid: &str| gone.iter().find(|g| g.uuid == uuid).map_or(0, |g| g.bytes);
    all.iter()
        .map(|d| DeviceBytes { bytes: d.bytes.saturating_sub(gone_from(&d.uuid)), ..d.clone() })
        .collect()
}

/// So many bytes of all. An agent knows no device by its UUID: several have their shares.
fn proportional_part(all: &[DeviceBytes], bytes: u64) -> Vec<DeviceBytes> {
    let sum: u64 = all.iter().map(|d| d.bytes).sum();
    let part = bytes.min(sum);
    let share = |bytes: u64| {
        let bytes = u128::from(bytes) * u128::from(part);
        u64::try_from(bytes.div_ceil(u128::from(sum.max(1)))).unwrap_or(u64::MAX)
    };
    all.iter().map(|d| DeviceBytes { bytes: share(d.bytes), ..d.clone() }).collect()
}
