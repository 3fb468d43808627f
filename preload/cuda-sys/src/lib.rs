//! The part of NVIDIA's driver interface that Affinode uses: types of the checkpoint calls, result
//! codes, and the [list](hooked_functions) of functions that the preload library holds while a
//! process is offloaded. The only logic of this crate is to look up a function by name.

#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod hook;
mod list;
pub mod nvml;
pub mod size;

/// `CUresult` codes that Affinode handles.
pub mod result {
    /// `CUDA_SUCCESS`: the call has succeeded.
    pub const SUCCESS: u32 = 0;
    /// An argument is invalid.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`: device memory is short.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The driver is missing or not initialised yet: `CUDA_ERROR_NOT_INITIALIZED`.
    pub const NOT_INITIALIZED: u32 = 3;
    /// `CUDA_ERROR_DEINITIALIZED`: the process is ending, and its driver has already ended.
    pub const DEINITIALIZED: u32 = 4;
    /// `CUDA_ERROR_ECC_UNCORRECTABLE`: the content of device memory is lost.
    pub const ECC_UNCORRECTABLE: u32 = 214;
    /// No context is current, or the current one is not suitable.
    pub const INVALID_CONTEXT: u32 = 201;
    /// The context has ended.
    pub const CONTEXT_IS_DESTROYED: u32 = 709;
    /// Work was still running at the end of the timeout. `cuCheckpointProcessLock` returns this
    /// code.
    pub const NOT_READY: u32 = 600;
    /// The process uses something that cannot be checkpointed. `cuCheckpointProcessCheckpoint`
    /// returns this code.
    pub const NOT_SUPPORTED: u32 = 801;

    /// Whether this code means that the context is lost. The driver then returns the code for every
    /// later call. Such codes are uncorrectable memory errors, faults of kernels, and the end of the
    /// process's MPS server.
    #[must_use]
    pub const fn is_sticky(code: u32) -> bool {
        const NVLINK_UNCORRECTABLE: u32 = 220;
        const CONTAINED: u32 = 226;
        const ILLEGAL_ADDRESS: u32 = 700;
        const LAUNCH_TIMEOUT: u32 = 702;
        const ASSERT: u32 = 710;
        // These codes are faults of the hardware stack, the instruction, its address, the address
        // space or the program counter, and a failed launch.
        const HARDWARE_STACK_ERROR: u32 = 714;
        const LAUNCH_FAILED: u32 = 719;
        const MPS_RPC_FAILURE: u32 = 806;
        const MPS_CLIENT_TERMINATED: u32 = 810;
        matches!(
            code,
            ECC_UNCORRECTABLE
                | NVLINK_UNCORRECTABLE
                | CONTAINED
                | ILLEGAL_ADDRESS
                | LAUNCH_TIMEOUT
                | ASSERT
                | HARDWARE_STACK_ERROR
                ..=LAUNCH_FAILED | MPS_RPC_FAILURE | MPS_CLIENT_TERMINATED
        )
    }
}

/// `CUprocessState` values: the checkpoint state of a process, as the driver reports it.
pub mod process_state {
    /// The process runs and uses the device without restriction.
    pub const RUNNING: u32 = 0;
    /// The driver blocks the calls of the process. The state of the process is still on the device.
    pub const LOCKED: u32 = 1;
    /// The state of the process is in host memory, not on the device.
    pub const CHECKPOINTED: u32 = 2;
    /// A failed operation left the process unusable.
    pub const FAILED: u32 = 3;
}

/// `CUcheckpointLockArgs`, the argument of [`CheckpointLockFn`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CheckpointLockArgs {
    /// Time limit of the wait for running work, in milliseconds. 0 means no limit.
    pub timeout_ms: u32,
    /// Reserved, must be zero.
    pub reserved0: u32,
    /// Reserved, must be zero.
    pub reserved1: [u64; 7],
}

/// The argument of `cuCheckpointProcessCheckpoint`, `…Restore` and `…Unlock`. If all bytes are
/// zero, a restore uses the same GPUs as before the checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CheckpointArgs {
    /// Reserved, must be zero.
    pub reserved: [u64; 8],
}

/// A pair of GPUs, `CUcheckpointGpuPair`: a GPU at the checkpoint, and the GPU that replaces it at
/// the restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GpuPair {
    /// UUID of the GPU at the checkpoint.
    pub old: [u8; 16],
    /// UUID of the GPU at the restore.
    pub new: [u8; 16],
}

/// The argument of `cuCheckpointProcessRestore` with GPU pairs: `CUcheckpointRestoreArgs`, as of
/// CUDA 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CheckpointRestoreArgs {
    /// Array of pairs that names every GPU of the node.
    pub pairs: *const GpuPair,
    /// Number of pairs in the array.
    pub many: u32,
    /// Reserved, must be zero.
    pub reserved0: [u32; 11],
    /// Reserved, must be zero.
    pub reserved1: u64,
}

/// Access rights of one device to a range of memory: `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MemAccessDesc {
    /// Kind of the location: [`LOCATION_DEVICE`] or another kind.
    pub location_type: u32,
    /// Ordinal of the device, if the location is a device.
    pub location_id: i32,
    /// Access rights. 0: none, 1: read, 3: read and write.
    pub flags: u32,
}

/// Properties of a physical memory allocation on a device: `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MemAllocationProp {
    /// Kind of the allocation: [`ALLOCATION_PINNED`], or a kind that Affinode does not use.
    pub kind: u32,
    /// Bit set of the handle types with which the memory can be exported.
    pub handle_types: u32,
    /// Kind of the location: [`LOCATION_DEVICE`] or another kind.
    pub location_type: u32,
    /// Ordinal of the device.
    pub location_id: i32,
    /// Security attributes for Windows, must be zero.
    pub windows: u64,
    /// Kind of compression. 0 means none.
    pub compression: u8,
    /// 1 if other devices on the bus may access the memory.
    pub gpu_direct_rdma: u8,
    /// Usage flags. 0 means none.
    pub usage: u16,
    /// Reserved, must be zero.
    pub reserved: [u8; 4],
}

/// `CUmemPoolProps`, the properties of a memory pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct MemPoolProps {
    /// Kind of the pool's allocations: [`ALLOCATION_PINNED`], or a kind that Affinode does not use.
    pub kind: u32,
    /// Bit set of the handle types with which the pool's memory can be exported.
    pub handle_types: u32,
    /// Kind of the location: [`LOCATION_DEVICE`] or another kind.
    pub location_type: u32,
    /// Ordinal of the device, if the location is a device.
    pub location_id: i32,
    /// Security attributes for Windows, must be zero.
    pub windows: u64,
    /// Maximum size in bytes. 0 means that the driver chooses it.
    pub most_bytes: u64,
    /// Usage flags. 0 means none.
    pub usage: u16,
    /// Reserved, must be zero.
    pub reserved: [u8; 54],
}

/// Values of `CUmemPool_attribute` that Affinode uses.
pub mod pool_attribute {
    /// Whether the pool may reuse memory that was freed in another stream, once that stream's work
    /// has ended.
    pub const REUSE_OPPORTUNISTIC: u32 = 2;
    /// Number of bytes that the pool may keep. When the program waits for GPU work, the pool frees
    /// unused memory above this number.
    pub const RELEASE_THRESHOLD: u32 = 4;
    /// Bytes of physical memory that the pool holds.
    pub const RESERVED: u32 = 5;
    /// Highest value of [`RESERVED`] since its reset.
    pub const RESERVED_HIGH: u32 = 6;
    /// Bytes of the pool's memory that are in use.
    pub const USED: u32 = 7;
    /// Highest value of [`USED`] since its reset.
    pub const USED_HIGH: u32 = 8;
}

/// Description of a mapping into a sparse array: `CUarrayMapInfo`, as far as Affinode reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ArrayMapInfo {
    /// The array, and the part of it that is mapped.
    pub resource: [u64; 7],
    /// The operation: map or unmap.
    pub operation: u32,
    /// Kind of `handle`. 0 means an allocation of physical memory.
    pub handle_type: u32,
    /// The handle of the memory.
    pub handle: u64,
    /// The remaining fields of the driver's structure: the offset in the memory, and the bit mask
    /// of devices. The library does not read them.
    pub rest: [u64; 3],
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`: memory that stays on its device.
pub const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`: exportable as a descriptor.
pub const POSIX_DESCRIPTOR: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`: read and write.
pub const ACCESS_READ_WRITE: u32 = 3;

/// Values of `CUdevice_attribute` that Affinode uses.
pub mod device_attribute {
    /// Number of multiprocessors (SMs) of the device.
    pub const MULTIPROCESSOR_COUNT: i32 = 16;
    /// Number of threads that a multiprocessor runs at once.
    pub const MAX_THREADS_PER_MULTIPROCESSOR: i32 = 39;
    /// Whether the device supports CUDA's virtual memory management, which allocates physical
    /// memory separately from addresses.
    pub const VIRTUAL_MEMORY_MANAGEMENT: i32 = 102;
    /// Whether physical memory that is allocated separately can be exported as a descriptor.
    pub const POSIX_DESCRIPTORS: i32 = 103;
    /// Whether other devices on the bus can access physical memory that is allocated separately.
    pub const RDMA_WITH_VIRTUAL_MEMORY: i32 = 110;
    /// The NUMA node of the host memory that is nearest to the device. -1 if the machine has only
    /// one node, or the nearest node is unknown.
    pub const HOST_NUMA_ID: i32 = 134;
}

/// Values of `CUpointer_attribute` that Affinode uses.
pub mod pointer_attribute {
    /// The context in which the memory was allocated.
    pub const CONTEXT: u32 = 1;
    /// Whether the memory can be shared with `cuIpcGetMemHandle`.
    pub const LEGACY_IPC: u32 = 10;
    /// The size of the allocation.
    pub const RANGE_SIZE: u32 = 12;
    /// The handle types with which the memory can be exported.
    pub const HANDLE_TYPES: u32 = 14;
    /// The pool from which the memory was allocated. 0 if none.
    pub const POOL: u32 = 17;
}

/// Location kind of memory on a device: `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const LOCATION_DEVICE: u32 = 1;
/// Pointer attribute that returns the device of an address: `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
pub const POINTER_ATTRIBUTE_DEVICE_ORDINAL: u32 = 9;

/// The signature of `cuCheckpointProcessLock`.
pub type CheckpointLockFn = unsafe extern "C" fn(i32, *mut CheckpointLockArgs) -> u32;
/// The signature of `cuCheckpointProcessCheckpoint`, `…Restore` and `…Unlock`.
pub type CheckpointFn = unsafe extern "C" fn(i32, *mut CheckpointArgs) -> u32;
/// The signature of `cuCheckpointProcessRestore` with GPU pairs.
pub type CheckpointRestoreFn = unsafe extern "C" fn(i32, *mut CheckpointRestoreArgs) -> u32;
/// The signature of `cuCheckpointProcessGetState`.
pub type CheckpointGetStateFn = unsafe extern "C" fn(i32, *mut u32) -> u32;
/// The signature of `cuDriverGetVersion`.
pub type DriverGetVersionFn = unsafe extern "C" fn(*mut i32) -> u32;
/// The signature of `cuCtxGetDevice`.
pub type CtxGetDeviceFn = unsafe extern "C" fn(*mut i32) -> u32;
/// The signature of `cuDeviceGetUuid` and `cuDeviceGetUuid_v2`, which write 16 bytes.
pub type DeviceGetUuidFn = unsafe extern "C" fn(*mut core::ffi::c_void, i32) -> u32;
/// The signature of `cuPointerGetAttribute`.
pub type PointerGetAttributeFn = unsafe extern "C" fn(*mut core::ffi::c_void, u32, u64) -> u32;

const _: () = assert!(size_of::<CheckpointLockArgs>() == 64);
const _: () = assert!(size_of::<CheckpointArgs>() == 64);
const _: () = assert!(size_of::<CheckpointRestoreArgs>() == 64);
const _: () = assert!(size_of::<MemAccessDesc>() == 12);
const _: () = assert!(size_of::<MemAllocationProp>() == 32);
const _: () = assert!(size_of::<ArrayMapInfo>() == 96);
const _: () = assert!(size_of::<MemPoolProps>() == 88);
