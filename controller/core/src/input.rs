//! Inputs of the node. The node's decisions depend on nothing else.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Capabilities, Hazards, Phase,
        copier::CopierReport,
        counters::CounterSnapshot,
        message::{AgentMessage, Outcome},
    },
};

use super::{
    ContainerSpec, DeviceBytes, Key, Millis, ProcessId,
    copiers::CopierId,
    copy_watch::Levels,
    driver_limit::DriverLimitOutcome,
    hints::Hint,
    host_memory::{MemoryPool, SurveyedMemory},
    node::Settings,
    overrides::OperatorOverrides,
};

/// Number that identifies an operator's request while the request waits for its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(pub u64);

/// The response to a request of an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionResult {
    /// Whether the request was carried out successfully.
    pub done: bool,
    /// State of the container. `None`: the container does not exist.
    pub state: Option<State>,
    /// Why the container is in that state.
    pub reason: Option<Reason>,
    /// The reason in plain text.
    pub text: String,
    /// Amount of VRAM that was moved, in bytes. 0: no VRAM was moved.
    pub bytes: u64,
    /// Duration of the offload or restore, in milliseconds.
    pub elapsed_ms: Millis,
}

/// A request of an operator or a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Offload the container now.
    Offload,
    /// Restore the container now.
    Restore,
}

/// NVML's reading of one GPU, including the VRAM of its processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSample {
    /// Index of the GPU in NVML.
    pub index: u32,
    /// UUID of the GPU in NVML.
    pub uuid: String,
    /// Product name, such as "NVIDIA H200".
    pub name: String,
    /// Number of the GPU's device file; `None` if the driver does not report it.
    pub minor: Option<u32>,
    /// Whether the GPU is in MIG mode.
    pub mig: bool,
    /// Size of the VRAM in bytes.
    pub total_bytes: u64,
    /// VRAM in use by all processes and the driver, in bytes.
    pub used_bytes: u64,
    /// Utilisation in the last sample period, in percent.
    pub utilization_percent: u32,
    /// Host pid and VRAM bytes of each compute process.
    pub processes: Vec<(u32, u64)>,
    /// Figures that are sent to offloaded processes that query NVML.
    pub figures: GpuFigures,
    /// Why NVML cannot read this GPU. In that case only `index` and `uuid` are set, and `uuid` is
    /// empty if it is unknown too. `None`: the sample is complete.
    pub error: Option<String>,
}

/// Figures of a GPU that have no influence on decisions. A field is `None` if the driver does not
/// report its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuFigures {
    /// VRAM that the driver reserves for itself, in bytes.
    pub reserved_bytes: u64,
    /// Share of the last sample period in which a kernel ran, in percent.
    pub gpu_percent: Option<u32>,
    /// Share of the last sample period in which VRAM was read or written, in percent.
    pub memory_percent: Option<u32>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Power draw in milliwatts.
    pub power_mw: Option<u32>,
}

/// Recent work of a process on a GPU, from NVML's utilisation samples per process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// UUID of the GPU.
    pub uuid: String,
    /// Pid on the host.
    pub pid: u32,
    /// Share of the sample period in which the work ran, in percent.
    pub percent: u32,
    /// Age of the sample, in milliseconds.
    pub age_ms: Millis,
}

/// Identity of a process, from the socket's credentials and /proc.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Pid in the controller's namespace.
    pub pid: u32,
    /// Start time in clock ticks. Together, pid and start time identify the process uniquely.
    pub start_ticks: u64,
    /// Command name of the process (`comm` in /proc), for display.
    pub command: String,
    /// Path of the memory cgroup of the process, in the form of
    /// [`MemoryPlace::Cgroup`](super::host_memory::MemoryPlace::Cgroup). Empty: unknown.
    pub memory_cgroup: String,
}

/// Swappable memory of a process, as its agent reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapStatus {
    /// Memory that the agent can copy to the host, in bytes.
    pub swappable_bytes: u64,
    /// The part of the swappable memory that is in host memory, in bytes.
    pub copied_out_bytes: u64,
    /// Swappable memory that the last offload did not copy because its content was unchanged, in
    /// bytes.
    pub unchanged_bytes: u64,
    /// Swappable memory that the last offload did not store because its content is all zero, in
    /// bytes.
    pub zero_bytes: u64,
    /// Local memory (stacks and spilled registers of the GPU's threads) that the process's contexts
    /// released at the offload and allocate again at the restore, in bytes.
    pub local_memory_bytes: u64,
}

impl SwapStatus {
    /// Returns an agent's report on an order, with this memory status. `outcome` states whether the
    /// agent carried out the order.
    #[must_use]
    pub fn report(
        self,
        order: u64,
        outcome: Outcome,
        phase: Phase,
        cuda_error: u32,
    ) -> AgentMessage {
        AgentMessage::Report {
            order,
            outcome,
            phase,
            cuda_error,
            elapsed_us: 0,
            swappable_bytes: self.swappable_bytes,
            copied_out_bytes: self.copied_out_bytes,
            unchanged_bytes: self.unchanged_bytes,
            zero_bytes: self.zero_bytes,
            local_memory_bytes: self.local_memory_bytes,
        }
    }
}

/// Result of a survey: the readings of GPUs and host memory before a step of an offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Samples of the GPUs. `Err`: the reason why they cannot be read.
    pub gpus: Result<Vec<GpuSample>, String>,
    /// Pools of host memory from which the offload takes memory. `Err`: the reason not to offload,
    /// or the error with which the pools could not be read.
    pub host: Result<SurveyedMemory, (Reason, String)>,
}

/// Everything that the node receives from outside: reports of shims and agents, readings, settings,
/// commands and the time.
#[derive(Clone, Debug)]
pub enum Input {
    /// The start time of this controller, in clock ticks. No earlier controller has moved a process
    /// that started later.
    Started(u64),
    /// The present wall-clock time, in milliseconds since 1970. It is needed because offload
    /// windows are times of the week.
    Clock(i64),
    /// The settings changed. Policies of known containers are resolved again.
    Reconfigured(Box<Settings>),
    /// The operators' choices that apply from now on, such as pinned containers.
    Overridden(OperatorOverrides),
    /// Time of a container's next use, `None` if there is none. Only simulations know and send it.
    Foreseen(Key, Option<Millis>),
    /// A shim announced a container, for the first time or again.
    Announced(Box<ContainerSpec>, Key),
    /// The container was deleted.
    Withdrawn(Key),
    /// A process registered with the controller, with valid credentials.
    Joined {
        /// The container of the process.
        key: Key,
        /// Number that identifies the connection. A process that reconnects gets a new number.
        process: ProcessId,
        /// Pid, start time and command.
        identity: Identity,
        /// Phase that the agent reports.
        phase: Phase,
        /// Number of times that the gate of the process has closed.
        generation: u64,
        /// Properties of the process that make a checkpoint unsafe.
        hazards: Hazards,
        /// Capabilities of the process's library. Orders that need other capabilities are not sent.
        capabilities: Capabilities,
        /// Memory that the agent can copy, and memory that it has copied.
        swap: SwapStatus,
    },
    /// The connection of a process ended. The process may still run.
    Detached(ProcessId),
    /// The process has ended, so that it holds no memory.
    Exited(ProcessId),
    /// The agent sent a message other than Hello.
    Message(ProcessId, AgentMessage),
    /// The counters of a process's CUDA calls were read.
    Page(ProcessId, CounterSnapshot),
    /// The counters of a process cannot be used, because the process or its container has
    /// overwritten them. The text describes the error.
    BadPage(ProcessId, String),
    /// NVML read all GPUs. `Err`: why the reading failed.
    Gpus(Result<Vec<GpuSample>, String>),
    /// NVML's utilisation samples of all processes were read.
    Worked(Vec<Work>),
    /// A copier sent a report.
    CopierReport(CopierId, CopierReport),
    /// The connection of a copier ended, or the copier could not be started.
    CopierEnded(CopierId),
    /// The process of a copier has exited, or was never started. The copier holds no memory.
    CopierExited(CopierId),
    /// A process got no connection to its copier, although [`super::Effect::AttachCopier`]
    /// requested one.
    NotAttached(ProcessId),
    /// The process got a new connection to the host pool, for example because the host pool was
    /// started again. The file of the connection is empty.
    HostPoolConnected(ProcessId),
    /// The result of [`super::Effect::Survey`].
    Surveyed(Key, Survey),
    /// Free host memory of each pool, for copy outs in progress. The copies' progress was read
    /// after the free memory.
    HostLevels(Vec<Levels>),
    /// Result of the GPU reading for a grant. [`super::Effect::Prove`] with the same number
    /// requested this reading.
    Proven(Key, u64, Result<Vec<GpuSample>, String>),
    /// The result of [`super::Effect::ReadVram`].
    VramRead {
        /// The container with a VRAM limit.
        key: Key,
        /// Number of the recall of allowances, as in [`super::Effect::ReadVram`].
        epoch: u64,
        /// Pending bytes of each process whose allowance was recalled: the allocations that it
        /// began under that allowance. They were read after the recall and before the GPUs.
        pending: Vec<(ProcessId, u64)>,
        /// Samples of the GPUs. `Err`: the reason why they cannot be read.
        gpus: Result<Vec<GpuSample>, String>,
    },
    /// The result of [`super::Effect::LimitInDriver`] for a container.
    DriverLimited(Key, DriverLimitOutcome),
    /// A record of an earlier controller's journal about a process.
    Recalled {
        /// The container to which the process belongs.
        key: Key,
        /// Pid and start time of the process.
        identity: (u32, u64),
        /// VRAM that the process needs for its restore.
        offloaded: Vec<DeviceBytes>,
        /// UUID of the target GPU of a migration in progress. `None`: the process is restored on
        /// its own GPU.
        to: Option<String>,
        /// Whether the earlier controller ordered a restore of the process, which may be running
        /// now.
        restoring: bool,
        /// The pools of host memory that the process's offload uses. Each pool has the full number
        /// of bytes that the offload takes, because the offload may be in progress.
        host: Vec<MemoryPool>,
    },
    /// A request of an operator or a program.
    Command(CommandId, Key, Request),
    /// A hint that a container is idle or busy. The text names the hint's source and appears in the
    /// event.
    Hinted(Key, Hint, String),
    /// Number of connections that an offloaded container's network has accepted so far. `None`: the
    /// container uses the node's network.
    Connections(Key, Option<u64>),
    /// The controller should make the decisions that are due for one container. Like
    /// [`Input::Tick`], but other containers are not examined.
    Due(Key),
    /// The controller should make the decisions that are due for all containers.
    Tick,
}

impl Input {
    /// The samples of GPUs in the input, if it has any.
    pub(super) fn samples_mut(&mut self) -> Option<&mut Vec<GpuSample>> {
        match self {
            Input::Gpus(gpus)
            | Input::Proven(_, _, gpus)
            | Input::VramRead { gpus, .. }
            | Input::Surveyed(_, Survey { gpus, .. }) => gpus.as_mut().ok(),
            _ => None,
        }
    }
}
