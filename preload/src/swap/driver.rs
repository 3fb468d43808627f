//! The functions of the CUDA driver that swapping needs, looked up by their names in libcuda.

use core::ffi::{c_char, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use affinode_cuda_sys::{ArrayMapInfo, MemAccessDesc, MemAllocationProp, MemPoolProps};

use super::ipc::ByValue;
use crate::libcuda;

macro_rules! functions {
    ($(#[$doc:meta])* $are_all_there:ident; $($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        $(
            #[doc = concat!("`", $symbol, "`, if libcuda has it.")]
            pub fn $name() -> Option<unsafe extern "C" fn($($argument),*) -> u32> {
                static KNOWN: AtomicUsize = AtomicUsize::new(0);
                let mut address = KNOWN.load(Ordering::Relaxed);
                if address == 0 {
                    address = libcuda::function($symbol.as_bytes())?;
                    KNOWN.store(address, Ordering::Relaxed);
                }
                // SAFETY: the function of this name has had this signature since it exists.
                Some(unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($argument),*) -> u32>(address) })
            }
        )*

        $(#[$doc])*
        pub fn $are_all_there() -> bool {
            $($name().is_some())&&*
        }
    };
}

functions! {
    /// Whether libcuda has all functions that swapping needs.
    is_complete;
    mem_alloc = "cuMemAlloc_v2" (*mut u64, usize);
    mem_alloc_pitch = "cuMemAllocPitch_v2" (*mut u64, *mut usize, usize, usize, u32);
    mem_free = "cuMemFree_v2" (u64);
    mem_get_address_range = "cuMemGetAddressRange_v2" (*mut u64, *mut usize, u64);
    pointer_get_attribute = "cuPointerGetAttribute" (*mut c_void, u32, u64);
    pointer_get_attributes = "cuPointerGetAttributes" (u32, *const u32, *const *mut c_void, u64);
    ctx_get_current = "cuCtxGetCurrent" (*mut usize);
    ctx_get_device = "cuCtxGetDevice" (*mut i32);
    ctx_push_current = "cuCtxPushCurrent_v2" (usize);
    ctx_pop_current = "cuCtxPopCurrent_v2" (*mut usize);
    ctx_synchronize = "cuCtxSynchronize" ();
    ctx_destroy = "cuCtxDestroy_v2" (usize);
    ctx_enable_peer_access = "cuCtxEnablePeerAccess" (usize, u32);
    primary_retain = "cuDevicePrimaryCtxRetain" (*mut usize, i32);
    primary_release = "cuDevicePrimaryCtxRelease_v2" (i32);
    primary_reset = "cuDevicePrimaryCtxReset_v2" (i32);
    primary_get_state = "cuDevicePrimaryCtxGetState" (i32, *mut u32, *mut i32);
    device_get_attribute = "cuDeviceGetAttribute" (*mut i32, i32, i32);
    mem_get_granularity = "cuMemGetAllocationGranularity" (*mut usize, *const MemAllocationProp, u32);
    mem_address_reserve = "cuMemAddressReserve" (*mut u64, usize, usize, u64, u64);
    mem_address_free = "cuMemAddressFree" (u64, usize);
    mem_create = "cuMemCreate" (*mut u64, usize, *const MemAllocationProp, u64);
    mem_release = "cuMemRelease" (u64);
    mem_map = "cuMemMap" (u64, usize, usize, u64, u64);
    mem_export = "cuMemExportToShareableHandle" (*mut c_void, u64, u32, u64);
    mem_import = "cuMemImportFromShareableHandle" (*mut u64, usize, u32);
    device_get_uuid = "cuDeviceGetUuid" (*mut [u8; 16], i32);
    mem_get_property = "cuMemGetAllocationPropertiesFromHandle" (*mut MemAllocationProp, u64);
    mem_unmap = "cuMemUnmap" (u64, usize);
    mem_set_access = "cuMemSetAccess" (u64, usize, *const MemAccessDesc, usize);
    mem_retain_handle = "cuMemRetainAllocationHandle" (*mut u64, u64);
    pointer_set_attribute = "cuPointerSetAttribute" (*const c_void, u32, u64);
    ipc_get_mem_handle = "cuIpcGetMemHandle" (*mut c_void, u64);
    ipc_close_mem_handle = "cuIpcCloseMemHandle" (u64);
    host_register = "cuMemHostRegister_v2" (*mut c_void, usize, u32);
    host_unregister = "cuMemHostUnregister" (*mut c_void);
    copy_out = "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, *mut c_void);
    copy_in = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, *mut c_void);
    clear = "cuMemsetD8Async" (u64, u8, usize, *mut c_void);
    stream_create = "cuStreamCreate" (*mut *mut c_void, u32);
    stream_synchronize = "cuStreamSynchronize" (*mut c_void);
    stream_destroy = "cuStreamDestroy_v2" (*mut c_void);
    module_load_data = "cuModuleLoadData" (*mut usize, *const c_void);
    module_get_function = "cuModuleGetFunction" (*mut usize, usize, *const c_char);
    module_unload = "cuModuleUnload" (usize);
    launch_kernel = "cuLaunchKernel" (usize, u32, u32, u32, u32, u32, u32, u32, *mut c_void, *mut *mut c_void, *mut *mut c_void);
}

functions! {
    /// Whether libcuda has all functions that stream-ordered memory needs. Drivers have them as of
    /// CUDA 12.0.
    has_pools;
    event_create = "cuEventCreate" (*mut usize, u32);
    event_destroy = "cuEventDestroy_v2" (usize);
    event_record = "cuEventRecord" (usize, *mut c_void);
    event_query = "cuEventQuery" (usize);
    event_synchronize = "cuEventSynchronize" (usize);
    exchange_mode = "cuThreadExchangeStreamCaptureMode" (*mut u32);
    mem_alloc_async = "cuMemAllocAsync" (*mut u64, usize, *mut c_void);
    mem_alloc_from_pool = "cuMemAllocFromPoolAsync" (*mut u64, usize, usize, *mut c_void);
    mem_free_async = "cuMemFreeAsync" (u64, *mut c_void);
    device_get_pool = "cuDeviceGetMemPool" (*mut usize, i32);
    device_get_default_pool = "cuDeviceGetDefaultMemPool" (*mut usize, i32);
    pool_create = "cuMemPoolCreate" (*mut usize, *const MemPoolProps);
    pool_destroy = "cuMemPoolDestroy" (usize);
    pool_get_attribute = "cuMemPoolGetAttribute" (usize, u32, *mut c_void);
    pool_set_attribute = "cuMemPoolSetAttribute" (usize, u32, *mut c_void);
    pool_set_access = "cuMemPoolSetAccess" (usize, *const MemAccessDesc, usize);
    pool_trim_to = "cuMemPoolTrimTo" (usize, usize);
    stream_get_context = "cuStreamGetCtx" (*mut c_void, *mut usize);
    stream_get_id = "cuStreamGetId" (*mut c_void, *mut u64);
    stream_is_capturing = "cuStreamIsCapturing" (*mut c_void, *mut u32);
}

/// Exchanges the calling thread's stream capture mode with `mode`, by
/// `cuThreadExchangeStreamCaptureMode`. Does nothing if the driver does not have this function.
pub fn exchange_capture_mode(mode: &mut u32) {
    if let Some(exchange) = exchange_mode() {
        // SAFETY: the function's signature since it exists.
        let _ = unsafe { exchange(mode) };
    }
}

macro_rules! later_functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($argument:ty),*);)*) => {$(
        $(#[$doc])*
        pub fn $name() -> Option<unsafe extern "C" fn($($argument),*) -> u32> {
            let address = libcuda::function($symbol)?;
            // SAFETY: the function of this name has had this signature since it exists.
            Some(unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($argument),*) -> u32>(address) })
        }
    )*};
}

later_functions! {
    /// `cuCtxAttach`, deprecated since CUDA 4.0.
    ctx_attach = b"cuCtxAttach" (*mut usize, u32);
    /// `cuCtxDetach`, deprecated since CUDA 4.0.
    ctx_detach = b"cuCtxDetach" (usize);
    /// `cuCtxRecordEvent`, available as of CUDA 12.5.
    ctx_record_event = b"cuCtxRecordEvent" (usize, usize);
    /// `cuCtxGetLimit`, available as of CUDA 3.1.
    ctx_get_limit = b"cuCtxGetLimit" (*mut usize, u32);
    /// `cuCtxSetLimit`, available as of CUDA 3.1.
    ctx_set_limit = b"cuCtxSetLimit" (u32, usize);
    /// `cuMemcpyDtoDAsync`, available as of CUDA 3.2.
    copy_across = b"cuMemcpyDtoDAsync_v2" (u64, u64, usize, *mut c_void);
    /// `cuMemGetHandleForAddressRange`, available as of CUDA 11.7.
    mem_get_handle_for_range = b"cuMemGetHandleForAddressRange" (*mut c_void, u64, usize, u32, u64);
    /// `cuMemMapArrayAsync`, available as of CUDA 11.1.
    mem_map_array = b"cuMemMapArrayAsync" (*mut ArrayMapInfo, u32, *mut c_void);
    /// `cuMemMapArrayAsync` for per-thread default streams.
    mem_map_array_ptsz = b"cuMemMapArrayAsync_ptsz" (*mut ArrayMapInfo, u32, *mut c_void);
    /// `cuIpcOpenMemHandle_v2`, available as of CUDA 11.0. Its handle's format differs from that of
    /// the function without `_v2`.
    ipc_open_mem_handle_v2 = b"cuIpcOpenMemHandle_v2" (*mut u64, ByValue, u32);
    /// `cuIpcOpenMemHandle` as it was before CUDA 11.0.
    ipc_open_mem_handle = b"cuIpcOpenMemHandle" (*mut u64, ByValue, u32);
    /// `cuMemAllocAsync` for per-thread default streams, available as of CUDA 11.2.
    mem_alloc_async_ptsz = b"cuMemAllocAsync_ptsz" (*mut u64, usize, *mut c_void);
    /// `cuMemAllocFromPoolAsync` for per-thread default streams: allocates from the given pool.
    mem_alloc_from_pool_ptsz = b"cuMemAllocFromPoolAsync_ptsz" (*mut u64, usize, usize, *mut c_void);
    /// `cuMemFreeAsync` for per-thread default streams, available as of CUDA 11.2.
    mem_free_async_ptsz = b"cuMemFreeAsync_ptsz" (u64, *mut c_void);
    /// `cuCtxSynchronize_v2`, available as of CUDA 13.0.
    ctx_synchronize_v2 = b"cuCtxSynchronize_v2" (usize);
    /// `cuCtxFromGreenCtx`, available as of CUDA 12.4.
    ctx_from_green = b"cuCtxFromGreenCtx" (*mut usize, usize);
    /// `cuGreenCtxDestroy`, available as of CUDA 12.4.
    green_ctx_destroy = b"cuGreenCtxDestroy" (usize);
}

/// Calls a function of the driver. The function exists, because [`is_complete`] was checked before
/// any wrapper was installed.
macro_rules! call {
    ($name:ident($($argument:expr),*)) => {
        match $crate::swap::driver::$name() {
            // SAFETY: the arguments are the application's own, or point to locals of their types.
            Some(function) => unsafe { function($($argument),*) },
            None => result::NOT_INITIALIZED,
        }
    };
}
pub(super) use call;
