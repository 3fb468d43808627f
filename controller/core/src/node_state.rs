//! The data of a node, as structs. The other files of the core contain the functions that use it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use foldhash::fast::FixedState;
use indexmap::IndexMap;

use super::{
    DeviceBytes, Effect, Key, Millis, ProcessId, Settings,
    container::Container,
    copiers::CopierRegistry,
    disk_step::DiskSteps,
    driver_limit::DriverLimits,
    grant::Grant,
    history::Pauses,
    holds::HoldOrder,
    host_memory::{HostLedger, MemoryPool},
    input::GpuSample,
    ledger::Ledger,
    overrides::OperatorOverrides,
    oversubscription::Oversubscription,
    processes::Processes,
    queue::Queue,
    vram_limit::VramRequests,
};

/// A record of an earlier controller's journal, about a process that has not registered with this
/// controller.
#[derive(Debug, Default)]
pub(super) struct JournalClaim {
    pub(super) offloaded: Vec<DeviceBytes>,
    /// UUID of the target GPU of a migration in progress. `None`: the process is restored on its
    /// own GPU.
    pub(super) to: Option<String>,
    pub(super) restoring: bool,
    /// The pools of host memory that the process's offload uses, each with the full number of bytes
    /// that the offload takes.
    pub(super) host: Vec<MemoryPool>,
    /// The process's VRAM in the last NVML sample, in bytes. `None` before the first sample.
    pub(super) held_bytes: Option<u64>,
}

/// The data of a node. Only the core reads and changes it.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    /// The settings from the configuration of the node.
    pub(super) settings: Settings,
    /// Choices of operators, in addition to the configuration.
    pub(super) overrides: OperatorOverrides,
    pub(super) clock: NodeClock,
    pub(super) registry: NodeRegistry,
    pub(super) gpus: GpuReadings,
    pub(super) admission: Admission,
    /// Promises of host memory to offloads.
    pub(super) host_ledger: HostLedger,
    /// Processes that were permitted to use the host pool. Some of them may have ended, or may have
    /// lost their permission.
    pub(super) host_pool_users: BTreeSet<ProcessId>,
    /// The disk step in progress, and the results of the earlier ones.
    pub(super) disk: DiskSteps,
    pub(super) copiers: CopierRegistry,
    pub(super) prediction: UsePrediction,
    /// Requests for VRAM allowances. Only processes of containers with a VRAM limit send such
    /// requests.
    pub(super) vram_requests: VramRequests,
    /// Limits of VRAM that the driver enforces.
    pub(super) driver_limits: DriverLimits,
    pub(super) output: NodeOutput,
}

/// The time according to the inputs. No part of the core reads a clock.
#[derive(Debug, Default)]
pub(super) struct NodeClock {
    /// When this controller started, in clock ticks. 0: unknown.
    pub(super) started_ticks: u64,
    /// Time of the input that is being handled.
    pub(super) now: Millis,
    /// Wall-clock time at which `now` was 0, in milliseconds since 1970.
    pub(super) unix_ms: i64,
}

/// The containers and processes that the controller knows.
#[derive(Debug, Default)]
pub(super) struct NodeRegistry {
    /// The containers, ordered by key. The map also contains a hash table of the keys, because each
    /// input looks up several containers.
    pub(super) containers: IndexMap<Key, Container, FixedState>,
    pub(super) processes: Processes,
    /// Records of the journal about processes that have not registered, by key, pid and start time.
    pub(super) unclaimed_journal: BTreeMap<(Key, u32, u64), JournalClaim>,
}

/// The last NVML readings of the GPUs, and what was derived from them.
#[derive(Debug, Default)]
pub(super) struct GpuReadings {
    /// The last sample of each GPU that the last reading could read.
    pub(super) samples: Vec<GpuSample>,
    /// The GPUs that the last reading could not read, each with the error. The UUID of such a GPU
    /// is empty if it is unknown.
    pub(super) unreadable: Vec<GpuSample>,
    /// Why the last reading failed. `None`: it succeeded.
    pub(super) error: Option<String>,
    /// Time of the last sample of all GPUs.
    pub(super) read_at: Millis,
    /// Time of the last utilisation sample. `None`: there was no sample, so utilisation is unknown.
    pub(super) utilization_sampled_at: Option<Millis>,
    /// VRAM per GPU that was freed since the last sample of memory.
    pub(super) freed_since_sample: Vec<DeviceBytes>,
    /// VRAM that no registered process held at the last sample of all GPUs. Other samples are no base
    /// for it: they are older or newer than the VRAM that is recorded for the processes.
    pub(super) foreign: Vec<ForeignVram>,
    /// UUIDs of the GPUs on which a container waits for VRAM.
    pub(super) under_pressure: BTreeSet<String>,
    /// The GPUs whose containers want more VRAM than the GPU has.
    pub(super) oversubscription: Oversubscription,
}

/// VRAM of a GPU that no registered process holds.
#[derive(Debug)]
pub(super) struct ForeignVram {
    /// UUID of the GPU.
    pub(super) uuid: String,
    /// Pid of the process that holds it. `None`: the driver, or processes that NVML does not name.
    pub(super) pid: Option<u32>,
    /// Its size in bytes.
    pub(super) bytes: u64,
}

impl GpuReadings {
    /// Why the last reading could not read this GPU. `None`: it could, or it does not list the GPU.
    pub(super) fn error_of(&self, uuid: &str) -> Option<&str> {
        let is_read = || self.samples.iter().any(|gpu| gpu.uuid == uuid);
        let known = self.unreadable.iter().find(|gpu| gpu.uuid == uuid);
        // A GPU without a UUID may be any GPU that was not read.
        let unknown = || self.unreadable.iter().find(|gpu| gpu.uuid.is_empty() && !is_read());
        known.or_else(unknown)?.error.as_deref()
    }
}

/// The containers that wait for VRAM, and the promises and grants of VRAM.
#[derive(Debug, Default)]
pub(super) struct Admission {
    pub(super) queue: Queue,
    /// Buffer for the list of waiters in queue order. It is empty between calls and exists only so
    /// that its allocation is reused.
    pub(super) queue_scratch: Vec<Key>,
    /// Promises of VRAM to waiters and restores.
    pub(super) ledger: Ledger,
    pub(super) grants: BTreeMap<Key, Grant>,
    /// Orders to pause allocations on which the agents have not reported yet. Key: number of the
    /// order.
    pub(super) hold_orders: BTreeMap<u64, HoldOrder>,
    /// Number of the last sample that was requested as a proof of free VRAM.
    pub(super) last_proof: u64,
}

impl Admission {
    /// Whether processes pause their allocations, or copiers their work, for a grant.
    pub(super) fn has_active_grant(&self) -> bool {
        self.grants.values().any(|grant| !grant.is_released)
    }
}

/// What the controller has learned about the use of all containers, to predict their next use.
#[derive(Debug, Default)]
pub(super) struct UsePrediction {
    /// Pauses in the use of all containers. They predict the pauses of a container that has made
    /// few pauses itself.
    pub(super) pauses: Pauses,
    /// Number of prewakes (restores before an expected CUDA call) since the controller started.
    pub(super) prewakes: u64,
    /// Number of prewakes that a call followed.
    pub(super) prewake_hits: u64,
}

/// The results of the input that is being handled.
#[derive(Debug, Default)]
pub(super) struct NodeOutput {
    /// The effects of the input so far, in order.
    pub(super) effects: Vec<Effect>,
    /// Containers for which the next orders must be decided before the handling of this input ends.
    pub(super) resumed: VecDeque<Key>,
    /// Number of the last order to an agent.
    pub(super) last_order: u64,
}
