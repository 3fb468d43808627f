//! The VRAM that a process holds, and the VRAM that it released at its offload.

use affinode_proto::wire::Phase;

use super::super::{
    DeviceBytes,
    input::{GpuSample, SwapStatus},
};

/// The VRAM that a process holds, and the VRAM that it released at its offload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// VRAM of the process now, as NVML reports it.
    pub vram: Vec<DeviceBytes>,
    /// Memory that the agent can copy, and memory that it has copied.
    pub swap: SwapStatus,
    /// The memory of a process that is offloaded, or whose offload has begun. The record exists
    /// until the container's restore ends. `None`: the process is not offloaded, or its VRAM is
    /// unknown.
    pub offloaded: Option<OffloadedMemory>,
}

/// The memory of a process that is offloaded or about to be offloaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadedMemory {
    /// VRAM that the process had when its offload began. If the process was only copied out and is
    /// restored again, this is the part that had left the GPU.
    pub vram: Vec<DeviceBytes>,
    /// UUID of the GPU to which the process is to migrate, because VRAM was promised there. `None`:
    /// the process is restored on its own GPU.
    pub target_gpu: Option<String>,
    /// Whether the process is checkpointed although no copier has copied its swappable memory. That
    /// memory is then still on the GPU.
    pub copy_out_incomplete: bool,
}

impl OffloadedMemory {
    /// Creates a record of memory that is to be restored on the GPU from which it was offloaded.
    #[must_use]
    pub fn of(vram: Vec<DeviceBytes>) -> OffloadedMemory {
        OffloadedMemory { vram, ..OffloadedMemory::default() }
    }
}

impl ProcessMemory {
    /// VRAM that the process holds now, in bytes over all GPUs.
    #[must_use]
    pub fn vram_bytes(&self) -> u64 {
        self.vram.iter().map(|d| d.bytes).sum()
    }

    /// Replaces the VRAM that the process holds. On a GPU that could not be read, the process keeps
    /// the VRAM of the last sample of that GPU.
    pub fn set_vram(&mut self, held: Vec<DeviceBytes>, unreadable: &[GpuSample]) {
        let before = std::mem::replace(&mut self.vram, held);
        let is_unread = |on: &DeviceBytes| unreadable.iter().any(|gpu| gpu.uuid == on.uuid);
        self.vram.extend(before.into_iter().filter(is_unread));
    }

    /// VRAM that the process had when its offload began. `None`: the process is not offloaded, or
    /// its VRAM is unknown.
    #[must_use]
    pub fn offloaded_vram(&self) -> Option<&[DeviceBytes]> {
        self.offloaded.as_ref().map(|offloaded| offloaded.vram.as_slice())
    }

    /// UUID of the GPU to which the process is to migrate. `None`: it is restored on its own GPU.
    #[must_use]
    pub fn target_gpu(&self) -> Option<&str> {
        self.offloaded.as_ref()?.target_gpu.as_deref()
    }

    /// Sets or clears the target GPU of a migration. Does nothing if the process is not offloaded.
    pub fn set_target_gpu(&mut self, to: Option<String>) {
        if let Some(offloaded) = &mut self.offloaded {
            offloaded.target_gpu = to;
        }
    }

    /// Replaces the record of the VRAM that the process had before its offload. The target GPU and
    /// the mark of an incomplete copy do not change.
    pub fn set_offloaded_vram(&mut self, vram: Option<Vec<DeviceBytes>>) {
        let before = self.offloaded.take().unwrap_or_default();
        self.offloaded = vram.map(|vram| OffloadedMemory { vram, ..before });
    }

    /// Sets whether swappable memory is still on the GPU although the process is checkpointed.
    pub fn set_copy_out_incomplete(&mut self, incomplete: bool) {
        if let Some(offloaded) = &mut self.offloaded {
            offloaded.copy_out_incomplete = incomplete;
        }
    }

    /// VRAM that the process released and needs for its restore. The result depends on the
    /// process's phase: a process that is copied out needs only the copied part and its local
    /// memory (the stacks of the GPU's threads). Its other memory never left the GPU. `None`:
    /// unknown.
    #[must_use]
    pub fn to_restore(&self, phase: Phase) -> Option<Vec<DeviceBytes>> {
        let offloaded = self.offloaded.as_ref()?;
        if offloaded.copy_out_incomplete {
            let stays = proportional_part(&offloaded.vram, self.swap.swappable_bytes);
            return Some(subtract_vram(&offloaded.vram, &stays));
        }
        if phase != Phase::CopiedOut {
            return Some(on_gpu(&offloaded.vram, offloaded.target_gpu.as_deref()));
        }
        let left_bytes = self.swap.copied_out_bytes.saturating_add(self.swap.local_memory_bytes);
        Some(proportional_part(&offloaded.vram, left_bytes))
    }

    /// VRAM that a copy out of the process frees. The CUDA context is not included, because it
    /// stays.
    #[must_use]
    pub fn freed_by_copy(&self) -> Vec<DeviceBytes> {
        self.freed_by_copy_of(&self.vram)
    }

    /// VRAM that a copy out of the process frees if the process holds the VRAM `held`.
    #[must_use]
    pub fn freed_by_copy_of(&self, held: &[DeviceBytes]) -> Vec<DeviceBytes> {
        proportional_part(held, self.swap.swappable_bytes)
    }

    /// Records that the process was checkpointed while its swappable memory was still on the GPU.
    pub fn record_copy_out_failure(&mut self) {
        self.vram = subtract_vram(&self.vram, &self.freed_by_copy());
        self.set_copy_out_incomplete(true);
    }

    /// Records that a migration has ended. The offloaded VRAM then belongs to the GPU `to`, or to
    /// the process's own GPU if `to` is `None`.
    pub fn finish_migration(&mut self, to: Option<&str>) {
        if let Some(offloaded) = &mut self.offloaded {
            offloaded.vram = on_gpu(&offloaded.vram, to);
            offloaded.target_gpu = None;
        }
    }
}

/// Returns the VRAM `all` with each GPU replaced by the GPU `to`. If `to` is `None`, returns it
/// unchanged.
pub(crate) fn on_gpu(all: &[DeviceBytes], to: Option<&str>) -> Vec<DeviceBytes> {
    let mut all = all.to_vec();
    if let Some(to) = to {
        all.iter_mut().for_each(|device| to.clone_into(&mut device.uuid));
    }
    all
}

/// Subtracts the VRAM `gone` from the VRAM `all`, for each GPU.
pub(crate) fn subtract_vram(all: &[DeviceBytes], gone: &[DeviceBytes]) -> Vec<DeviceBytes> {
    let gone_from = |uuid: &str| gone.iter().find(|g| g.uuid == uuid).map_or(0, |g| g.bytes);
    all.iter()
        .map(|d| DeviceBytes { bytes: d.bytes.saturating_sub(gone_from(&d.uuid)), ..d.clone() })
        .collect()
}

/// Returns a part of the VRAM `all` that has `bytes` bytes in total. The agent does not report
/// bytes per GPU, so the same fraction of each GPU's VRAM is assumed.
fn proportional_part(all: &[DeviceBytes], bytes: u64) -> Vec<DeviceBytes> {
    let sum: u64 = all.iter().map(|d| d.bytes).sum();
    let part = bytes.min(sum);
    let share = |bytes: u64| {
        let bytes = u128::from(bytes) * u128::from(part);
        u64::try_from(bytes.div_ceil(u128::from(sum.max(1)))).unwrap_or(u64::MAX)
    };
    all.iter().map(|d| DeviceBytes { bytes: share(d.bytes), ..d.clone() }).collect()
}
