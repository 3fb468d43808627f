//! State of one CUDA process that Affinode manages.

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, ProcessFlags, copier::CHUNK_BYTES, counters::CounterSnapshot,
    message::Action,
};

mod memory;

pub use self::memory::{OffloadedMemory, ProcessMemory};
pub(super) use self::memory::{on_gpu, subtract_vram};
use super::{
    DeviceBytes, Key, Millis, completions::SLOW_MS, holds::HoldRecord,
    host_memory::HostPoolPermission, input::Identity, plan::OffloadMethod,
};

/// An order that was sent to an agent and that the agent has not reported on yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingOrder {
    /// Number of the order. The agent's report contains the same number.
    pub order: u64,
    /// The action that was ordered.
    pub action: Action,
    /// When the order was sent.
    pub since: Millis,
    /// Whether the order is a copy out that frees VRAM already, as the agent reported.
    pub release: VramRelease,
}

/// Progress of a copy out that frees VRAM before it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VramRelease {
    /// The agent has not reported that it frees VRAM.
    #[default]
    NotReported,
    /// The agent reported at this time that it frees VRAM from then on.
    Since(Millis),
    /// A restore into this VRAM has failed, so the report is not believed.
    NotBelieved,
}

impl PendingOrder {
    /// Whether the order may move the process's memory off the GPU.
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
    /// When the controller ordered the process to try the allocation again. `None`: not yet.
    pub resumed_at: Option<Millis>,
}

/// Work of a process on a GPU, from NVML's utilisation samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWork {
    /// When the work was last seen.
    pub at: Millis,
    /// Share of the sample period in which the work ran, in percent.
    pub percent: u32,
}

/// Why a process was ordered to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TerminationCause {
    /// A container with the restore policy `immediate` needs its VRAM.
    Room,
    /// Its container makes no progress, and the container's policy ends it then.
    NoProgress,
}

/// Time between SIGTERM and SIGKILL, in milliseconds.
const GRACE_MS: Millis = 5_000;

/// An order to a process to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Termination {
    /// Why the process is to end.
    pub cause: TerminationCause,
    /// When the process was ordered to end.
    pub since: Millis,
    /// Whether the process was killed, because it did not end in time.
    pub by_force: bool,
}

impl Termination {
    /// Whether the process has had enough time to end, so it is to be killed now.
    #[must_use]
    pub fn is_due(&self, now: Millis) -> bool {
        !self.by_force && now.saturating_sub(self.since) >= GRACE_MS
    }
}

/// The state of one process. Only [`super::Node`] changes it.
#[derive(Clone, Debug)]
pub struct Process {
    /// The container that the process belongs to.
    pub key: Key,
    /// Pid, start time and command of the process, from the kernel.
    pub identity: Identity,
    /// Connection and phase of the process's agent (the library's thread in it), and the known
    /// hazards of the process.
    pub agent: AgentStatus,
    /// The order in progress. `None`: no order is in progress. A process has at most one order in
    /// progress at a time.
    pub pending: Option<PendingOrder>,
    /// The VRAM that the process holds, and the VRAM that it released at its offload.
    pub memory: ProcessMemory,
    /// Kinds of offloads and restores that failed for the process. The controller avoids further
    /// attempts of these kinds.
    pub failed_moves: FailedMoves,
    /// Whether and when the process was ordered to prefault host memory for the next offload.
    pub prefault: PrefaultOrder,
    /// Memory of the host pool that the process may use.
    pub host_pool: HostPoolPermission,
    /// Orders to the process to pause its allocations, and how the process responded to them.
    pub holds: ProcessHolds,
    /// How the process uses its GPU: counters, running work, and time since its restore.
    pub activity: ProcessActivity,
    /// The order to end the process. `None`: the process was not ordered to end.
    pub termination: Option<Termination>,
    /// The process's waiting allocation. `None`: no allocation waits for VRAM.
    pub alloc_wait: Option<PendingAlloc>,
}

/// Connection and phase of a process's agent (the library's thread in it), and the known properties
/// of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentStatus {
    /// Whether the agent has a connection to the controller.
    pub connected: bool,
    /// The phase in the agent's last report.
    pub phase: Phase,
    /// Number of times that the gate of the process has closed.
    pub generation: u64,
    /// Properties of the process that make a checkpoint unsafe, as the agent reported them or as a
    /// failed move has shown.
    pub hazards: Hazards,
    /// Capabilities of the process's library.
    pub capabilities: Capabilities,
}

/// Kinds of offloads and restores that failed for a process. They stay recorded when the process
/// registers again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailedMoves {
    /// Whether the controller must not restore the process on another GPU. True if such a restore
    /// has failed, or if an offload left a part of the memory on the process's own GPU.
    pub migration: bool,
    /// Whether the agent failed to copy the memory. Later offloads then use the driver's
    /// checkpoint.
    pub copy: bool,
    /// Number of offloads in a row in which the process exported its memory to a copier, but no
    /// copier copied this memory.
    pub copier_in_a_row: u32,
}

/// The order to prefault (touch and register) host memory for the next offload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefaultOrder {
    /// Whether the process is under an order to prefault.
    pub ordered: bool,
    /// Start of the idle period in which the process was last ordered to prefault. In each period
    /// it is ordered at most once.
    pub ordered_for_idle: Option<Millis>,
}

/// Orders to a process to pause its allocations, and how the process responded to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessHolds {
    /// Number of reasons why the process pauses its allocations now: one for each grant that
    /// requires the pause, and one while other processes of its container are being restored.
    pub count: u32,
    /// Whether the process pauses its allocations until the other processes of its container are
    /// restored.
    pub for_siblings: bool,
    /// Counts the orders to pause allocations that the process did not follow.
    pub record: HoldRecord,
}

/// How a process uses its GPU: counters, running work, and time since its restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessActivity {
    /// The last reading of the process's counters.
    pub counters: Option<CounterSnapshot>,
    /// Why the counters of the process are ignored permanently. `None`: they are valid.
    pub counter_error: Option<String>,
    /// The work of the process that NVML last saw on a GPU. Such work may run without a CUDA call
    /// in progress.
    pub working: Option<DeviceWork>,
    /// When the process registered or was last restored. 0: it started before this controller.
    pub resident_since: Millis,
    /// When the process was last asked to free the host memory that it keeps. `None`: it was not
    /// asked, or has freed the memory.
    pub kept_asked_at: Option<Millis>,
}

impl ProcessActivity {
    /// Records a reading of the process's counters.
    pub fn set_counters(&mut self, counters: CounterSnapshot) {
        if counters.kept_bytes == 0 {
            self.kept_asked_at = None;
        }
        self.counters = Some(counters);
    }
}

impl Process {
    /// Whether the library of the process has all of these capabilities.
    #[must_use]
    pub fn can(&self, capabilities: Capabilities) -> bool {
        self.agent.capabilities.contains(capabilities)
    }

    /// Whether an order in progress may move the process's memory off the GPU. An order that has
    /// been in progress for `SLOW_MS` is ignored, because it may hang in the driver. The other
    /// processes of the container must not wait for such an order.
    #[must_use]
    pub fn may_leave(&self, now: Millis) -> bool {
        self.pending.is_some_and(|pending| {
            pending.takes_vram_away() && now.saturating_sub(pending.since) < SLOW_MS
        })
    }

    /// Returns the hazards of the kind that still permits a copy out of the process. Some hazards
    /// concern single allocations, which must stay on the GPU. An older library cannot leave them
    /// there, or cannot copy the memory of a client of MPS. With such a library, these hazards are
    /// therefore not returned.
    #[must_use]
    pub fn copyable_hazards(&self) -> Hazards {
        let needs = [
            (Capabilities::LEAVES_IN_PART, Hazards::KEEPS_MEMORY),
            (Capabilities::COPIES_UNDER_MPS, Hazards::MPS),
        ];
        let refused = needs.into_iter().filter(|(capability, _)| !self.can(*capability));
        refused.fold(Hazards::KEEPS_CONTEXT, |left, (_, hazard)| left.without(hazard))
    }

    /// Whether only a part of the memory that the library can copy is copied out, because the driver
    /// failed in the middle of a copy out. The other part is on the GPU.
    #[must_use]
    pub fn is_partly_out(&self) -> bool {
        let swap = &self.memory.swap;
        self.agent.phase == Phase::CopiedOut
            && (1..swap.swappable_bytes).contains(&swap.copied_out_bytes)
    }

    /// Whether the context of the process stays on the GPU because its checkpoint would be unsafe.
    #[must_use]
    pub fn keeps_context(&self) -> bool {
        self.agent.hazards.intersects(Hazards::KEEPS_CONTEXT)
    }

    /// VRAM that the process holds now, in bytes over all GPUs.
    #[must_use]
    pub fn vram_bytes(&self) -> u64 {
        self.memory.vram_bytes()
    }

    /// VRAM that the process released at its offload and needs for its restore. `None`: unknown.
    #[must_use]
    pub fn vram_to_restore(&self) -> Option<Vec<DeviceBytes>> {
        self.memory.to_restore(self.agent.phase)
    }

    /// VRAM that the process released at its offload and needs for its restore, in bytes over all
    /// GPUs. 0: none, or unknown.
    #[must_use]
    pub fn offloaded_vram_bytes(&self) -> u64 {
        self.vram_to_restore().iter().flatten().map(|d| d.bytes).sum()
    }

    /// VRAM that a copy out of the process frees. The CUDA context is not included, because it
    /// stays.
    #[must_use]
    pub fn vram_freed_by_copy(&self) -> Vec<DeviceBytes> {
        self.memory.freed_by_copy()
    }

    /// Records that the process was checkpointed although its copier had not copied its swappable
    /// memory. This memory is still on the GPU. The restore therefore needs VRAM only for the rest,
    /// and must be on the same GPU.
    pub fn record_copy_out_failure(&mut self) {
        self.memory.record_copy_out_failure();
        self.failed_moves.migration = true;
    }

    /// Whether the process's host copy is in the node's host pool.
    #[must_use]
    pub fn uses_host_pool(&self) -> bool {
        let counters = self.activity.counters.as_ref();
        counters.is_some_and(|page| page.notes.intersects(ProcessFlags::HOST_POOL))
    }

    /// Content of the offloaded process that the library copied out, in bytes. Zeros are not
    /// included, because they are not stored. 0: the process is not offloaded. The process counts the
    /// content itself, so the result is limited to the VRAM that NVML reported.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        if !self.agent.phase.is_offloaded() {
            return 0;
        }
        let swap = &self.memory.swap;
        swap.copied_out_bytes.saturating_sub(swap.zero_bytes).min(self.offloaded_vram_bytes())
    }

    /// Content of the offloaded process that is in its disk file and not in host memory, in bytes.
    /// The process counts it itself, so the result is limited to [`Process::content_bytes`].
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        let chunks = self.activity.counters.as_ref().map_or(0, |page| page.disk_chunks);
        u64::from(chunks).saturating_mul(CHUNK_BYTES).min(self.content_bytes())
    }

    /// Host memory that an offload by the method `moves` needs, in bytes. Memory that the driver
    /// allocates for itself is not included. A retained host copy is subtracted if the container is
    /// already charged for it. A copy in the host pool is not subtracted, because the host pool is
    /// charged for it.
    #[must_use]
    pub fn host_need_bytes(&self, moves: OffloadMethod) -> u64 {
        let kept = self.activity.counters.as_ref().map_or(0, |page| page.kept_bytes);
        let kept = if self.uses_host_pool() { 0 } else { kept };
        let vram_bytes = match moves {
            // A copy moves only the swappable memory. All other memory stays on the GPU.
            OffloadMethod::Copy => self.vram_bytes().min(self.memory.swap.swappable_bytes),
            OffloadMethod::DriverCheckpoint | OffloadMethod::CopyAndCheckpoint => self.vram_bytes(),
        };
        let copied = moves != OffloadMethod::DriverCheckpoint && !self.agent.phase.is_offloaded();
        let kept = if copied { kept.min(self.memory.swap.swappable_bytes) } else { 0 };
        vram_bytes.saturating_sub(kept)
    }

    /// Whether a restore on another GPU is in progress.
    #[must_use]
    pub fn is_migrating(&self) -> bool {
        self.pending.is_some_and(|pending| matches!(pending.action, Action::RestoreOnGpu { .. }))
    }
}
