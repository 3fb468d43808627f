//! Frames between an agent and the controller: 128 bytes each, little endian, on a Unix stream
//! socket. Bytes 0..4 are the magic, 4..8 the kind. The fields follow in order, and all remaining
//! bytes are zero. The Hello has the descriptor of the counters (`SCM_RIGHTS`).
//!
//! ```text
//! agent                                    controller
//!   Hello + counters fd ───────────────────>
//!                    <──────────────────────  Welcome | Refuse
//!                    <──────────────────────  Order(Close), Order(Lock), [Order(CopyOut)], [Order(Checkpoint)]
//!   Report (one per order)  ───────────────>
//!   Wake (at once, then every second) ─────>
//!                    <──────────────────────  WakeAck, later Order(Restore), [Order(Unlock)], Order(Open)
//!   AllocWait ─────────────────────────────>   an allocation found no VRAM and waits
//!                    <──────────────────────  AllocGrant: try again now, or fail
//!   AllocWaitDone ─────────────────────────>
//!   AskVram ───────────────────────────────>   the allowance of a container with a VRAM limit is used up
//!                    <──────────────────────  VramAllowance
//!   VramTaken ─────────────────────────────>
//!   Releasing ─────────────────────────────>   the copy out in progress frees VRAM from now on
//!                    <──────────────────────  SampleCalls, repeatedly: record calls into the counters
//!   AskReadings ───────────────────────────>   NVML is called in an offloaded process
//!                    <──────────────────────  Reading, one per GPU
//! ```

pub use super::action::{Action, CopyOptions};
pub use super::frame::{FRAME_BYTES, FRAME_MAGIC, FrameError};
use super::frame::{Reader, Writer};
use super::{Capabilities, Engine, Hazards, Phase, wire_enum};

/// Interval at which an agent repeats its Wake message while a CUDA call waits, in milliseconds.
pub const WAKE_REPEAT_MS: u64 = 1_000;
/// Time after which an agent with waiting CUDA calls restores its process without the controller,
/// in milliseconds. The time begins with the first Wake that gets no reply, or with the loss of the
/// controller.
pub const RESCUE_AFTER_MS: u64 = 5_000;
/// Maximum age of the controller's proof that VRAM is free, in milliseconds. The agent does not
/// execute an older restore order, because another process may use the VRAM by then: a process
/// restores itself [`RESCUE_AFTER_MS`] after its first Wake without a reply. This maximum plus the
/// time between two Wakes ([`WAKE_REPEAT_MS`]) is less than [`RESCUE_AFTER_MS`].
pub const PROOF_TTL_MS: u64 = 3_000;

/// Time after the controller's decision until which a copy in waits for VRAM that another process
/// frees ([`Action::RestoreAsFreed`]), in milliseconds. It is less than [`RESCUE_AFTER_MS`]: if the
/// controller ends, other processes restore themselves into VRAM that they find free, and no copy in
/// may take it from them meanwhile.
pub const AWAIT_VRAM_MS: u64 = 4_500;
const _: () = assert!(PROOF_TTL_MS < AWAIT_VRAM_MS && AWAIT_VRAM_MS < RESCUE_AFTER_MS);

wire_enum! {
    /// Outcome of an order, which the agent reports to the controller.
    pub enum Outcome {
        /// The agent executed the order. The report has the new phase.
        Done = 0,
        /// The deadline passed, because calls in progress did not end or the driver did not lock
        /// the process. In the report of a lock or copy out, this outcome can also mean that
        /// another thread holds the dynamic loader's lock ([`BUSY_LOADER`]) or, for a lock, is
        /// inside NVML ([`BUSY_NVML`]). The agent undid every step.
        Busy = 1,
        /// The order is not valid in the current phase. The agent did nothing.
        WrongPhase = 2,
        /// The driver returned an error (see `cuda_error`). The report has the phase in which the
        /// process is now.
        DriverError = 3,
        /// The process's libcuda has no checkpoint entry points. The agent did nothing.
        Unsupported = 4,
        /// The order allocates VRAM and arrived more than [`PROOF_TTL_MS`] after the controller's
        /// decision. The agent did nothing.
        Late = 5,
        /// The order is a checkpoint, but the process has memory imported from a copier, which the
        /// driver could not restore. The agent did nothing.
        Imported = 6,
        /// The order is a migration, but the process cannot reach every GPU of the node, or its
        /// driver does not support migration. The agent did nothing.
        Unreachable = 7,
        /// The copier did not copy the memory during the checkpoint. The phase is Checkpointed, but
        /// the swappable memory is still on the GPU, and only descriptors of the process keep it
        /// allocated. A restore needs VRAM only for the memory that was checkpointed.
        NotCopied = 8,
        /// Other processes used the host memory that the copy out needs, so the agent cancelled the
        /// copy out and undid it.
        NoHostMemory = 9,
        /// The controller gave up the offload while the memory was copied out, so the agent
        /// cancelled the copy out and undid it.
        GivenUp = 10,
    }
}

/// Special value of `cuda_error` in the report of a lock. The outcome is [`Outcome::Busy`], because
/// a thread is inside NVML. The driver does not use this value.
pub const BUSY_NVML: u32 = 0xffff_0003;
/// Special value of `cuda_error` in the report of a lock or copy out. The outcome is
/// [`Outcome::Busy`], because another thread holds the dynamic loader's lock. The driver does not
/// use this value.
pub const BUSY_LOADER: u32 = 0xffff_0002;

/// Special value of `cuda_error` in the report of a restore. The outcome is
/// [`Outcome::DriverError`], because the disk did not return content that was moved there. The
/// content may become readable again. The driver does not use this value.
pub const DISK_UNREADABLE: u32 = 0xffff_0005;

/// Maximum number of GPUs on a node. On a node with more GPUs, no container is migrated.
pub const MAX_GPUS: usize = 32;
/// Maximum number of GPUs in one [`ControllerMessage::Gpus`] frame.
pub const GPUS_PER_FRAME: usize = 5;
/// Value of `free_bytes` in [`ControllerMessage::VramAllowance`] if the limit does not apply to the
/// GPU. The sum of this value and a real size does not overflow.
pub const UNLIMITED_VRAM_BYTES: u64 = u64::MAX >> 1;

/// Identity of one GPU of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// UUID of the GPU, as the driver reports it.
    pub uuid: [u8; 16],
    /// Minor number of the device file `/dev/nvidia<minor>`.
    pub minor: u32,
}

/// Value of a field of [`GpuReading`] that the controller could not read.
pub const UNKNOWN_UTILIZATION: u32 = u32::MAX;

/// Values of a GPU that the controller last read from NVML.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuReading {
    /// UUID of the GPU, as the driver reports it.
    pub uuid: [u8; 16],
    /// Size of the GPU's VRAM in bytes.
    pub total_bytes: u64,
    /// VRAM of the GPU that is free, in bytes.
    pub free_bytes: u64,
    /// VRAM that the driver reserves, in bytes.
    pub reserved_bytes: u64,
    /// Share of the last sample period in which a kernel ran, in percent. [`UNKNOWN_UTILIZATION`]
    /// if it is not known.
    pub gpu_percent: u32,
    /// Share of the last sample period in which memory of the GPU was read or written, in percent.
    /// [`UNKNOWN_UTILIZATION`] if it is not known.
    pub memory_percent: u32,
    /// Temperature of the GPU in degrees Celsius. [`UNKNOWN_UTILIZATION`] if it is not known.
    pub temperature_c: u32,
    /// Power draw of the GPU in milliwatts. [`UNKNOWN_UTILIZATION`] if it is not known.
    pub power_mw: u32,
}

/// Messages from the agent to the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentMessage {
    /// Registers the process: the first message of a connection. It is sent together with the
    /// descriptor of the counters.
    Hello {
        /// Protocol version of the library ([`super::WIRE_VERSION`]).
        version: u32,
        /// Process id in the process's own pid namespace. The controller gets the host's process id
        /// from the socket's credentials.
        pid_in_namespace: u32,
        /// Phase of the process when it connects. It can differ from Open if an earlier controller
        /// crashed.
        phase: Phase,
        /// Number of times that the process's gate has closed.
        generation: u64,
        /// Driver version from `cuDriverGetVersion`. 0 means not known yet.
        driver_version: u32,
        /// Facts about the process that make a checkpoint unsafe.
        hazards: Hazards,
        /// Capabilities of this library. Libraries of the same version can differ in them. Older
        /// libraries send none.
        abilities: Capabilities,
        /// Device memory that the agent can copy, in bytes.
        swappable_bytes: u64,
        /// The part of `swappable_bytes` that is copied out to host memory.
        copied_out_bytes: u64,
        /// VRAM for local memory (stacks and spilled registers) that the contexts have released and
        /// need again at the restore, in bytes. 0 for older libraries.
        local_memory_bytes: u64,
    },
    /// Reports that a CUDA call waits at the gate, because the process is not in the phase Open or
    /// its allocations are paused. The agent repeats it every [`WAKE_REPEAT_MS`] while any call
    /// waits.
    Wake {
        /// Generation of the closed gate: the number of times that it has closed.
        generation: u64,
        /// Number of CUDA calls that wait at the gate.
        waiters: u32,
        /// Number of the hook that the waiting call entered.
        hook: u32,
    },
    /// Reports the outcome of an order.
    Report {
        /// Number of the order that the controller sent.
        order: u64,
        /// Outcome of the order.
        outcome: Outcome,
        /// Phase of the process after the order.
        phase: Phase,
        /// Result code of the driver. 0 if no driver call was made.
        cuda_error: u32,
        /// Time that the agent needed for the order, in microseconds.
        elapsed_us: u64,
        /// Device memory that the agent can copy, in bytes.
        swappable_bytes: u64,
        /// The part of `swappable_bytes` that is copied out to host memory now.
        copied_out_bytes: u64,
        /// Bytes that the last CopyOut did not copy because host memory had the same content.
        unchanged_bytes: u64,
        /// Bytes that the last CopyOut did not store because they are all zero.
        zero_bytes: u64,
        /// VRAM for local memory (stacks and spilled registers) that the contexts have released and
        /// need again at the restore, in bytes. 0 for older libraries.
        local_memory_bytes: u64,
    },
    /// Reports that the agent found new hazards (facts that make a checkpoint unsafe).
    Notice {
        /// All hazards that the agent has found so far.
        hazards: Hazards,
    },
    /// Reports that an allocation found no VRAM, and waits in the library until VRAM is free. The
    /// agent sends this message again after each failed attempt and after each Welcome. It sends
    /// the message only if the last [`ControllerMessage::Welcome`] allows such waits.
    AllocWait {
        /// Number of the allocation, unique in the process.
        ticket: u64,
        /// Requested size in bytes. 0 if only the driver knows the size (of a context or a module).
        bytes: u64,
        /// UUID of the GPU, from `cuDeviceGetUuid`.
        uuid: [u8; 16],
        /// Number of failed attempts after the allocation's first attempt.
        attempts: u32,
    },
    /// Reports that an allocation no longer waits, because it succeeded or failed.
    AllocWaitDone {
        /// Number of the allocation, as in its AllocWait.
        ticket: u64,
        /// Whether the allocation succeeded.
        served: bool,
    },
    /// Requests a new allowance for a process of a container with a VRAM limit. The agent repeats
    /// the message after each Welcome until it has a reply. The reply is a
    /// [`ControllerMessage::VramAllowance`].
    AskVram {
        /// Number of the request. A reply answers all requests for the GPU up to its number.
        ticket: u32,
        /// Bytes that the process is about to allocate; 0: the process requests only the free
        /// amount.
        bytes: u64,
        /// UUID of the GPU, from `cuDeviceGetUuid`.
        uuid: [u8; 16],
    },
    /// Reports that an allocation no longer needs the reply to its AskVram: the allocation has used
    /// the allowance, or the allowance is too small. The controller then serves the next process of
    /// the container.
    VramTaken,
    /// Reports that the copy out in progress cannot be cancelled any more, and frees VRAM piece by
    /// piece from now on. The agent sends this message at most once in a copy out, and only if
    /// [`CopyOptions::release_early`] was ordered.
    Releasing,
    /// Requests readings of the GPUs, with which the library answers NVML calls itself while the
    /// process is locked or checkpointed. NVML would block such calls. The reply is a
    /// [`ControllerMessage::Reading`] for each GPU.
    AskReadings,
}

/// Messages from the controller to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerMessage {
    /// Accepts the registration: the controller manages the process from now on.
    Welcome {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Maximum time that an allocation waits for VRAM, in milliseconds. 0 means that the
        /// allocation fails at once, as without Affinode.
        wait_for_room_ms: u32,
        /// Engine (method of offload) for memory that the process allocates from now on. The first
        /// allocation of a process waits until the library has received this message.
        engine: Engine,
        /// Limit of the container's VRAM on each GPU, in bytes. 0: there is no limit. Always 0 for
        /// a library without [`Capabilities::LIMITS_VRAM`].
        vram_limit_bytes: u64,
    },
    /// Refuses the registration: the process is not managed and runs as without Affinode. The
    /// controller then closes the connection. The agent connects again only if `retry` is true.
    Refuse {
        /// Protocol version of the controller ([`super::WIRE_VERSION`]).
        version: u32,
        /// Whether another attempt to register can succeed.
        retry: bool,
    },
    /// Orders the agent to execute an action. The agent executes orders one at a time, in the
    /// sequence in which they arrive.
    Order {
        /// Number of the order, which the agent repeats in its report.
        order: u64,
        /// Action that the agent must execute.
        action: Action,
        /// Time at which the controller decided on the order, in milliseconds of `CLOCK_MONOTONIC`
        /// in the process's time namespace. 0 means unknown.
        decided_ms: u64,
    },
    /// Confirms that the controller has received a Wake message.
    WakeAck {
        /// Generation of the closed gate, as in the Wake message.
        generation: u64,
        /// Position of the container in the queue for VRAM. 0 means that the process is being
        /// restored now.
        position: u32,
    },
    /// Replies to an [`AgentMessage::AllocWait`]: the allocation is tried again or fails.
    AllocGrant {
        /// Number of the allocation, as in its AllocWait.
        ticket: u64,
        /// Whether VRAM is free now, so that the allocation is tried again. If false, the
        /// allocation fails.
        granted: bool,
    },
    /// Starts or stops the recording of CUDA calls into the counters. The recording also stops when
    /// the connection ends. Sent only to a library with [`Capabilities::RECORDS_CALLS`].
    SampleCalls {
        /// Sampling rate: about one CUDA call in this many is recorded. 0 means that no call is
        /// recorded.
        one_in: u32,
        /// Number of the first record that the controller has not read. The library may overwrite
        /// the places of earlier records in the ring.
        read: u64,
    },
    /// Delivers a socket that is connected to a copier, for the next checkpoint and its restore.
    /// Sent only to a library with [`Capabilities::USES_COPIER`].
    Copier,
    /// Delivers a socket that is connected to the [`host_pool`](super::host_pool), for the next
    /// copy outs with [`CopyOptions::host_pool`]. Sent only to a library with
    /// [`Capabilities::USES_HOST_POOL`].
    HostPool,
    /// Requests the agent to free the host memory that it keeps while the process is resident,
    /// because an offload of another container needs it. Sent only to a library with
    /// [`Capabilities::FREES_HOST_MEMORY`].
    FreeHostMemory,
    /// Requests the agent to prefault memory of the host pool for the next copy out: to have its pages
    /// allocated, and to register them with the driver. [`ControllerMessage::FreeHostMemory`] and the
    /// end of the connection end the prefault. Sent only to a library with
    /// [`Capabilities::PREFAULTS_HOST_POOL`].
    PrefaultHostPool,
    /// Requests the agent of an offloaded process to move its content from the host pool to a disk
    /// file, chunk by chunk. The agent stops at a restore order, after a failure, or when all content
    /// is in the file. It shows its progress in the counters ([`super::counters::header::DISK_CHUNKS`],
    /// [`super::ProcessFlags::STORING_ON_DISK`], [`super::ProcessFlags::DISK_FAILED`]). Sent only to a
    /// library with [`Capabilities::STORES_ON_DISK`].
    StoreOnDisk,
    /// Starts or ends a prefault. At the start, the agent touches as much host memory as there is
    /// swappable memory, and lets the copier register it. At the end, or when the connection ends,
    /// the agent releases this host memory. Sent only to a library with
    /// [`Capabilities::PREFAULTS`].
    Prefault {
        /// True to prefault, false to release the memory.
        on: bool,
    },
    /// Lists the GPUs of the node, at most [`MAX_GPUS`], in several messages if needed. A later
    /// [`Action::RestoreOnGpu`] identifies GPUs by their position in this list.
    Gpus {
        /// Position of this message's first GPU in the list of all GPUs.
        first: u8,
        /// Number of GPUs on the node, in all messages together.
        total: u8,
        /// GPUs in this message. Entries whose position in the list would be `total` or more are
        /// unused.
        gpus: [Gpu; GPUS_PER_FRAME],
    },
    /// Delivers a reading of one GPU, at most one sample interval old.
    Reading(GpuReading),
    /// The reply to an [`AgentMessage::AskVram`]. It replaces the process's earlier allowance for
    /// the GPU.
    VramAllowance {
        /// Number of the request.
        ticket: u32,
        /// UUID of the GPU, as in the request.
        uuid: [u8; 16],
        /// Bytes that the process may allocate on the GPU from now on.
        bytes: u64,
        /// Bytes that the container may still allocate on the GPU under its limit.
        free_bytes: u64,
        /// The allowance is valid while [`super::counters::header::VRAM_EPOCH`] has this value.
        epoch: u64,
    },
}

impl AgentMessage {
    /// Encodes the agent's message as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            Self::Hello {
                version,
                pid_in_namespace,
                phase,
                generation,
                driver_version,
                hazards,
                abilities,
                swappable_bytes,
                copied_out_bytes,
                local_memory_bytes,
            } => {
                let w = Writer::new(1).u32(version).u32(pid_in_namespace).u32(phase as u32);
                let w = w.u64(generation).u32(driver_version).u32(hazards.0).u32(abilities.0);
                w.u64(swappable_bytes).u64(copied_out_bytes).u64(local_memory_bytes)
            }
            Self::Wake { generation, waiters, hook } => {
                Writer::new(2).u64(generation).u32(waiters).u32(hook)
            }
            Self::Report {
                order,
                outcome,
                phase,
                cuda_error,
                elapsed_us,
                swappable_bytes,
                copied_out_bytes,
                unchanged_bytes,
                zero_bytes,
                local_memory_bytes,
            } => Writer::new(3)
                .u64(order)
                .u32(outcome as u32)
                .u32(phase as u32)
                .u32(cuda_error)
                .u64(elapsed_us)
                .u64(swappable_bytes)
                .u64(copied_out_bytes)
                .u64(unchanged_bytes)
                .u64(zero_bytes)
                .u64(local_memory_bytes),
            Self::Notice { hazards } => Writer::new(4).u32(hazards.0),
            Self::AllocWait { ticket, bytes, uuid, attempts } => {
                Writer::new(8).u64(ticket).u64(bytes).bytes(&uuid).u32(attempts)
            }
            Self::AllocWaitDone { ticket, served } => Writer::new(9).u64(ticket).u32(served.into()),
            Self::AskVram { ticket, bytes, uuid } => {
                Writer::new(10).u32(ticket).u64(bytes).bytes(&uuid)
            }
            Self::VramTaken => Writer::new(11),
            Self::Releasing => Writer::new(12),
            Self::AskReadings => Writer::new(20),
        }
        .frame
    }

    /// Decodes a frame that an agent sent.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<AgentMessage, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            1 => Ok(AgentMessage::Hello {
                version: r.u32(),
                pid_in_namespace: r.u32(),
                phase: r.phase()?,
                generation: r.u64(),
                driver_version: r.u32(),
                hazards: Hazards(r.u32()),
                abilities: Capabilities(r.u32()),
                swappable_bytes: r.u64(),
                copied_out_bytes: r.u64(),
                local_memory_bytes: r.u64(),
            }),
            2 => Ok(AgentMessage::Wake { generation: r.u64(), waiters: r.u32(), hook: r.u32() }),
            3 => {
                let order = r.u64();
                let outcome = r.u32();
                Ok(AgentMessage::Report {
                    order,
                    outcome: Outcome::from_u32(outcome)
                        .ok_or(FrameError::Value("outcome", outcome))?,
                    phase: r.phase()?,
                    cuda_error: r.u32(),
                    elapsed_us: r.u64(),
                    swappable_bytes: r.u64(),
                    copied_out_bytes: r.u64(),
                    unchanged_bytes: r.u64(),
                    zero_bytes: r.u64(),
                    local_memory_bytes: r.u64(),
                })
            }
            4 => Ok(AgentMessage::Notice { hazards: Hazards(r.u32()) }),
            8 => Ok(AgentMessage::AllocWait {
                ticket: r.u64(),
                bytes: r.u64(),
                uuid: r.bytes(),
                attempts: r.u32(),
            }),
            9 => Ok(AgentMessage::AllocWaitDone { ticket: r.u64(), served: r.u32() != 0 }),
            10 => Ok(AgentMessage::AskVram { ticket: r.u32(), bytes: r.u64(), uuid: r.bytes() }),
            11 => Ok(AgentMessage::VramTaken),
            12 => Ok(AgentMessage::Releasing),
            20 => Ok(AgentMessage::AskReadings),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl ControllerMessage {
    /// Encodes the controller's message as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            ControllerMessage::Welcome { process, wait_for_room_ms, engine, vram_limit_bytes } => {
                Writer::new(101)
                    .u64(process)
                    .u32(wait_for_room_ms)
                    .u32(engine as u32)
                    .u64(vram_limit_bytes)
            }
            ControllerMessage::Refuse { version, retry } => {
                Writer::new(102).u32(version).u32(u32::from(retry))
            }
            ControllerMessage::Order { order, action, decided_ms } => {
                let (code, value) = action.code();
                Writer::new(103).u64(order).u32(code).u64(value).u64(decided_ms)
            }
            ControllerMessage::WakeAck { generation, position } => {
                Writer::new(104).u64(generation).u32(position)
            }
            ControllerMessage::AllocGrant { ticket, granted } => {
                Writer::new(108).u64(ticket).u32(u32::from(granted))
            }
            ControllerMessage::SampleCalls { one_in, read } => {
                Writer::new(109).u32(one_in).u64(read)
            }
            ControllerMessage::Copier => Writer::new(110),
            ControllerMessage::HostPool => Writer::new(114),
            ControllerMessage::FreeHostMemory => Writer::new(115),
            ControllerMessage::StoreOnDisk => Writer::new(116),
            ControllerMessage::PrefaultHostPool => Writer::new(117),
            ControllerMessage::Reading(reading) => Writer::new(120)
                .bytes(&reading.uuid)
                .u64(reading.total_bytes)
                .u64(reading.free_bytes)
                .u64(reading.reserved_bytes)
                .u32(reading.gpu_percent)
                .u32(reading.memory_percent)
                .u32(reading.temperature_c)
                .u32(reading.power_mw),
            ControllerMessage::Prefault { on } => Writer::new(112).u32(u32::from(on)),
            ControllerMessage::VramAllowance { ticket, uuid, bytes, free_bytes, epoch } => {
                Writer::new(113).u32(ticket).bytes(&uuid).u64(bytes).u64(free_bytes).u64(epoch)
            }
            ControllerMessage::Gpus { first, total, gpus } => gpus
                .iter()
                .fold(Writer::new(111).u32(u32::from(first)).u32(u32::from(total)), |w, gpu| {
                    w.bytes(&gpu.uuid).u32(gpu.minor)
                }),
        }
        .frame
    }

    /// Decodes a frame that a controller sent.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<ControllerMessage, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            101 => {
                let (process, wait_for_room_ms, engine) = (r.u64(), r.u32(), r.u32());
                let engine = Engine::from_u32(engine).ok_or(FrameError::Value("engine", engine))?;
                let vram_limit_bytes = r.u64();
                Ok(ControllerMessage::Welcome {
                    process,
                    wait_for_room_ms,
                    engine,
                    vram_limit_bytes,
                })
            }
            102 => Ok(ControllerMessage::Refuse { version: r.u32(), retry: r.u32() != 0 }),
            103 => {
                let (order, code, value) = (r.u64(), r.u32(), r.u64());
                let action =
                    Action::from_code(code, value).ok_or(FrameError::Value("action", code))?;
                Ok(ControllerMessage::Order { order, action, decided_ms: r.u64() })
            }
            104 => Ok(ControllerMessage::WakeAck { generation: r.u64(), position: r.u32() }),
            108 => Ok(ControllerMessage::AllocGrant { ticket: r.u64(), granted: r.u32() != 0 }),
            109 => Ok(ControllerMessage::SampleCalls { one_in: r.u32(), read: r.u64() }),
            110 => Ok(ControllerMessage::Copier),
            114 => Ok(ControllerMessage::HostPool),
            115 => Ok(ControllerMessage::FreeHostMemory),
            116 => Ok(ControllerMessage::StoreOnDisk),
            117 => Ok(ControllerMessage::PrefaultHostPool),
            112 => Ok(ControllerMessage::Prefault { on: r.u32() != 0 }),
            113 => Ok(ControllerMessage::VramAllowance {
                ticket: r.u32(),
                uuid: r.bytes(),
                bytes: r.u64(),
                free_bytes: r.u64(),
                epoch: r.u64(),
            }),
            120 => Ok(ControllerMessage::Reading(GpuReading {
                uuid: r.bytes(),
                total_bytes: r.u64(),
                free_bytes: r.u64(),
                reserved_bytes: r.u64(),
                gpu_percent: r.u32(),
                memory_percent: r.u32(),
                temperature_c: r.u32(),
                power_mw: r.u32(),
            })),
            111 => {
                let mut number = |name| {
                    let number = r.u32();
                    u8::try_from(number)
                        .ok()
                        .filter(|n| usize::from(*n) <= MAX_GPUS)
                        .ok_or(FrameError::Value(name, number))
                };
                let (first, total) = (number("first")?, number("total")?);
                let gpus = [(); GPUS_PER_FRAME].map(|()| Gpu { uuid: r.bytes(), minor: r.u32() });
                Ok(ControllerMessage::Gpus { first, total, gpus })
            }
            other => Err(FrameError::Kind(other)),
        }
    }
}

#[cfg(test)]
mod tests;
