//! Frames between an agent and the controller: 128 bytes each, little endian, on a
//! Unix stream socket. Byte 0..4 magic, 4..8 kind, then the fields in order, the
//! rest zero. The Hello is accompanied by the page's descriptor (`SCM_RIGHTS`).
//!
//! ```text
//! agent                                    controller
//!   Hello + page fd  ──────────────────────>
//!                    <──────────────────────  Welcome | Refuse
//!                    <──────────────────────  Order(Close), Order(Lock), [Order(Park)], [Order(Checkpoint)]
//!   Report (one per order)  ───────────────>
//!   Wake (at once, then every second) ─────>
//!                    <──────────────────────  WakeAck, later Order(Restore), [Order(Unlock)], Order(Open)
//!   Want ──────────────────────────────────>   an allocation failed for lack of memory and waits
//!                    <──────────────────────  Room: try again now, or give up
//!   WantOver ──────────────────────────────>
//!                    <──────────────────────  Watch, again and again: record calls into the page
//!   AskReadings ───────────────────────────>   NVML is asked in a process that is away
//!                    <──────────────────────  Reading, one per GPU
//! ```

pub use super::action::{Action, CopyOptions};
pub use super::frame::{FRAME_BYTES, FRAME_MAGIC, FrameError};
use super::frame::{Reader, Writer};
use super::{Capabilities, Engine, Hazards, Phase, wire_enum};

/// How often a waiting caller's agent repeats its Wake, in milliseconds.
pub const WAKE_REPEAT_MS: u64 = 1_000;
/// After so long without any answer to a Wake, or without a controller, an agent
/// with waiting callers brings its process back by itself, in milliseconds.
pub const RESCUE_AFTER_MS: u64 = 5_000;
/// After so long without a word of the controller's its word that VRAM is free counts no
/// more, in milliseconds: others may bring themselves back, and take it. Shorter than
/// [`RESCUE_AFTER_MS`] by more than [`WAKE_REPEAT_MS`].
pub const PROOF_TTL_MS: u64 = 3_000;

wire_enum! {
    /// How an order ended.
    pub enum Outcome {
        /// It was carried out; the phase says where the process is now.
        Done = 0,
        /// Calls did not drain, or the driver did not lock, before the deadline. Undone.
        Busy = 1,
        /// The order does not fit the phase; nothing was done.
        WrongPhase = 2,
        /// The driver returned an error (see `cuda_error`); the phase is the observed one.
        DriverError = 3,
        /// libcuda has no checkpoint entry points; nothing was done.
        Unsupported = 4,
        /// It takes VRAM and came later than [`PROOF_TTL_MS`] after it was decided on;
        /// nothing was done.
        Late = 5,
        /// A checkpoint, of a process that has hold of memory of a copier's making: the driver
        /// would not bring it back. Nothing was done. Only where there was a copier.
        Imported = 6,
        /// A return onto another GPU, of a process that cannot reach every GPU of the node, or
        /// whose driver knows no such return. Nothing was done.
        Unreachable = 7,
        /// A checkpoint, of a process that a copier was to copy beside it, and did not: it is Away,
        /// but all of what it can carry is on the device still, kept by the process alone. A return
        /// needs room for the rest only.
        NotCopied = 8,
        /// A copy out, for which others took the host memory while it was filled. Undone.
        NoHostMemory = 9,
    }
}

/// Most GPUs of a node among which processes change places.
pub const MAX_GPUS: usize = 32;
/// GPUs in one [`ControllerMessage::Gpus`].
pub const GPUS_PER_FRAME: usize = 5;

/// A GPU of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// As the driver has it.
    pub uuid: [u8; 16],
    /// Its device file is `/dev/nvidia` and this number.
    pub minor: u32,
}

/// A figure of a [`GpuReading`] that the controller does not know.
pub const UNKNOWN_UTILIZATION: u32 = u32::MAX;

/// What the controller has read of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuReading {
    /// As the driver has it.
    pub uuid: [u8; 16],
    /// VRAM in bytes.
    pub total_bytes: u64,
    /// VRAM that is free.
    pub free_bytes: u64,
    /// VRAM that the driver keeps for itself.
    pub reserved_bytes: u64,
    /// Share of the last sample period in which a kernel ran, in percent, or [`UNKNOWN_UTILIZATION`].
    pub gpu_percent: u32,
    /// Share in which memory was read or written, in percent, or [`UNKNOWN_UTILIZATION`].
    pub memory_percent: u32,
    /// Temperature in degrees Celsius, or [`UNKNOWN_UTILIZATION`].
    pub temperature_c: u32,
    /// Power in milliwatts, or [`UNKNOWN_UTILIZATION`].
    pub power_mw: u32,
}

/// From the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentMessage {
    /// First message of a connection; the page's descriptor comes with it.
    Hello {
        /// [`super::WIRE_VERSION`] of the library.
        version: u32,
        /// Process id in the process's own pid namespace (the socket names the host's).
        pid_in_namespace: u32,
        /// Where the process is: after a controller died, not always Open.
        phase: Phase,
        /// Offload generation.
        generation: u64,
        /// `cuDriverGetVersion`, 0 when not known yet.
        driver_version: u32,
        /// What makes a checkpoint unsafe.
        hazards: Hazards,
        /// What it can do beyond its version; none in the libraries that knew none.
        abilities: Capabilities,
        /// Bytes of device memory that the agent can copy.
        swappable_bytes: u64,
        /// Bytes of it that are parked in host memory.
        copied_out_bytes: u64,
    },
    /// A caller waits at the gate: the process is not Open, or its allocations are held.
    /// Repeated every [`WAKE_REPEAT_MS`] while one waits.
    Wake {
        /// The generation whose gate is closed.
        generation: u64,
        /// Callers that wait.
        waiters: u32,
        /// Index of the hook that was called.
        hook: u32,
    },
    /// The end of an order.
    Report {
        /// The order's number.
        order: u64,
        /// How it ended.
        outcome: Outcome,
        /// Where the process is now.
        phase: Phase,
        /// The driver's result code, 0 where no driver call was made.
        cuda_error: u32,
        /// How long it took, in microseconds.
        elapsed_us: u64,
        /// Bytes of device memory that the agent can copy.
        swappable_bytes: u64,
        /// Bytes of it that are parked in host memory now.
        copied_out_bytes: u64,
        /// Bytes that the last Park found in host memory already and did not copy.
        unchanged_bytes: u64,
        /// Bytes that it did not store, because they are all zero.
        zero_bytes: u64,
    },
    /// The set of hazards grew.
    Notice {
        /// All that are known now.
        hazards: Hazards,
    },
    /// An allocation failed for lack of device memory and waits for room, outside the
    /// driver. Sent again when it failed again, and after each Welcome. Only sent after a
    /// [`ControllerMessage::Welcome`] that allows it.
    AllocWait {
        /// Number of the allocation, unique in the process.
        ticket: u64,
        /// Bytes that it asks for; 0 when only the driver knows (a context, a module).
        bytes: u64,
        /// The device's UUID, as `cuDeviceGetUuid` has it.
        uuid: [u8; 16],
        /// How often it was tried again, and failed again.
        attempts: u32,
    },
    /// That allocation waits no more.
    AllocWaitDone {
        /// Which.
        ticket: u64,
        /// Whether it was made.
        served: bool,
    },
    /// A call into NVML needs figures, and NVML must not be reached. Answered with a
    /// [`ControllerMessage::Reading`] for each GPU.
    AskReadings,
}

/// From the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerMessage {
    /// The process is managed from now on.
    Welcome {
        /// The controller's number for the process.
        process: u64,
        /// How long an allocation that fails for lack of memory may wait for room, in
        /// milliseconds; 0: it fails at once, as it would without us.
        wait_for_room_ms: u32,
        /// How memory that is allocated from now on shall leave the device. Known to the
        /// library before its first allocation, which waits for this message.
        engine: Engine,
    },
    /// The process is not managed; it runs on as if we were not there. The
    /// connection ends; the agent does not come back when `retry` is false.
    Refuse {
        /// The controller's [`super::WIRE_VERSION`].
        version: u32,
        /// Whether another attempt may succeed.
        retry: bool,
    },
    /// Something to do. Orders are carried out one at a time, in order.
    Order {
        /// Number for the report.
        order: u64,
        /// What to do.
        action: Action,
        /// When that was decided: `CLOCK_MONOTONIC` as the process has it, in
        /// milliseconds; 0: at no known time.
        decided_ms: u64,
    },
    /// The wake was heard.
    WakeAck {
        /// The wake's generation.
        generation: u64,
        /// Place in the queue, 0: being restored now.
        position: u32,
    },
    /// The answer to a [`AgentMessage::AllocWait`].
    AllocGrant {
        /// Which.
        ticket: u64,
        /// Whether there is room now. If not, there will not be: the allocation fails.
        granted: bool,
    },
    /// Record calls, or no longer. Ends with the connection. Only sent to a library that
    /// has [`Capabilities::RECORDS_CALLS`].
    SampleCalls {
        /// About one call in so many is recorded; 0: none.
        one_in: u32,
        /// Records below this number are read: their places are free.
        read: u64,
    },
    /// A socket to a copier comes along, for the checkpoint that follows and the return from it.
    /// Only sent to a library that has [`Capabilities::USES_COPIER`].
    Copier,
    /// Have host memory ready for what can be copied, and registered by the copier that was shown;
    /// or no longer. Ends with the connection. Only sent to a library that has
    /// [`Capabilities::PREFAULTS`].
    Prefault {
        /// Or no longer.
        on: bool,
    },
    /// GPUs of the node, at most [`MAX_GPUS`]: what an [`Action::RestoreOnGpu`] that follows means by
    /// its numbers. As many messages as it takes.
    Gpus {
        /// Place of the first one here.
        first: u8,
        /// How many there are on the node.
        total: u8,
        /// They; those beyond `total` mean nothing.
        gpus: [Gpu; GPUS_PER_FRAME],
    },
    /// What the controller has read of a GPU, at most a sample interval ago.
    Reading(GpuReading),
}

impl AgentMessage {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            AgentMessage::Hello {
                version,
                pid_in_namespace,
                phase,
                generation,
                driver_version,
                hazards,
                abilities,
                swappable_bytes,
                copied_out_bytes,
            } => Writer::new(1)
                .u32(version)
                .u32(pid_in_namespace)
                .u32(phase as u32)
                .u64(generation)
                .u32(driver_version)
                .u32(hazards.0)
                .u32(abilities.0)
                .u64(swappable_bytes)
                .u64(copied_out_bytes),
            AgentMessage::Wake { generation, waiters, hook } => {
                Writer::new(2).u64(generation).u32(waiters).u32(hook)
            }
            AgentMessage::Report {
                order,
                outcome,
                phase,
                cuda_error,
                elapsed_us,
                swappable_bytes,
                copied_out_bytes,
                unchanged_bytes,
                zero_bytes,
            } => Writer::new(3)
                .u64(order)
                .u32(outcome as u32)
                .u32(phase as u32)
                .u32(cuda_error)
                .u64(elapsed_us)
                .u64(swappable_bytes)
                .u64(copied_out_bytes)
                .u64(unchanged_bytes)
                .u64(zero_bytes),
            AgentMessage::Notice { hazards } => Writer::new(4).u32(hazards.0),
            AgentMessage::AllocWait { ticket, bytes, uuid, attempts } => {
                Writer::new(8).u64(ticket).u64(bytes).bytes(&uuid).u32(attempts)
            }
            AgentMessage::AllocWaitDone { ticket, served } => {
                Writer::new(9).u64(ticket).u32(u32::from(served))
            }
            AgentMessage::AskReadings => Writer::new(20),
        }
        .frame
    }

    /// Reads a frame that an agent sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
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
            20 => Ok(AgentMessage::AskReadings),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl ControllerMessage {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            ControllerMessage::Welcome { process, wait_for_room_ms, engine } => {
                Writer::new(101).u64(process).u32(wait_for_room_ms).u32(engine as u32)
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
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<ControllerMessage, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            101 => {
                let (process, wait_for_room_ms, engine) = (r.u64(), r.u32(), r.u32());
                let engine = Engine::from_u32(engine).ok_or(FrameError::Value("engine", engine))?;
                Ok(ControllerMessage::Welcome { process, wait_for_room_ms, engine })
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
