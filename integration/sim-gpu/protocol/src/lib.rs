//! The messages between the simulated kernel driver (`affinode-sim-gpud`, the daemon) and the two
//! libraries that applications load (libcuda and NVML).
//!
//! All messages use one Unix socket of type SEQPACKET. A message is one packet of JSON of at most
//! [`MAX_PACKET_BYTES`], with at most one file descriptor. The first request of a connection
//! determines the connection's purpose:
//!
//! | first request | purpose | requests come from |
//! | --- | --- | --- |
//! | [`Request::Attach`] | requests of a CUDA process; when the connection closes, the process's VRAM is freed | the CUDA process |
//! | [`Request::Control`] | the daemon's [`Order`]s to a CUDA process, each followed by the process's [`Report`] | the daemon |
//! | any other request | a single request and its reply | any client |
//!
//! The daemon identifies a client by `SO_PEERCRED`. It does not trust anything that a client sends
//! about itself.

mod packet;
mod pointers;

pub use packet::Packet;
pub use pointers::{In, Out, Text, pointer};

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Socket at which the daemon listens by default.
pub const SOCKET: &str = "/run/affinode-sim/gpu.sock";
/// Environment variable that names the daemon's socket, if it is not [`SOCKET`].
pub const SOCKET_ENV: &str = "AFFINODE_SIM_SOCKET";
/// Maximum size of a message in bytes.
pub const MAX_PACKET_BYTES: usize = 128 * 1024;
/// Driver version that both libraries report.
pub const DRIVER_VERSION: &str = "580.0-simulated";
/// Driver version that NVML reports if the daemon simulates VRAM limits of cgroups.
pub const LIMITS_DRIVER_VERSION: &str = "615.0-simulated";
/// CUDA version that both libraries report.
pub const CUDA_VERSION: i32 = 13000;
/// Maximum number of GPUs that a daemon simulates.
pub const MAX_GPUS: usize = 16;

/// Id of an allocation of device memory. The daemon and all holders of the allocation use the same
/// id.
pub type ObjectId = u64;

/// `CUresult` codes that messages contain.
pub mod code {
    /// The call succeeded, `CUDA_SUCCESS`.
    pub const SUCCESS: i32 = 0;
    /// An argument is invalid. A restore also returns this code if its GPU pairs do not name every
    /// GPU, or if the process used peer access before the checkpoint.
    pub const INVALID_VALUE: i32 = 1;
    /// The GPU has too little free VRAM.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// The process has not initialised CUDA.
    pub const NOT_INITIALIZED: i32 = 3;
    /// The device ordinal is out of range.
    pub const INVALID_DEVICE: i32 = 101;
    /// The operating system returned an error. Checkpoint calls also return this code if the target
    /// process has ended, was lost in a failed restore, or belongs to another user.
    pub const OPERATING_SYSTEM: i32 = 304;
    /// The handle is invalid, `CUDA_ERROR_INVALID_HANDLE`.
    pub const INVALID_HANDLE: i32 = 400;
    /// The operation is not allowed in this checkpoint state.
    pub const ILLEGAL_STATE: i32 = 401;
    /// A kernel is still running, `CUDA_ERROR_NOT_READY`.
    pub const NOT_READY: i32 = 600;
    /// The caller may not make this call, `CUDA_ERROR_NOT_PERMITTED`.
    pub const NOT_PERMITTED: i32 = 800;
    /// The call is not supported, for example with managed or shared memory.
    pub const NOT_SUPPORTED: i32 = 801;
    /// Any other error, `CUDA_ERROR_UNKNOWN`.
    pub const UNKNOWN: i32 = 999;
}

/// Stack limit of a new context, in bytes for each thread.
pub const STACK_LIMIT: u64 = 1024;
/// Number of threads that a multiprocessor can run at the same time.
pub const THREADS: u32 = 2048;

/// A request of a client to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Register the caller as a CUDA process. Reply: [`Reply::Attached`] with the statistics page.
    Attach,
    /// Use this connection for the daemon's orders to this process. Reply: [`Reply::Done`], then
    /// orders.
    Control {
        /// Id of the thread that executes the orders, in the process's own pid namespace.
        tid: i32,
    },
    /// Create a context on a GPU. The first context of a process on the GPU takes VRAM.
    CreateContext {
        /// Index of the GPU.
        gpu: usize,
    },
    /// Destroy a context on a GPU.
    DestroyContext {
        /// Index of the GPU.
        gpu: usize,
    },
    /// Change the local memory of this process's contexts on a GPU.
    SetStackLimit {
        /// Index of the GPU.
        gpu: usize,
        /// Bytes of local memory for each thread of the GPU.
        bytes: u64,
    },
    /// Allocate device memory. Reply: [`Reply::Object`] with its memory file.
    Allocate {
        /// Index of the GPU.
        gpu: usize,
        /// Size in bytes to allocate.
        bytes: u64,
    },
    /// Release this process's reference to an object.
    Free {
        /// Id of the object.
        object: ObjectId,
    },
    /// Export an object. Reply: [`Reply::Done`] with a descriptor that refers to the object.
    Export {
        /// Id of the object.
        object: ObjectId,
    },
    /// Import an object. The request contains the descriptor from `Export`. The reply is
    /// [`Reply::Object`], as for `Allocate`.
    Import,
    /// Create a handle of legacy IPC for an object. Reply: [`Reply::Token`].
    IpcExport {
        /// Id of the object.
        object: ObjectId,
    },
    /// Open a handle of legacy IPC. The reply is [`Reply::Object`], as for `Allocate`.
    IpcOpen {
        /// Text of a [`Reply::Token`].
        token: String,
    },
    /// Query free and total memory. Reply: [`Reply::Memory`].
    Memory {
        /// Index of the GPU.
        gpu: usize,
    },
    /// Execute a checkpoint call. Reply: [`Reply::Done`], [`Reply::State`] or an error.
    Checkpoint {
        /// Process id in the caller's pid namespace.
        pid: i32,
        /// Checkpoint operation to execute.
        operation: Operation,
    },
    /// Query the data that NVML returns. Reply: [`Reply::Snapshot`].
    Snapshot,
    /// Set or remove the VRAM limit of a cgroup on a GPU. Only root may do this. Reply:
    /// [`Reply::Done`].
    LimitMemory(MemoryLimit),
    /// Query the VRAM limits of all cgroups. Reply: [`Reply::Limits`].
    Limits,
}

/// VRAM limit of a cgroup on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// Index of the GPU.
    pub gpu: usize,
    /// Folder of the cgroup.
    pub cgroup: PathBuf,
    /// Guaranteed VRAM in bytes. The simulation stores it, and does not guarantee it.
    pub soft_bytes: u64,
    /// Maximum VRAM in bytes. The maximum of u64 removes the limit.
    pub hard_bytes: u64,
}

/// Checkpoint operation, one for each of the `cuCheckpointProcess*` calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Hold new calls, and wait until the work in progress has ended.
    Lock {
        /// Time limit in milliseconds. 0 means no limit.
        timeout_ms: u32,
    },
    /// Move the contents of VRAM to host memory.
    Save,
    /// Restore the process on these GPUs.
    Restore {
        /// Pairs of old and new UUID. If the list is empty, the process is restored on the same
        /// GPUs.
        gpu_pairs: Vec<([u8; 16], [u8; 16])>,
    },
    /// Let the process's waiting calls continue.
    Unlock,
    /// Query the [`ProcessState`], as `cuCheckpointProcessGetState` does.
    State,
    /// Query the id of the thread that executes restores.
    RestoreThread,
}

/// Checkpoint state of a process: the driver's C type `CUprocessState`.
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

/// A reply of the daemon to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The request has failed with this `CUresult`.
    Error(i32),
    /// The request has succeeded, and the reply has no data.
    Done,
    /// The process is registered. Reply to [`Request::Attach`].
    Attached {
        /// Every GPU of the node.
        gpus: Vec<GpuInfo>,
    },
    /// Device memory was allocated or opened. The message also carries the descriptor of its memory
    /// file.
    Object {
        /// Id of the object.
        object: ObjectId,
        /// Index of the GPU that has the memory.
        gpu: usize,
        /// Size of the memory in bytes.
        bytes: u64,
    },
    /// Text of a handle with which another process can open an object.
    Token(String),
    /// Memory of one GPU.
    Memory {
        /// Free memory in bytes.
        free_bytes: u64,
        /// Total memory in bytes.
        total_bytes: u64,
    },
    /// Checkpoint state of the process. Reply to [`Operation::State`].
    State(ProcessState),
    /// Id of the thread that executes restores. Reply to [`Operation::RestoreThread`].
    Thread(i32),
    /// Data of NVML about every GPU. Reply to [`Request::Snapshot`].
    Snapshot(Vec<GpuSnapshot>),
    /// VRAM limits that are set. Reply to [`Request::Limits`].
    Limits(Vec<MemoryLimit>),
}

/// An order of the daemon to a CUDA process. The process replies to each order with a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Hold new calls. Then wait until all calls inside the driver have returned and the work of
    /// all streams has ended.
    Lock {
        /// Time limit in milliseconds. 0 means no limit.
        timeout_ms: u32,
    },
    /// Copy the contents of every object to host memory, and unmap the object.
    Save {
        /// Host memory, in bytes, that the driver allocates in addition to the contents.
        extra_bytes: u64,
    },
    /// Map the new memory of an object, and copy the object's saved contents into it. The message
    /// carries the descriptor of the memory.
    Map {
        /// Id of the object.
        object: ObjectId,
    },
    /// Continue after a restore: all objects have their contents again.
    Resume {
        /// Entry n is the index of the GPU that replaces GPU n.
        gpu_map: Vec<usize>,
    },
    /// Let waiting calls continue.
    Unlock,
}

/// Reply of a process to an [`Order`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Result of the order, as a `CUresult`.
    pub code: i32,
    /// Result of every later restore of this process, as a `CUresult`. 0 means that a restore can
    /// succeed. The process sets this field only in its reply to the order `Save`.
    pub restore_code: i32,
}

/// Identity and size of a simulated GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// Product name, which always contains "Simulated".
    pub name: String,
    /// UUID of the GPU, as the bytes of a `CUuuid`.
    pub uuid: [u8; 16],
    /// Total memory in bytes.
    pub vram_bytes: u64,
    /// Whether the GPU reports that MIG mode is enabled. Even then, the simulated GPU has no
    /// partitions.
    pub mig: bool,
    /// Whether the driver enforces VRAM limits of cgroups.
    pub memory_limits: bool,
    /// Number of multiprocessors, each with [`THREADS`] threads.
    pub multiprocessors: u32,
}

/// Data about one GPU that NVML returns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSnapshot {
    /// Identity and size of the GPU.
    pub info: GpuInfo,
    /// Memory in use by all processes, in bytes.
    pub used_bytes: u64,
    /// Bytes of VRAM released since the last allocation on this GPU. The real NVML does not report
    /// them.
    pub unnoted_bytes: u64,
    /// Percentage of the last sample period during which a kernel ran on the GPU.
    pub busy_percent: u32,
    /// Processes that hold VRAM on the GPU.
    pub processes: Vec<ProcessUse>,
}

/// One process's use of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUse {
    /// Process id on the host.
    pub pid: u32,
    /// VRAM that the process holds, in bytes.
    pub used_bytes: u64,
    /// Percentage of the last sample period during which a kernel of the process ran on the GPU.
    pub busy_percent: u32,
}

/// Size of the statistics page in bytes. A process writes the page, and the daemon reads it. The
/// page has two u64 for each GPU. `busy_ns` is the time in which kernels have run. `busy_since_ns`
/// is the start time of the kernel that runs now (CLOCK_MONOTONIC, 0 while no kernel runs).
pub const STATS_BYTES: usize = MAX_GPUS * 16;

/// Returns the UUID of the simulated GPU with this index. It is a readable text, and never equals
/// the UUID of a real GPU.
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
