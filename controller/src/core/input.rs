//! Inputs of the node: all events that decisions depend on.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Capabilities, Hazards, Phase, copier::CopierReport, counters::CounterSnapshot,
        message::AgentMessage,
    },
};

use super::{
    ContainerSpec, DeviceBytes, Key, Millis, ProcessId, copiers::CopierId, copy_watch::Levels,
    hints::Hint, host_memory::MemoryPool, node::Settings, overrides::OperatorOverrides,
};

/// Number of a request that waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(pub u64);

/// The response to a request of an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionResult {
    /// Whether the request was carried out.
    pub done: bool,
    /// State of the container; `None`: there is no such container.
    pub state: Option<State>,
    /// Why the container is in that state.
    pub reason: Option<Reason>,
    /// The reason in plain text.
    pub text: String,
    /// VRAM that was moved, in bytes; 0 if none was.
    pub bytes: u64,
    /// Duration of the move, in milliseconds.
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

/// One GPU as NVML shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSample {
    /// Index of the GPU in NVML.
    pub index: u32,
    /// UUID of the GPU in NVML.
    pub uuid: String,
    /// Product name, such as "NVIDIA H200".
    pub name: String,
    /// Number of its device file; `None` if the driver does not report it.
    pub minor: Option<u32>,
    /// Whether the GPU is in MIG mode.
    pub mig: bool,
    /// Size of its VRAM in bytes.
    pub total_bytes: u64,
    /// VRAM in use by all processes and the driver, in bytes.
    pub used_bytes: u64,
    /// Utilisation in the last sample period, in percent.
    pub utilization_percent: u32,
    /// Host pid and VRAM bytes of each compute process.
    pub processes: Vec<(u32, u64)>,
    /// Figures that offloaded processes get when they ask NVML.
    pub figures: GpuFigures,
}

/// Figures of a GPU that no decision depends on. `None`: the driver does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuFigures {
    /// VRAM that the driver keeps for itself, in bytes.
    pub reserved_bytes: u64,
    /// Share of the last sample period in which a kernel ran, in percent.
    pub gpu_percent: Option<u32>,
    /// Share in which VRAM was read or written, in percent.
    pub memory_percent: Option<u32>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Power draw in milliwatts.
    pub power_mw: Option<u32>,
}

/// Recent work of a process on a GPU, by NVML utilisation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// UUID of the GPU.
    pub uuid: String,
    /// Pid on the host.
    pub pid: u32,
    /// Share of the sample, in percent.
    pub percent: u32,
    /// Age of the sample, in milliseconds.
    pub age_ms: Millis,
}

/// Identity of a process, from the socket's credentials and /proc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Pid in the controller's namespace.
    pub pid: u32,
    /// Start time in clock ticks. With the pid it identifies the process for ever.
    pub start_ticks: u64,
    /// `comm` of the process, for display.
    pub command: String,
}

/// Swappable memory of a process, as its agent reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapStatus {
    /// Memory that the agent can copy, in bytes.
    pub swappable_bytes: u64,
    /// Part of it that is in host memory, in bytes.
    pub copied_out_bytes: u64,
    /// Part that the last offload did not have to copy because it was unchanged, in bytes.
    pub unchanged_bytes: u64,
    /// Part that was not stored because it is all zero, in bytes.
    pub zero_bytes: u64,
}

/// Result of a survey before a step of an offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Samples of the GPUs. `Err`: why they cannot be read.
    pub gpus: Result<Vec<GpuSample>, String>,
    /// Pools of host memory that the offload draws on. `Err`: the reason against an offload, or
    /// why the pools cannot be read.
    pub host: Result<Vec<MemoryPool>, (Reason, String)>,
}

/// An input of the node.
#[derive(Clone, Debug)]
pub enum Input {
    /// This controller started at this time, in clock ticks. No earlier controller can have moved a
    /// process that started later.
    Started(u64),
    /// The wall clock now, in milliseconds since 1970: offload windows are times of the week.
    Clock(i64),
    /// The settings changed. Policies of known containers are resolved again.
    Reconfigured(Box<Settings>),
    /// The overrides of operators that hold from now on.
    Overridden(OperatorOverrides),
    /// When a container is used next. Only a simulation knows this time.
    Foreseen(Key, Option<Millis>),
    /// A shim announced a container, perhaps again.
    Announced(Box<ContainerSpec>, Key),
    /// The container was deleted.
    Withdrawn(Key),
    /// A process registered with valid credentials.
    Joined {
        /// The container of the process.
        key: Key,
        /// Number of the connection; a process that reconnects has a new one.
        process: ProcessId,
        /// Pid, start time and command.
        identity: Identity,
        /// Phase that the agent reports.
        phase: Phase,
        /// Number of times its gate has closed.
        generation: u64,
        /// Hazards: what makes a checkpoint unsafe.
        hazards: Hazards,
        /// What its library can do; nothing else is ordered.
        capabilities: Capabilities,
        /// What its agent can copy, and has copied.
        swap: SwapStatus,
    },
    /// The connection ended; the process may still live.
    Detached(ProcessId),
    /// The process has ended.
    Exited(ProcessId),
    /// The agent sent a message other than Hello.
    Message(ProcessId, AgentMessage),
    /// The counters of a process were read.
    Page(ProcessId, CounterSnapshot),
    /// The counters of a process are invalid, with the reason: its container overwrote them.
    BadPage(ProcessId, String),
    /// All GPUs were sampled.
    Gpus(Result<Vec<GpuSample>, String>),
    /// NVML utilisation of all processes.
    Worked(Vec<Work>),
    /// A copier reported.
    CopierReport(CopierId, CopierReport),
    /// The connection of a copier ended, or it could not be started.
    CopierEnded(CopierId),
    /// The process of a copier has exited, or was never started: it holds no memory.
    CopierExited(CopierId),
    /// A process of [`super::Effect::AttachCopier`] has no connection to its copier.
    NotAttached(ProcessId),
    /// The result of [`super::Effect::Survey`].
    Surveyed(Key, Survey),
    /// Free host memory for copies out in progress, by level. The counters of their processes were
    /// read after it.
    HostLevels(Vec<Levels>),
    /// The result of [`super::Effect::Prove`] with this number.
    Proven(Key, u64, Result<Vec<GpuSample>, String>),
    /// A record of an earlier controller's journal about a process.
    Recalled {
        /// The container of the process.
        key: Key,
        /// Pid and start time.
        identity: (u32, u64),
        /// VRAM that the process needs for its restore.
        offloaded: Vec<DeviceBytes>,
        /// UUID of the GPU of a migration in progress; `None`: it returns to its own GPU.
        to: Option<String>,
        /// Whether a restore was ordered, so that it may be running now.
        restoring: bool,
        /// The pools of host memory that its offload takes from, in full: it may be in progress.
        host: Vec<MemoryPool>,
    },
    /// An operator or a program requests something.
    Command(CommandId, Key, Request),
    /// A hint, with its source for the event.
    Hinted(Key, Hint, String),
    /// Number of connections accepted so far in the network of an offloaded container. `None`: the
    /// container has no network of its own.
    Connections(Key, Option<u64>),
    /// Time passed for one container: an [`Input::Tick`] without the other containers.
    Due(Key),
    /// Time passed for all containers.
    Tick,
}
