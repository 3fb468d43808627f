//! Functions of the CUDA driver that a copier calls on its GPU.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    rc::Rc,
};

use affinode_cuda_sys::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp,
    device_attribute, result,
};
use libloading::Library;

/// Handle type of an exported piece of memory: `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR` of the
/// driver's header.
pub(super) const POSIX_DESCRIPTOR: u32 = 1;

/// Device attribute with the compute mode: `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE` of the driver's
/// header.
const COMPUTE_MODE: i32 = 20;
/// Context limit for the local memory of each thread, in bytes: `CU_LIMIT_STACK_SIZE` of the
/// driver's header.
const STACK_SIZE: u32 = 0;

/// Error of a call of the CUDA driver.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver's library, or one of its functions, cannot be loaded.
    #[error("cannot load the driver's library {library}")]
    Library {
        /// Name of the library that cannot be loaded.
        library: String,
        /// Error that the dynamic loader returned.
        #[source]
        source: libloading::Error,
    },
    /// A driver function has returned an error.
    #[error("the driver's function {call} returned error {code}")]
    Call {
        /// Name of the driver function.
        call: &'static str,
        /// Error code of the driver (`CUresult`).
        code: u32,
    },
    /// The driver lists no GPU with this UUID.
    #[error("the CUDA driver lists no GPU with UUID {0}")]
    NoDevice(String),
    /// The GPU is in this exclusive compute mode. While the copier has a context in such a mode, no
    /// process could be restored.
    #[error("the GPU accepts only one process at a time (compute mode {0}); run nvidia-smi -c 0")]
    Exclusive(i32),
}

impl CudaError {
    /// Returns whether the context is still usable, so that a later call may succeed. It is usable
    /// if memory was short, or if the driver refused memory of a container. After any other error
    /// the context may be unusable.
    pub fn is_passing(&self) -> bool {
        const ALREADY_REGISTERED: u32 = 712;
        const PASSING: [u32; 3] =
            [result::OUT_OF_MEMORY, result::INVALID_VALUE, ALREADY_REGISTERED];
        matches!(self, CudaError::Call { code, .. } if PASSING.contains(code))
    }
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// Addresses of the driver's functions. The library stays loaded while this value exists.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> u32,)*
            /// The loaded library. `None` if a test provides the functions.
            pub(super) _library: Option<Library>,
        }

        impl Functions {
            fn load(name: &str) -> Result<Functions, libloading::Error> {
                // SAFETY: the driver's library; loading it has the same effects as in
                // every CUDA program.
                let library = unsafe { Library::new(name)? };
                Ok(Functions {
                    // SAFETY: the functions of these names have had these signatures since they
                    // exist.
                    $($name: unsafe { *library.get($symbol)? },)*
                    _library: Some(library),
                })
            }
        }
    };
}

functions! {
    init = b"cuInit\0" (u32);
    device_count = b"cuDeviceGetCount\0" (*mut i32);
    device_get = b"cuDeviceGet\0" (*mut i32, i32);
    device_uuid = b"cuDeviceGetUuid\0" (*mut [u8; 16], i32);
    device_attribute = b"cuDeviceGetAttribute\0" (*mut i32, i32, i32);
    primary_retain = b"cuDevicePrimaryCtxRetain\0" (*mut usize, i32);
    ctx_set_current = b"cuCtxSetCurrent\0" (usize);
    ctx_set_limit = b"cuCtxSetLimit\0" (u32, usize);
    mem_get_info = b"cuMemGetInfo_v2\0" (*mut usize, *mut usize);
    mem_create = b"cuMemCreate\0" (*mut u64, usize, *const MemAllocationProp, u64);
    mem_release = b"cuMemRelease\0" (u64);
    mem_address_reserve = b"cuMemAddressReserve\0" (*mut u64, usize, usize, u64, u64);
    mem_address_free = b"cuMemAddressFree\0" (u64, usize);
    mem_map = b"cuMemMap\0" (u64, usize, usize, u64, u64);
    mem_unmap = b"cuMemUnmap\0" (u64, usize);
    mem_set_access = b"cuMemSetAccess\0" (u64, usize, *const MemAccessDesc, usize);
    mem_export = b"cuMemExportToShareableHandle\0" (*mut i32, u64, u32, u64);
    mem_import = b"cuMemImportFromShareableHandle\0" (*mut u64, *mut c_void, u32);
    host_register = b"cuMemHostRegister_v2\0" (*mut c_void, usize, u32);
    host_unregister = b"cuMemHostUnregister\0" (*mut c_void);
    copy_in = b"cuMemcpyHtoDAsync_v2\0" (u64, *const c_void, usize, *mut c_void);
    copy_out = b"cuMemcpyDtoHAsync_v2\0" (*mut c_void, u64, usize, *mut c_void);
    stream_create = b"cuStreamCreate\0" (*mut *mut c_void, u32);
    event_create = b"cuEventCreate\0" (*mut *mut c_void, u32);
    event_record = b"cuEventRecord\0" (*mut c_void, *mut c_void);
    event_query = b"cuEventQuery\0" (*mut c_void);
    event_destroy = b"cuEventDestroy_v2\0" (*mut c_void);
    stream_synchronize = b"cuStreamSynchronize\0" (*mut c_void);
    stream_destroy = b"cuStreamDestroy_v2\0" (*mut c_void);
}

macro_rules! call {
    ($functions:expr, $name:ident($($argument:expr),*)) => {
        // SAFETY: the arguments are numbers, or point to locals of the types that the function
        // expects.
        match unsafe { ($functions.$name)($($argument),*) } {
            result::SUCCESS => Ok(()),
            code => Err(CudaError::Call { call: stringify!($name), code }),
        }
    };
}

/// The driver's functions, and a CUDA context on one GPU. The context is current on this thread,
/// and only this thread uses it.
#[derive(Debug)]
pub struct CudaDriver {
    functions: Functions,
    ordinal: i32,
    uuid: [u8; 16],
    rdma: bool,
}

impl CudaDriver {
    /// Loads the driver's library and creates a context on the GPU with this UUID, in NVML's
    /// notation.
    ///
    /// # Errors
    /// [`CudaError`]: the library cannot be loaded, no device has this UUID, or the context cannot
    /// be created.
    pub fn open(library: &str, uuid: &str) -> Result<Rc<CudaDriver>, CudaError> {
        let functions = Functions::load(library)
            .map_err(|source| CudaError::Library { library: library.to_owned(), source })?;
        CudaDriver::with(functions, uuid)
    }

    /// Creates a context on the GPU with this UUID, with the given driver functions.
    pub(super) fn with(functions: Functions, uuid: &str) -> Result<Rc<CudaDriver>, CudaError> {
        call!(functions, init(0))?;
        let mut count = 0;
        call!(functions, device_count(&raw mut count))?;
        for ordinal in 0..count {
            let (mut device, mut raw, mut rdma) = (0, [0; 16], 0);
            call!(functions, device_get(&raw mut device, ordinal))?;
            call!(functions, device_uuid(&raw mut raw, device))?;
            if !names(uuid, &raw) {
                continue;
            }
            let mut mode = 0;
            call!(functions, device_attribute(&raw mut mode, COMPUTE_MODE, device))?;
            if mode != 0 {
                return Err(CudaError::Exclusive(mode));
            }
            let attribute = device_attribute::RDMA_WITH_VIRTUAL_MEMORY;
            let _ = call!(functions, device_attribute(&raw mut rdma, attribute, device));
            let mut context = 0;
            call!(functions, primary_retain(&raw mut context, device))?;
            call!(functions, ctx_set_current(context))?;
            // The copier launches no kernel, so its context needs no local memory. Without it, the
            // context takes about half of the VRAM (264 MiB less, H200, driver 580.159). If the
            // driver refuses, the context keeps its local memory.
            let _ = call!(functions, ctx_set_limit(STACK_SIZE, 0));
            return Ok(Rc::new(CudaDriver {
                functions,
                ordinal: device,
                uuid: raw,
                rdma: rdma == 1,
            }));
        }
        Err(CudaError::NoDevice(uuid.to_owned()))
    }

    /// Returns the UUID of the GPU, as the driver reports it.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Returns the free device memory in bytes.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused the query.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        let (mut free, mut total) = (0, 0);
        call!(self.functions, mem_get_info(&raw mut free, &raw mut total))?;
        Ok(free as u64)
    }

    /// Makes a small allocation and frees it, so that the driver notices that the GPU has finished
    /// scrubbing (clearing) freed memory. The driver notices the end only inside an allocation of
    /// some process. After 60 GiB were freed, that allocation takes 13 to 20 ms (H200, driver
    /// 580.159).
    pub fn take_note(&self) {
        const LITTLE_BYTES: usize = 2 << 20;
        let (mut handle, property) = (0, self.property(false));
        let made = call!(
            self.functions,
            mem_create(&raw mut handle, LITTLE_BYTES, &raw const property, 0)
        );
        if made.is_ok() {
            let _ = call!(self.functions, mem_release(handle));
        }
    }

    fn property(&self, rdma: bool) -> MemAllocationProp {
        MemAllocationProp {
            kind: ALLOCATION_PINNED,
            handle_types: POSIX_DESCRIPTOR,
            location_type: LOCATION_DEVICE,
            location_id: self.ordinal,
            gpu_direct_rdma: u8::from(rdma && self.rdma),
            ..MemAllocationProp::default()
        }
    }

    /// Registers host memory with the driver, so that the GPU copies at the speed of the bus.
    ///
    /// # Safety
    /// The range must be mapped, and stay mapped until [`Self::unregister`].
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused the registration.
    pub unsafe fn register(&self, start: *mut c_void, bytes: usize) -> Result<(), CudaError> {
        const PORTABLE: u32 = 1;
        call!(self.functions, host_register(start, bytes, PORTABLE))
    }

    /// Unregisters host memory that [`Self::register`] has registered.
    ///
    /// # Errors
    /// [`CudaError`]: the memory may still be registered.
    pub fn unregister(&self, start: *mut c_void) -> Result<(), CudaError> {
        call!(self.functions, host_unregister(start))
    }
}

/// Returns whether a UUID in NVML's notation equals the raw UUID of a device.
fn names(uuid: &str, raw: &[u8; 16]) -> bool {
    let digits = uuid.trim_start_matches("GPU-").bytes().filter(|digit| *digit != b'-');
    digits.eq(raw.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()))
}

/// A block of device memory, mapped for copies to it or from it. When the block is dropped, this
/// process releases the memory. Another process that created or imported the memory keeps it.
#[derive(Debug)]
pub struct DeviceBlock {
    cuda: Rc<CudaDriver>,
    handle: u64,
    /// Start of the reserved device address range. 0 means that no range is reserved yet.
    address: u64,
    bytes: usize,
    is_mapped: bool,
    /// Event that completes when the copies of the block have completed.
    filled: *mut c_void,
}

impl DeviceBlock {
    /// Allocates and maps device memory. `rdma` makes it accessible to other devices on the bus.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused a call. Nothing is allocated then.
    pub fn make(cuda: &Rc<CudaDriver>, bytes: u64, rdma: bool) -> Result<DeviceBlock, CudaError> {
        let property = cuda.property(rdma);
        let mut block = DeviceBlock::nowhere(cuda, bytes)?;
        let functions = &cuda.functions;
        call!(functions, mem_create(&raw mut block.handle, block.bytes, &raw const property, 0))?;
        block.map()?;
        Ok(block)
    }

    /// Imports and maps `bytes` of another process's device memory.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused a call. Nothing is mapped then, and only the other process
    /// has the memory.
    pub fn import(
        cuda: &Rc<CudaDriver>,
        shared: &OwnedFd,
        bytes: u64,
    ) -> Result<DeviceBlock, CudaError> {
        let mut block = DeviceBlock::nowhere(cuda, bytes)?;
        // The driver takes the descriptor's number in place of a pointer.
        let number = std::ptr::without_provenance_mut(shared.as_raw_fd() as usize);
        call!(cuda.functions, mem_import(&raw mut block.handle, number, POSIX_DESCRIPTOR))?;
        block.map()?;
        Ok(block)
    }

    fn nowhere(cuda: &Rc<CudaDriver>, bytes: u64) -> Result<DeviceBlock, CudaError> {
        const WITHOUT_TIMING: u32 = 2;
        let mut filled = std::ptr::null_mut();
        call!(cuda.functions, event_create(&raw mut filled, WITHOUT_TIMING))?;
        let (cuda, bytes) = (Rc::clone(cuda), bytes as usize);
        Ok(DeviceBlock { cuda, handle: 0, address: 0, bytes, is_mapped: false, filled })
    }

    fn map(&mut self) -> Result<(), CudaError> {
        let functions = &self.cuda.functions;
        call!(functions, mem_address_reserve(&raw mut self.address, self.bytes, 0, 0, 0))?;
        call!(functions, mem_map(self.address, self.bytes, 0, self.handle, 0))?;
        self.is_mapped = true;
        let access = MemAccessDesc {
            location_type: LOCATION_DEVICE,
            location_id: self.cuda.ordinal,
            flags: ACCESS_READ_WRITE,
        };
        call!(functions, mem_set_access(self.address, self.bytes, &raw const access, 1))
    }

    /// Returns whether the copies of the block have completed.
    ///
    /// # Errors
    /// [`CudaError`]: a copy has failed.
    pub fn is_copied(&self) -> Result<bool, CudaError> {
        match call!(self.cuda.functions, event_query(self.filled)) {
            Ok(()) => Ok(true),
            Err(CudaError::Call { code: result::NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Exports the block: returns a descriptor with which another process can import it.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused the export.
    pub fn share(&self) -> Result<OwnedFd, CudaError> {
        let mut fd = -1;
        call!(self.cuda.functions, mem_export(&raw mut fd, self.handle, POSIX_DESCRIPTOR, 0))?;
        // SAFETY: the driver has just created the descriptor in this process.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        let functions = &self.cuda.functions;
        // Errors are ignored: the kernel releases what is left when this process ends.
        if !self.filled.is_null() {
            let _ = call!(functions, event_destroy(self.filled));
        }
        if self.is_mapped {
            let _ = call!(functions, mem_unmap(self.address, self.bytes));
        }
        if self.address != 0 {
            let _ = call!(functions, mem_address_free(self.address, self.bytes));
        }
        if self.handle != 0 {
            let _ = call!(functions, mem_release(self.handle));
        }
    }
}

/// A CUDA stream for the copies of one process.
#[derive(Debug)]
pub struct CopyStream {
    cuda: Rc<CudaDriver>,
    stream: *mut c_void,
}

impl CopyStream {
    /// Creates a stream without queued copies.
    ///
    /// # Errors
    /// [`CudaError`]: the driver cannot create a stream.
    pub fn begin(cuda: &Rc<CudaDriver>) -> Result<CopyStream, CudaError> {
        const NON_BLOCKING: u32 = 1;
        let mut stream = std::ptr::null_mut();
        call!(cuda.functions, stream_create(&raw mut stream, NON_BLOCKING))?;
        Ok(CopyStream { cuda: Rc::clone(cuda), stream })
    }

    /// Starts a copy from host memory to an offset in a block of device memory.
    ///
    /// # Safety
    /// The host memory must stay registered, and the block must exist, until this stream is
    /// dropped.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused the copy.
    pub unsafe fn copy_in(
        &mut self,
        from: *const c_void,
        bytes: usize,
        to: &DeviceBlock,
        offset: usize,
    ) -> Result<(), CudaError> {
        let address = to.address + offset as u64;
        call!(self.cuda.functions, copy_in(address, from, bytes, self.stream))
    }

    /// Starts a copy from an offset in a block of device memory to host memory.
    ///
    /// # Safety
    /// The requirements of [`Self::copy_in`] apply.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused the copy.
    pub unsafe fn copy_out(
        &mut self,
        to: *mut c_void,
        bytes: usize,
        from: &DeviceBlock,
        offset: usize,
    ) -> Result<(), CudaError> {
        let address = from.address + offset as u64;
        call!(self.cuda.functions, copy_out(to, address, bytes, self.stream))
    }

    /// Records the block's event after all copies queued for it, so that [`DeviceBlock::is_copied`]
    /// can report their completion.
    ///
    /// # Errors
    /// [`CudaError`]: the driver refused the event.
    pub fn all_of(&mut self, block: &DeviceBlock) -> Result<(), CudaError> {
        call!(self.cuda.functions, event_record(block.filled, self.stream))
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // The memory of a copy must not be freed while the copy runs.
        let _ = call!(self.cuda.functions, stream_synchronize(self.stream));
        let _ = call!(self.cuda.functions, stream_destroy(self.stream));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_told_from_another() {
        let raw: [u8; 16] = std::array::from_fn(|n| n as u8 * 16 + 1);
        let text = "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1";
        assert!(names(text, &raw));
        assert!(!names(&text.replace("f1", "f2"), &raw) && !names("GPU-", &raw));
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let error = CudaDriver::open("/nonexistent/libcuda.so.1", "GPU-1").unwrap_err();
        assert!(error.to_string().contains("/nonexistent/libcuda.so.1"), "{error}");
    }
}
