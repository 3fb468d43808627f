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
//!                    <──────────────────────  SampleCalls, repeatedly: record calls into the counters
//!   AskReadings ───────────────────────────>   NVML is called in an offloaded process
//!                    <──────────────────────  Reading, one per GPU
//! ```

pub use super::action::{Action, CopyOptions};
pub use super::frame::{FRAME_BYTES, FRAME_MAGIC, FrameError};
use super::frame::{Reader, Writer};
use super::{Capabilities, Engine, Hazards, Phase, wire_enum};

/// Interval at which an agent with a waiting call repeats its Wake, in milliseconds.
pub const WAKE_REPEAT_MS: u64 = 1_000;
/// Time after which an agent with waiting calls restores its process itself, in milliseconds. The
/// time is measured from the first Wake without a reply, or from the loss of the controller.
pub const RESCUE_AFTER_MS: u64 = 5_000;
/// Time after which the controller's proof of free VRAM is no longer valid, in milliseconds, if the
/// agent receives no other message. After [`RESCUE_AFTER_MS`] other processes may restore
/// themselves and take the VRAM, so this time is shorter, by more than [`WAKE_REPEAT_MS`].
pub const PROOF_TTL_MS: u64 = 3_000;

wire_enum! {
    /// The outcome of an order.
    pub enum Outcome {
        /// The order was executed; the report has the new phase.
        Done = 0,
        /// The deadline passed: calls in progress did not end, or the driver did not lock the
        /// process. For a copy out: another thread holds the dynamic loader's lock. Every step was
        /// undone.
        Busy = 1,
        /// The order is not valid in this phase. Nothing was done.
        WrongPhase = 2,
        /// The driver returned an error (see `cuda_error`). The report has the observed phase.
        DriverError = 3,
        /// libcuda has no checkpoint entry points. Nothing was done.
        Unsupported = 4,
        /// The order takes VRAM and arrived more than [`PROOF_TTL_MS`] after its decision. Nothing
        /// was done.
        Late = 5,
        /// The order is a checkpoint, but the process has memory imported from a copier. The driver
        /// could not restore such memory. Nothing was done.
        Imported = 6,
        /// The order is a migration, but the process cannot reach every GPU of the node, or its
        /// driver does not support migration. Nothing was done.
        Unreachable = 7,
        /// The copier did not copy during the checkpoint. The phase is Checkpointed, but the
        /// swappable memory is still on the GPU, held only by descriptors of the process. A restore
        /// needs VRAM only for the memory that was checkpointed.
        NotCopied = 8,
        /// Other processes took the host memory that the copy out needs, so it was cancelled and
        /// undone.
        NoHostMemory = 9,
    }
}

/// Value of `cuda_error` in the report of a lock that is [`Outcome::Busy`] because a thread is
/// inside NVML. The driver does not use this value.
pub const BUSY_NVML: u32 = 0xffff_0003;
/// Value of `cuda_error` in the report of a lock or copy out that is [`Outcome::Busy`] because
/// another thread holds the dynamic loader's lock. The driver does not use this value.
pub const BUSY_LOADER: u32 = 0xffff_0002;

/// Maximum number of GPUs on a node. On a node with more GPUs, no container is migrated.
pub const MAX_GPUS: usize = 32;
/// Number of GPUs in one [`ControllerMessage::Gpus`].
pub const GPUS_PER_FRAME: usize = 5;

/// One GPU of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// UUID of the GPU, as the driver reports it.
    pub uuid: [u8; 16],
    /// Minor number of the device file `/dev/nvidia<minor>`.
    pub minor: u32,
}

/// Value that a field of [`GpuReading`] has if the controller has no reading for it.
pub const UNKNOWN_UTILIZATION: u32 = u32::MAX;

/// The controller's last reading of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuReading {
    /// UUID of the GPU, as the driver reports it.
    pub uuid: [u8; 16],
    /// Size of the VRAM in bytes.
    pub total_bytes: u64,
    /// Free VRAM in bytes.
    pub free_bytes: u64,
    /// VRAM that the driver reserves, in bytes.
    pub reserved_bytes: u64,
    /// Share of the last sample period in which a kernel ran, in percent, or
    /// [`UNKNOWN_UTILIZATION`].
    pub gpu_percent: u32,
    /// Share of the last sample period in which memory of the GPU was read or written, in percent,
    /// or [`UNKNOWN_UTILIZATION`].
    pub memory_percent: u32,
    /// Temperature in degrees Celsius, or [`UNKNOWN_UTILIZATION`].
    pub temperature_c: u32,
    /// Power draw in milliwatts, or [`UNKNOWN_UTILIZATION`].
    pub power_mw: u32,
}

/// Messages from the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentMessage {
    /// First message of a connection. It is sent together with the descriptor of the counters.
    Hello {
        /// [`super::WIRE_VERSION`] of the library.
        version: u32,
        /// Process id in the process's own pid namespace. The socket's credentials have the host's
        /// id.
        pid_in_namespace: u32,
        /// Phase of the process. It can differ from Open if an earlier controller crashed.
        phase: Phase,
        /// Number of times that the gate has closed.
        generation: u64,
        /// `cuDriverGetVersion`; 0: not known yet.
        driver_version: u32,
        /// Facts that make a checkpoint unsafe.
        hazards: Hazards,
        /// Capabilities in addition to those of the version. Empty for older libraries.
        abilities: Capabilities,
        /// Bytes of device memory that the agent can copy.
        swappable_bytes: u64,
        /// Bytes of `swappable_bytes` that are copied out to host memory.
        copied_out_bytes: u64,
        /// VRAM for local memory that the contexts have released and need again at the restore, in
        /// bytes. 0 for older libraries.
        local_memory_bytes: u64,
    },
    /// A call waits at the gate, because the process is not Open or its allocations are paused.
    /// Repeated every [`WAKE_REPEAT_MS`] while any call waits.
    Wake {
        /// Generation of the closed gate.
        generation: u64,
        /// Number of waiting calls.
        waiters: u32,
        /// Number of the hook of the waiting call.
        hook: u32,
    },
    /// The report on an order.
    Report {
        /// Number of the order.
        order: u64,
        /// Outcome of the order.
        outcome: Outcome,
        /// Phase of the process after the order.
        phase: Phase,
        /// The driver's result code; 0 if no driver call was made.
        cuda_error: u32,
        /// Duration of the order, in microseconds.
        elapsed_us: u64,
        /// Bytes of device memory that the agent can copy.
        swappable_bytes: u64,
        /// Bytes of `swappable_bytes` that are copied out to host memory now.
        copied_out_bytes: u64,
        /// Bytes that the last CopyOut did not copy because host memory had the same content.
        unchanged_bytes: u64,
        /// Bytes that the last CopyOut did not store because they are all zero.
        zero_bytes: u64,
        /// VRAM for local memory that the contexts have released and need again at the restore, in
        /// bytes. 0 for older libraries.
        local_memory_bytes: u64,
    },
    /// New hazards were found.
    Notice {
        /// All hazards known so far.
        hazards: Hazards,
    },
    /// An allocation found no VRAM and waits outside the driver until VRAM is free. The agent sends
    /// this message again after each failed attempt and after each Welcome. It sends the message
    /// only if the last [`ControllerMessage::Welcome`] allows such waits.
    AllocWait {
        /// Number of the allocation, unique in the process.
        ticket: u64,
        /// Requested bytes; 0 if only the driver knows the size (of a context or a module).
        bytes: u64,
        /// UUID of the GPU, from `cuDeviceGetUuid`.
        uuid: [u8; 16],
        /// Number of failed attempts after the allocation's first attempt.
        attempts: u32,
    },
    /// The allocation succeeded or failed, and no longer waits.
    AllocWaitDone {
        /// Number of the allocation.
        ticket: u64,
        /// Whether the allocation succeeded.
        served: bool,
    },
    /// A process of a container with a VRAM limit needs a new allowance. Sent again after each
    /// Welcome while it is unanswered. The reply is a [`ControllerMessage::VramAllowance`].
    AskVram {
        /// Number of the request. A reply answers all requests for the GPU up to its number.
        ticket: u32,
        /// Bytes that the process is about to allocate; 0: it only wants to know what is free.
        bytes: u64,
        /// UUID of the GPU, from `cuDeviceGetUuid`.
        uuid: [u8; 16],
    },
    /// The allocation that asked for an allowance has used the reply, or has seen that it is too
    /// small. The controller then serves the next process of the container.
    VramTaken,
    /// A call to NVML needs readings of the GPUs, but must not reach the driver's NVML now. The
    /// reply is a [`ControllerMessage::Reading`] for each GPU.
    AskReadings,
}

/// Messages from the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerMessage {
    /// The process is managed from now on.
    Welcome {
        /// The controller's number for the process.
        process: u64,
        /// Maximum time that an allocation waits for VRAM, in milliseconds. 0: the allocation fails
        /// at once, as without Affinode.
        wait_for_room_ms: u32,
        /// Engine for memory that is allocated from now on. The first allocation of a process waits
        /// until the library has received this message.
        engine: Engine,
        /// Limit of the container's VRAM on each GPU, in bytes. 0: there is no limit. Always 0 for
        /// a library without [`Capabilities::LIMITS_VRAM`].
        vram_limit_bytes: u64,
    },
    /// The process is not managed and runs as without Affinode. The controller then closes the
    /// connection. The agent connects again only if `retry` is true.
    Refuse {
        /// [`super::WIRE_VERSION`] of the controller.
        version: u32,
        /// Whether another attempt can succeed.
        retry: bool,
    },
    /// An order. The agent executes one order at a time, in the sequence in which it receives them.
    Order {
        /// Number of the order, for the report.
        order: u64,
        /// Action that the agent must execute.
        action: Action,
        /// Time of the decision: `CLOCK_MONOTONIC` of the process's time namespace, in
        /// milliseconds. 0: unknown.
        decided_ms: u64,
    },
    /// Confirms that the controller has received the Wake.
    WakeAck {
        /// Generation of the closed gate, as in the Wake.
        generation: u64,
        /// Position in the queue; 0: the process is being restored now.
        position: u32,
    },
    /// The reply to an [`AgentMessage::AllocWait`].
    AllocGrant {
        /// Number of the allocation.
        ticket: u64,
        /// Whether VRAM is free now. If it is not, the allocation fails.
        granted: bool,
    },
    /// Starts or stops the recording of calls. The recording also stops when the connection ends.
    /// Sent only to a library with [`Capabilities::RECORDS_CALLS`].
    SampleCalls {
        /// About one of this many calls is recorded; 0: no call is recorded.
        one_in: u32,
        /// Number of the first record that the controller has not read. The places of earlier
        /// records in the ring may be overwritten.
        read: u64,
    },
    /// The message contains a socket that is connected to a copier, for the next checkpoint and its
    /// restore. Sent only to a library with [`Capabilities::USES_COPIER`].
    Copier,
    /// Tells the agent to prefault host memory of the size of the swappable memory, and to let the
    /// copier register it; or tells it to release this host memory. The agent also releases the host
    /// memory when the connection ends. Sent only to a
    /// library with [`Capabilities::PREFAULTS`].
    Prefault {
        /// True: prefault. False: release the memory.
        on: bool,
    },
    /// GPUs of the node, at most [`MAX_GPUS`], in several messages if needed. A later
    /// [`Action::RestoreOnGpu`] refers to them by position.
    Gpus {
        /// Position of the first GPU of this message.
        first: u8,
        /// Number of GPUs on the node.
        total: u8,
        /// The GPUs. Entries beyond `total` are unused.
        gpus: [Gpu; GPUS_PER_FRAME],
    },
    /// A reading of a GPU, at most one sample interval old.
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
    /// Encodes the message as a frame.
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
            } => Writer::new(1)
                .u32(version)
                .u32(pid_in_namespace)
                .u32(phase as u32)
                .u64(generation)
                .u32(driver_version)
                .u32(hazards.0)
                .u32(abilities.0)
                .u64(swappable_bytes)
                .u64(copied_out_bytes)
                .u64(local_memory_bytes),
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
            Self::AskReadings => Writer::new(20),
        }
        .frame
    }

    /// Reads a frame that an agent sent.
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
            20 => Ok(AgentMessage::AskReadings),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl ControllerMessage {
    /// Encodes the message as a frame.
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

    /// Reads a frame that a controller sent.
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
                let order = r.u64();
                let code = r.u32();
                let value = r.u64();
                let action =
                    Action::from_code(code, value).ok_or(FrameError::Value("action", code))?;
                Ok(ControllerMessage::Order { order, action, decided_ms: r.u64() })
            }
            104 => Ok(ControllerMessage::WakeAck { generation: r.u64(), position: r.u32() }),
            108 => Ok(ControllerMessage::AllocGrant { ticket: r.u64(), granted: r.u32() != 0 }),
            109 => Ok(ControllerMessage::SampleCalls { one_in: r.u32(), read: r.u64() }),
            110 => Ok(ControllerMessage::Copier),
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
