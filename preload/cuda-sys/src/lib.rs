//! The part of NVIDIA's driver interface that Affinode uses: types of the checkpoint
//! calls, result codes, and the [list](hooked_functions) of functions that the
//! preload library holds while a process's GPU state is away. No logic beyond looking
//! up a name.

#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod hook;
mod list;
pub mod nvml;
pub mod size;

/// `CUresult` values that have a meaning here.
pub mod result {
    /// It worked.
    pub const SUCCESS: u32 = 0;
    /// An argument is not what the function takes.
    pub const INVALID_VALUE: u32 = 1;
    /// Out of device memory.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The driver is not there, or not yet.
    pub const NOT_INITIALIZED: u32 = 3;
    /// `CUDA_ERROR_DEINITIALIZED`: the process is ending, and the driver has gone before.
    pub const DEINITIALIZED: u32 = 4;
    /// `CUDA_ERROR_ECC_UNCORRECTABLE`: device memory is not what was written there.
    pub const ECC_UNCORRECTABLE: u32 = 214;
    /// There is no context, or it is not one for this.
    pub const INVALID_CONTEXT: u32 = 201;
    /// Lock: work was still running at the end of the timeout.
    pub const NOT_READY: u32 = 600;
    /// Checkpoint: the process uses something that cannot be checkpointed.
    pub const NOT_SUPPORTED: u32 = 801;

    /// Whether a context is lost with this code: the driver answers every later call with it, and
    /// no attempt mends it. Uncorrectable memory errors and faults of kernels.
    #[must_use]
    pub const fn is_sticky(code: u32) -> bool {
        const NVLINK_UNCORRECTABLE: u32 = 220;
        const CONTAINED: u32 = 226;
        const ILLEGAL_ADDRESS: u32 = 700;
        const LAUNCH_TIMEOUT: u32 = 702;
        const ASSERT: u32 = 710;
        // Faults of the stack, the instruction, the address, its space, the counter; launch failed.
        const HARDWARE_STACK_ERROR: u32 = 714;
        const LAUNCH_FAILED: u32 = 719;
        matches!(
            code,
            ECC_UNCORRECTABLE
                | NVLINK_UNCORRECTABLE
                | CONTAINED
                | ILLEGAL_ADDRESS
                | LAUNCH_TIMEOUT
                | ASSERT
                | HARDWARE_STACK_ERROR..=LAUNCH_FAILED
        )
    }
}

/// `CUprocessState` values.
pub mod process_state {
    /// Runs freely.
    pub const RUNNING: u32 = 0;
    /// Locked: calls block, the state is on the device.
    pub const LOCKED: u32 = 1;
    /// The state is in host memory.
    pub const CHECKPOINTED: u32 = 2;
    /// A failed operation left it unusable.
    pub const FAILED: u32 = 3;
}

/// `CUcheckpointLockArgs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CheckpointLockArgs {
    /// How long running work is waited for, in milliseconds; 0: for ever.
    pub timeout_ms: u32,
    /// Zero.
    pub reserved0: u32,
    /// Zero.
    pub reserved1: [u64; 7],
}

/// The argument of the other checkpoint calls, all zero: to host memory, same GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CheckpointArgs {
    /// Zero.
    pub reserved: [u64; 8],
}

/// `CUcheckpointGpuPair`: a GPU, and the one that stands for it after a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GpuPair {
    /// UUID of the one at the checkpoint.
    pub old: [u8; 16],
    /// UUID of the one at the restore.
    pub new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`, as of CUDA 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CheckpointRestoreArgs {
    /// Every GPU of the node.
    pub pairs: *const GpuPair,
    /// How many.
    pub many: u32,
    /// Zero.
    pub reserved0: [u32; 11],
    /// Zero.
    pub reserved1: u64,
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MemAccessDesc {
    /// [`LOCATION_DEVICE`] or another kind of place.
    pub location_type: u32,
    /// Device ordinal where the kind is a device.
    pub location_id: i32,
    /// 0: none, 1: read, 3: read and write.
    pub flags: u32,
}

/// `CUmemAllocationProp` of memory on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MemAllocationProp {
    /// [`ALLOCATION_PINNED`].
    pub kind: u32,
    /// Kinds of handles that it can be exported as.
    pub handle_types: u32,
    /// [`LOCATION_DEVICE`].
    pub location_type: u32,
    /// Device ordinal.
    pub location_id: i32,
    /// Zero.
    pub windows: u64,
    /// 0: none.
    pub compression: u8,
    /// 1: other devices on the bus may reach it.
    pub gpu_direct_rdma: u8,
    /// 0.
    pub usage: u16,
    /// Zero.
    pub reserved: [u8; 4],
}

/// `CUmemPoolProps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct MemPoolProps {
    /// [`ALLOCATION_PINNED`].
    pub kind: u32,
    /// Kinds of handles that it can be exported as.
    pub handle_types: u32,
    /// [`LOCATION_DEVICE`] or another kind of place.
    pub location_type: u32,
    /// Device ordinal where the kind is a device.
    pub location_id: i32,
    /// Zero.
    pub windows: u64,
    /// Its greatest size in bytes; 0: the driver's choice.
    pub most_bytes: u64,
    /// 0.
    pub usage: u16,
    /// Zero.
    pub reserved: [u8; 54],
}

/// Values of `CUmemPool_attribute`.
pub mod pool_attribute {
    /// Memory of another stream may be had once its work has ended.
    pub const REUSE_OPPORTUNISTIC: u32 = 2;
    /// Bytes that are kept when work is waited for.
    pub const RELEASE_THRESHOLD: u32 = 4;
    /// Bytes of physical memory.
    pub const RESERVED: u32 = 5;
    /// The most of it.
    pub const RESERVED_HIGH: u32 = 6;
    /// Bytes in use.
    pub const USED: u32 = 7;
    /// The most of it.
    pub const USED_HIGH: u32 = 8;
}

/// `CUarrayMapInfo`, as far as it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ArrayMapInfo {
    /// What is mapped into which array.
    pub resource: [u64; 7],
    /// Map or unmap.
    pub operation: u32,
    /// 0: the handle is that of an allocation.
    pub handle_type: u32,
    /// The memory.
    pub handle: u64,
    /// Where in it, on which devices.
    pub rest: [u64; 3],
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const POSIX_DESCRIPTOR: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const ACCESS_READ_WRITE: u32 = 3;

/// Values of `CUdevice_attribute`.
pub mod device_attribute {
    /// Physical memory and addresses can be had apart.
    pub const VIRTUAL_MEMORY_MANAGEMENT: i32 = 102;
    /// Memory made so can be exported as a descriptor.
    pub const POSIX_DESCRIPTORS: i32 = 103;
    /// Memory made so can be reached by other devices on the bus.
    pub const RDMA_WITH_VIRTUAL_MEMORY: i32 = 110;
    /// The node of host memory that is closest; -1: there is but one, or it is not known.
    pub const HOST_NUMA_ID: i32 = 134;
}

/// Values of `CUpointer_attribute`.
pub mod pointer_attribute {
    /// The context that the memory was allocated in.
    pub const CONTEXT: u32 = 1;
    /// Whether `cuIpcGetMemHandle` shares it.
    pub const LEGACY_IPC: u32 = 10;
    /// The size of the allocation.
    pub const RANGE_SIZE: u32 = 12;
    /// What it can be exported as.
    pub const HANDLE_TYPES: u32 = 14;
    /// The pool that it came from; 0: none.
    pub const POOL: u32 = 17;
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const LOCATION_DEVICE: u32 = 1;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
pub const POINTER_ATTRIBUTE_DEVICE_ORDINAL: u32 = 9;

/// `cuCheckpointProcessLock`.
pub type CheckpointLockFn = unsafe extern "C" fn(i32, *mut CheckpointLockArgs) -> u32;
/// `cuCheckpointProcessCheckpoint`, `…Restore`, `…Unlock`.
pub type CheckpointFn = unsafe extern "C" fn(i32, *mut CheckpointArgs) -> u32;
/// `cuCheckpointProcessRestore`, onto other GPUs.
pub type CheckpointRestoreFn = unsafe extern "C" fn(i32, *mut CheckpointRestoreArgs) -> u32;
/// `cuCheckpointProcessGetState`.
pub type CheckpointGetStateFn = unsafe extern "C" fn(i32, *mut u32) -> u32;
/// `cuDriverGetVersion`.
pub type DriverGetVersionFn = unsafe extern "C" fn(*mut i32) -> u32;
/// `cuCtxGetDevice`.
pub type CtxGetDeviceFn = unsafe extern "C" fn(*mut i32) -> u32;
/// `cuDeviceGetUuid`, `cuDeviceGetUuid_v2`: 16 bytes.
pub type DeviceGetUuidFn = unsafe extern "C" fn(*mut core::ffi::c_void, i32) -> u32;
/// `cuPointerGetAttribute`.
pub type PointerGetAttributeFn = unsafe extern "C" fn(*mut core::ffi::c_void, u32, u64) -> u32;

const _: () = assert!(size_of::<CheckpointLockArgs>() == 64);
const _: () = assert!(size_of::<CheckpointArgs>() == 64);
const _: () = assert!(size_of::<CheckpointRestoreArgs>() == 64);
const _: () = assert!(size_of::<MemAccessDesc>() == 12);
const _: () = assert!(size_of::<MemAllocationProp>() == 32);
const _: () = assert!(size_of::<ArrayMapInfo>() == 96);
const _: () = assert!(size_of::<MemPoolProps>() == 88);
