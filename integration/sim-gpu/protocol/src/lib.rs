//! The messages between the simulated driver (`affinode-sim-gpud`) and its two libraries.
//!
//! One Unix socket of type SEQPACKET: a message is one packet of JSON of at most
//! [`MAX_PACKET_BYTES`], with at most one file descriptor beside it. A client
//! opens a connection and its first request decides what the connection is:
//!
//! | first request | the connection is | requests come from |
//! | --- | --- | --- |
//! | [`Request::Attach`] | the life of a CUDA process: when it closes, its VRAM is free | the process |
//! | [`Request::Control`] | the driver's channel into that process | the daemon, with [`Order`]s |
//! | anything else | one request, one reply | the client |
//!
//! `SO_PEERCRED` identifies a client; the daemon trusts nothing that the client sends about itself.

mod packet;
mod pointers;

pub use packet::Packet;
pub use pointers::{In, Out, Text, pointer};

use serde::{Deserialize, Serialize};

/// Where the daemon listens unless told otherwise.
pub const SOCKET: &str = "/run/affinode-sim/gpu.sock";
/// Environment variable that names another socket, for the libraries.
pub const SOCKET_ENV: &str = "AFFINODE_SIM_SOCKET";
/// No message is larger than this.
pub const MAX_PACKET_BYTES: usize = 128 * 1024;
/// Driver version that both libraries report.
pub const DRIVER_VERSION: &str = "580.0-simulated";
/// CUDA version that both libraries report.
pub const CUDA_VERSION: i32 = 13000;
/// Most GPUs that a daemon simulates.
pub const MAX_GPUS: usize = 16;

/// Names an allocation of device memory, the same in the daemon and its holders.
pub type ObjectId = u64;

/// `CUresult`s that travel in messages.
pub mod code {
    /// The call succeeded, `CUDA_SUCCESS`.
    pub const SUCCESS: i32 = 0;
    /// A bad argument; also what a restore with peer access used, or with a partial GPU map, returns.
    pub const INVALID_VALUE: i32 = 1;
    /// No room in VRAM.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// No CUDA in that process.
    pub const NOT_INITIALIZED: i32 = 3;
    /// The device ordinal is out of range.
    pub const INVALID_DEVICE: i32 = 101;
    /// The operating system, or a process that is gone or lost, or not permitted.
    pub const OPERATING_SYSTEM: i32 = 304;
    /// A handle that is not one.
    pub const INVALID_HANDLE: i32 = 400;
    /// The operation does not fit the checkpoint state.
    pub const ILLEGAL_STATE: i32 = 401;
    /// Not ready: a kernel is running still.
    pub const NOT_READY: i32 = 600;
    /// Not supported: managed memory, shared memory.
    pub const NOT_SUPPORTED: i32 = 801;
    /// Any other error, `CUDA_ERROR_UNKNOWN`.
    pub const UNKNOWN: i32 = 999;
}

/// What a client asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Become a CUDA process. Answer: [`Reply::Attached`] with the stats page.
    Attach,
    /// Take orders on this connection. Answer: [`Reply::Done`], then orders.
    Control {
        /// Thread that carries the orders out, in the process's own numbering.
        tid: i32,
    },
    /// A context on a GPU; the first one of a process costs VRAM.
    CreateContext {
        /// Index of the GPU.
        gpu: usize,
    },
    /// The end of one.
    DestroyContext {
        /// Index of the GPU.
        gpu: usize,
    },
    /// Device memory. Answer: [`Reply::Object`] with its memory file.
    Allocate {
        /// Index of the GPU.
        gpu: usize,
        /// Size in bytes to allocate.
        bytes: u64,
    },
    /// This process lets go of it.
    Free {
        /// Object that is meant.
        object: ObjectId,
    },
    /// Answer: [`Reply::Done`] with a descriptor that names the object.
    Export {
        /// Object that is meant.
        object: ObjectId,
    },
    /// Comes with a descriptor made by `Export`. Answer as to `Allocate`.
    Import,
    /// A legacy IPC handle. Answer: [`Reply::Token`].
    IpcExport {
        /// Object that is meant.
        object: ObjectId,
    },
    /// Opens one. Answer as to `Allocate`.
    IpcOpen {
        /// Text of a [`Reply::Token`].
        token: String,
    },
    /// Free and total memory; the reply is [`Reply::Memory`].
    Memory {
        /// Index of the GPU.
        gpu: usize,
    },
    /// The checkpoint calls. Answer: [`Reply::Done`], [`Reply::State`] or an error.
    Checkpoint {
        /// In the caller's pid namespace.
        pid: i32,
        /// Checkpoint operation to run.
        operation: Operation,
    },
    /// What NVML shows. Answer: [`Reply::Snapshot`].
    Snapshot,
}

/// One of the `cuCheckpointProcess*` calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Stop calls and wait for the work in flight.
    Lock {
        /// Time limit; 0: no limit.
        timeout_ms: u32,
    },
    /// VRAM to host memory.
    Save,
    /// Restore, with the GPUs to use.
    Restore {
        /// Old and new UUID; empty: onto the same GPUs.
        gpu_pairs: Vec<([u8; 16], [u8; 16])>,
    },
    /// Let calls go on.
    Unlock,
    /// Query the [`ProcessState`], as `cuCheckpointProcessGetState` does.
    State,
    /// Query the thread that restores.
    RestoreThread,
}

/// The driver's C type `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessState {
    /// The driver's constant `CU_PROCESS_STATE_RUNNING`.
    Running = 0,
    /// The driver's constant `CU_PROCESS_STATE_LOCKED`.
    Locked = 1,
    /// The driver's constant `CU_PROCESS_STATE_CHECKPOINTED`.
    Checkpointed = 2,
    /// The driver's constant `CU_PROCESS_STATE_FAILED`.
    Failed = 3,
}

/// Replies of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Refused, with a `CUresult`.
    Error(i32),
    /// Nothing more to say.
    Done,
    /// Reply to [`Request::Attach`].
    Attached {
        /// Every GPU of the node.
        gpus: Vec<GpuInfo>,
    },
    /// Device memory; its file comes beside.
    Object {
        /// Name of the object.
        object: ObjectId,
        /// Index of its GPU.
        gpu: usize,
        /// How large it is.
        bytes: u64,
    },
    /// A name that another process can open.
    Token(String),
    /// Memory of one GPU.
    Memory {
        /// Not used by anyone.
        free_bytes: u64,
        /// Total memory in bytes.
        total_bytes: u64,
    },
    /// Reply to [`Operation::State`].
    State(ProcessState),
    /// Reply to [`Operation::RestoreThread`].
    Thread(i32),
    /// Reply to [`Request::Snapshot`].
    Snapshot(Vec<GpuSnapshot>),
}

/// What the daemon asks of a CUDA process, which answers each with a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Hold new calls, wait for those inside and for the streams.
    Lock {
        /// Time limit; 0: no limit.
        timeout_ms: u32,
    },
    /// Copy every object to host memory, unmap it.
    Save {
        /// Host memory that the driver takes beside the contents.
        extra_bytes: u64,
    },
    /// Comes with the new memory of an object: map it and fill it.
    Map {
        /// Object that is meant.
        object: ObjectId,
    },
    /// All objects are back.
    Resume {
        /// GPU that now stands for each GPU of before.
        gpu_map: Vec<usize>,
    },
    /// Let calls go on.
    Unlock,
}

/// The process's answer to an [`Order`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Value of a `CUresult`.
    pub code: i32,
    /// After `Save`: what every restore is bound to return, 0 if nothing stands against it.
    pub restore_code: i32,
}

/// One of the simulated GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// Always says that it is simulated.
    pub name: String,
    /// Bytes as in `CUuuid`.
    pub uuid: [u8; 16],
    /// Total memory in bytes.
    pub vram_bytes: u64,
    /// Says that it is cut into MIG instances; it is none the less used whole.
    pub mig: bool,
}

/// What NVML knows of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSnapshot {
    /// The GPU that is described.
    pub info: GpuInfo,
    /// Memory in use by all processes, in bytes.
    pub used_bytes: u64,
    /// VRAM released since the last allocation on this GPU; not part of NVML.
    pub unnoted_bytes: u64,
    /// Share of the last sample period in which a kernel ran.
    pub busy_percent: u32,
    /// Those that hold VRAM.
    pub processes: Vec<ProcessUse>,
}

/// One process on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUse {
    /// Process id on the host.
    pub pid: u32,
    /// VRAM that the process holds, in bytes.
    pub used_bytes: u64,
    /// Its share of the sample period.
    pub busy_percent: u32,
}

/// Size of the stats page: per GPU two u64, `busy_ns` and `busy_since_ns`
/// (CLOCK_MONOTONIC, 0 when idle). The process writes, the daemon reads.
pub const STATS_BYTES: usize = MAX_GPUS * 16;

/// The UUID of the GPU with this index: readable, and never that of a real one.
pub fn gpu_uuid(index: usize) -> [u8; 16] {
    let mut uuid = *b"affinode-sim-000";
    for (place, digit) in uuid[13..].iter_mut().zip([index / 100, index / 10, index]) {
        *place = b'0' + (digit % 10) as u8;
    }
    uuid
}

/// Formats a UUID as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (position, byte) in uuid.iter().enumerate() {
        if matches!(position, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_differ_and_print_as_nvml_prints_them() {
        assert_ne!(gpu_uuid(0), gpu_uuid(1));
        assert_eq!(uuid_text(&gpu_uuid(12)), "GPU-61666669-6e6f-6465-2d73-696d2d303132");
    }
}
