//! The types and constants of the CUDA 13 driver interface that this library uses.

use std::ffi::c_void;

pub use affinode_sim_protocol::{In, Out, Text, pointer};

/// The driver's result code `CUresult`. 0 means success.
pub type CUresult = i32;
pub type CUdevice = i32;
pub type CUdeviceptr = u64;
/// Type of all opaque handles of the driver: `CUcontext`, `CUstream`, `CUevent`, `CUmodule` and
/// `CUfunction`. See [`handle`].
pub type Handle = usize;
/// Address of host memory. It is dereferenced only inside copies.
pub type HostAddress = usize;

pub const INVALID_VALUE: CUresult = 1;
pub const OUT_OF_MEMORY: CUresult = 2;
pub const NOT_INITIALIZED: CUresult = 3;
pub const DEINITIALIZED: CUresult = 4;
pub const NO_DEVICE: CUresult = 100;
pub const INVALID_DEVICE: CUresult = 101;
pub const INVALID_IMAGE: CUresult = 200;
pub const INVALID_CONTEXT: CUresult = 201;
pub const OPERATING_SYSTEM: CUresult = 304;
pub const INVALID_HANDLE: CUresult = 400;
pub const NOT_FOUND: CUresult = 500;
pub const NOT_READY: CUresult = 600;
pub const ILLEGAL_ADDRESS: CUresult = 700;
pub const PEER_ACCESS_ALREADY_ENABLED: CUresult = 704;
pub const PEER_ACCESS_NOT_ENABLED: CUresult = 705;
pub const HOST_MEMORY_ALREADY_REGISTERED: CUresult = 712;
pub const HOST_MEMORY_NOT_REGISTERED: CUresult = 713;
pub const NOT_SUPPORTED: CUresult = 801;
pub const STREAM_CAPTURE_UNSUPPORTED: CUresult = 900;
pub const STREAM_CAPTURE_INVALIDATED: CUresult = 901;
pub const UNKNOWN: CUresult = 999;

/// Result of a driver function before it is converted to a `CUresult`.
pub type Outcome<T = ()> = Result<T, CUresult>;

/// Converts an [`Outcome`] to a `CUresult`.
pub fn status(outcome: Outcome) -> CUresult {
    outcome.err().unwrap_or(0)
}

/// Kind of the object to which a handle refers.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Context = 1,
    Stream = 2,
    Event = 3,
    Module = 4,
    Function = 5,
    Pool = 6,
    Graph = 7,
}

/// Builds a handle from an object's kind and number. A handle is never a valid address, and a
/// handle of the wrong kind is detected.
pub fn handle(kind: Kind, id: u64) -> Handle {
    ((kind as usize) << 56) | ((id as usize) << 4)
}

/// Returns the number of the object to which a handle refers. Fails if the handle is not of this
/// kind.
pub fn number(kind: Kind, handle: Handle) -> Outcome<u64> {
    if handle >> 56 == kind as usize {
        Ok(((handle << 8) >> 12) as u64)
    } else {
        Err(INVALID_HANDLE)
    }
}

/// The driver's C type `CUuuid`.
pub type Uuid = [u8; 16];

/// The driver's C type `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

/// The driver's C type `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AllocationProp {
    pub kind: u32,
    pub requested_handle_types: u32,
    pub location: Location,
    pub win32_meta_data: usize,
    pub flags: [u8; 8],
}

/// The driver's C type `CUmemPoolProps`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PoolProps {
    pub kind: u32,
    pub handle_types: u32,
    pub location: Location,
    pub win32_security: usize,
    pub most_bytes: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

/// The driver's C type `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: u32,
}

/// The driver's constant `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const LOCATION_DEVICE: u32 = 1;
/// The driver's constant `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const ALLOCATION_PINNED: u32 = 1;
/// The driver's constant `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const ACCESS_READ_WRITE: u32 = 3;
/// The driver's constant `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const HANDLE_POSIX_FD: u32 = 1;

/// The driver's C type `CUlaunchConfig`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: Handle,
    pub attributes: usize,
    pub attribute_count: u32,
}

/// The driver's C type `CUipcMemHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IpcMemHandle(pub [u8; 64]);

/// The driver's C type `CUhostFn`.
pub type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;
/// The driver's C type `CUstreamCallback`.
pub type StreamCallback = Option<unsafe extern "C" fn(Handle, CUresult, *mut c_void)>;

/// The driver's constant `CU_STREAM_LEGACY`.
pub const STREAM_LEGACY: Handle = 1;
/// The driver's constant `CU_STREAM_PER_THREAD`.
pub const STREAM_PER_THREAD: Handle = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_names_one_thing() {
        let stream = handle(Kind::Stream, 77);
        assert_eq!(number(Kind::Stream, stream), Ok(77));
        assert_eq!(number(Kind::Event, stream), Err(INVALID_HANDLE));
        assert_eq!(number(Kind::Stream, 0), Err(INVALID_HANDLE));
    }

    #[test]
    fn structures_have_the_sizes_of_the_header() {
        assert_eq!(size_of::<AllocationProp>(), 32);
        assert_eq!(size_of::<AccessDesc>(), 12);
        assert_eq!(size_of::<PoolProps>(), 88);
        assert_eq!(size_of::<LaunchConfig>(), 56);
    }
}
