//! What the node is told.

use affinode_proto::{
    api::control::{ActionResponse, Announcement},
    reason::Reason,
    wire::{Hazards, Phase, counters::CounterSnapshot, message::AgentMessage},
};

use super::{DeviceBytes, Key, Millis, ProcessId, hints::Hint, host_memory::MemoryPool};

/// Number of a request that waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(pub u64);

/// The answer to a request.
pub type Answer = ActionResponse;

/// What a person or program asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Move it out.
    Offload,
    /// Bring it back.
    Restore,
}

/// One device as NVML shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSample {
    /// NVML's index.
    pub index: u32,
    /// NVML's UUID.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Number of its device file, where the driver tells.
    pub minor: Option<u32>,
    /// Cut into MIG instances.
    pub mig: bool,
    /// VRAM in bytes.
    pub total_bytes: u64,
    /// VRAM in use by anybody, in bytes.
    pub used_bytes: u64,
    /// Busy share of the last sample period, in percent.
    pub utilization_percent: u32,
    /// Host pid and VRAM of each compute process.
    pub processes: Vec<(u32, u64)>,
    /// What processes that are away are told when they ask NVML.
    pub figures: GpuFigures,
}

/// Figures of a device that decide nothing. `None`: the driver does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuFigures {
    /// VRAM that the driver keeps for itself, in bytes.
    pub reserved_bytes: u64,
    /// Share of the last sample period in which a kernel ran, in percent.
    pub gpu_percent: Option<u32>,
    /// Share in which memory was read or written, in percent.
    pub memory_percent: Option<u32>,
    /// Degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Milliwatts.
    pub power_mw: Option<u32>,
}

/// Work of a process that ran on a device just now, as NVML shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The device.
    pub uuid: String,
    /// Host pid.
    pub pid: u32,
    /// Share of the last moment, in percent.
    pub percent: u32,
    /// How long ago it was seen, in milliseconds.
    pub age_ms: Millis,
}

/// Who a process is, as the socket and /proc tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Pid in the controller's namespace.
    pub pid: u32,
    /// Start time in clock ticks: with the pid it names one process for ever.
    pub start_ticks: u64,
    /// `comm` of the process, for people.
    pub command: String,
}

/// Device memory that an agent copies by itself, by its own word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapStatus {
    /// What it can copy, in bytes.
    pub swappable_bytes: u64,
    /// What of it is in host memory, in bytes.
    pub copied_out_bytes: u64,
    /// What the last move out did not have to copy, in bytes.
    pub unchanged_bytes: u64,
    /// What it did not store, because it is all zero.
    pub zero_bytes: u64,
}

/// What was found out about a container before a step that depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Devices, read now. `Err`: why they cannot be read.
    pub gpus: Result<Vec<GpuSample>, String>,
    /// The pools of host memory that its offload draws on. `Err`: what speaks against an offload,
    /// or why they cannot be read.
    pub host: Result<Vec<MemoryPool>, (Reason, String)>,
}

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// A shim announced a container (again).
    Announced(Box<Announcement>, Key),
    /// The container is gone.
    Withdrawn(Key),
    /// A process said Hello with good papers.
    Joined {
        /// Its container.
        key: Key,
        /// Number of the connection; a process that comes back has a new one.
        process: ProcessId,
        /// Who it is.
        identity: Identity,
        /// Where it stands.
        phase: Phase,
        /// Times its gate closed.
        generation: u64,
        /// What makes a checkpoint unsafe.
        hazards: Hazards,
        /// What its agent can copy, and has copied.
        carried: SwapStatus,
    },
    /// The connection ended; the process may live.
    Detached(ProcessId),
    /// The process ended.
    Exited(ProcessId),
    /// It sent a message (Hello excepted).
    Message(ProcessId, AgentMessage),
    /// Its page was read.
    Page(ProcessId, CounterSnapshot),
    /// Its page cannot be read or understood: its container overwrote it.
    BadPage(ProcessId, String),
    /// Devices were read.
    Gpus(Result<Vec<GpuSample>, String>),
    /// All work that ran on devices just now.
    Worked(Vec<Work>),
    /// What [`super::Effect::Survey`] asked for.
    Surveyed(Key, Survey),
    /// What [`super::Effect::Prove`] asked for.
    Proven(Key, u64, Result<Vec<GpuSample>, String>),
    /// What the journal of an earlier controller says of a process.
    Recalled {
        /// The container.
        key: Key,
        /// Pid and start time.
        identity: (u32, u64),
        /// VRAM that it will need.
        away: Vec<DeviceBytes>,
        /// The GPU that it may be restored on, if not where it was.
        to: Option<String>,
        /// Whether it was told to take that VRAM, and may be doing so now.
        restoring: bool,
    },
    /// A person or program asks.
    Command(CommandId, Key, Request),
    /// The container is said to be idle or busy; who says so.
    Hinted(Key, Hint, String),
    /// How many connections have come in at the network of a container that is out; `None`:
    /// it has none of its own.
    Connections(Key, Option<u64>),
    /// Time passed for one container: a [`Input::Tick`] that leaves the others alone.
    Due(Key),
    /// Time passed.
    Tick,
}
