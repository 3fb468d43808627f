//! Table of the driver's functions that have a wrapper in this library. A wrapper has the signature
//! of its function, and runs while the hook counts the call as being in progress. It passes on
//! every call that does not concern swappable memory.

use affinode_cuda_sys::hook::Function;

use super::{alloc_wrappers, contexts, ipc, pending_work, stream_pools, vmm};

macro_rules! stand_ins {
    ($($function:ident $stand_in:path;)*) => {
        /// The functions that have a wrapper. If the driver exports the same function under an old
        /// and a new name, the two names are next to each other.
        pub const FUNCTIONS: [Function; [$(Function::$function,)*].len()] =
            [$(Function::$function,)*];

        /// Returns the address of the wrapper of a function. `None`: the function has no wrapper.
        pub fn stand_in(function: Function) -> Option<usize> {
            match function {
                $(Function::$function => Some($stand_in as *const () as usize),)*
                _ => None,
            }
        }
    };
}

stand_ins! {
    cuMemAlloc_v2 alloc_wrappers::mem_alloc;
    cuMemAllocPitch_v2 alloc_wrappers::mem_alloc_pitch;
    cuMemFree_v2 alloc_wrappers::mem_free;
    cuMemGetAddressRange_v2 alloc_wrappers::mem_get_address_range;
    cuPointerGetAttribute alloc_wrappers::pointer_get_attribute;
    cuPointerGetAttributes alloc_wrappers::pointer_get_attributes;
    cuPointerSetAttribute alloc_wrappers::pointer_set_attribute;
    cuMemRetainAllocationHandle vmm::mem_retain_handle;
    cuMemGetHandleForAddressRange alloc_wrappers::mem_get_handle_for_range;
    cuIpcGetMemHandle ipc::ipc_get_mem_handle;
    cuIpcOpenMemHandle_v2 ipc::ipc_open_mem_handle_v2;
    cuIpcOpenMemHandle ipc::ipc_open_mem_handle;
    cuIpcCloseMemHandle ipc::ipc_close_mem_handle;
    cuCtxDestroy_v2 contexts::ctx_destroy;
    cuCtxDestroy contexts::ctx_destroy;
    cuCtxAttach contexts::ctx_attach;
    cuCtxDetach contexts::ctx_detach;
    cuDevicePrimaryCtxReset_v2 contexts::primary_reset;
    cuDevicePrimaryCtxReset contexts::primary_reset;
    cuDevicePrimaryCtxRelease_v2 contexts::primary_release;
    cuDevicePrimaryCtxRelease contexts::primary_release;
    cuCtxEnablePeerAccess alloc_wrappers::ctx_enable_peer_access;
    cuMemCreate vmm::mem_create;
    cuMemRelease vmm::mem_release;
    cuMemMap vmm::mem_map;
    cuMemUnmap vmm::mem_unmap;
    cuMemSetAccess vmm::mem_set_access;
    cuMemExportToShareableHandle vmm::mem_export;
    cuMemGetAllocationPropertiesFromHandle vmm::mem_get_property;
    cuMemMapArrayAsync vmm::mem_map_array;
    cuMemMapArrayAsync_ptsz vmm::mem_map_array_ptsz;
    cuGreenCtxDestroy contexts::green_ctx_destroy;
    cuCtxFromGreenCtx alloc_wrappers::ctx_from_green;
    cuMemFreeAsync stream_pools::mem_free_async;
    cuMemFreeAsync_ptsz stream_pools::mem_free_async_ptsz;
    cuMemAllocAsync stream_pools::mem_alloc_async;
    cuMemAllocAsync_ptsz stream_pools::mem_alloc_async_ptsz;
    cuMemAllocFromPoolAsync stream_pools::mem_alloc_from_pool;
    cuMemAllocFromPoolAsync_ptsz stream_pools::mem_alloc_from_pool_ptsz;
    cuMemPoolCreate stream_pools::pool_create;
    cuMemPoolDestroy stream_pools::pool_destroy;
    cuMemPoolGetAttribute stream_pools::pool_get_attribute;
    cuMemPoolSetAttribute stream_pools::pool_set_attribute;
    cuMemPoolSetAccess stream_pools::pool_set_access;
    cuMemPoolTrimTo stream_pools::pool_trim_to;
    cuStreamSynchronize stream_pools::stream_synchronize;
    cuStreamSynchronize_ptsz stream_pools::stream_synchronize_ptsz;
    cuEventSynchronize stream_pools::event_synchronize;
    cuCtxSynchronize stream_pools::ctx_synchronize;
    cuCtxSynchronize_v2 stream_pools::ctx_synchronize_v2;
    cuCtxCreate pending_work::ctx_create;
    cuCtxCreate_v2 pending_work::ctx_create_v2;
    cuCtxCreate_v3 pending_work::ctx_create_v3;
    cuCtxCreate_v4 pending_work::ctx_create_v4;
    cuStreamBeginCapture pending_work::begin_capture;
    cuStreamBeginCapture_ptsz pending_work::begin_capture_ptsz;
    cuStreamBeginCapture_v2 pending_work::begin_capture_v2;
    cuStreamBeginCapture_v2_ptsz pending_work::begin_capture_v2_ptsz;
    cuStreamBeginCaptureToGraph pending_work::begin_capture_to_graph;
    cuStreamBeginCaptureToGraph_ptsz pending_work::begin_capture_to_graph_ptsz;
    cuStreamBeginCaptureToCig pending_work::begin_capture_to_cig;
    cuStreamBeginCaptureToCig_ptsz pending_work::begin_capture_to_cig_ptsz;
    cuStreamBeginRecaptureToGraph pending_work::begin_recapture;
    cuStreamBeginRecaptureToGraph_ptsz pending_work::begin_recapture_ptsz;
    cuStreamEndCapture pending_work::end_capture;
    cuStreamEndCapture_ptsz pending_work::end_capture_ptsz;
    cuStreamEndCaptureToCig pending_work::end_capture_to_cig;
    cuStreamEndCaptureToCig_ptsz pending_work::end_capture_to_cig_ptsz;
    cuStreamDestroy pending_work::stream_destroy;
    cuStreamDestroy_v2 pending_work::stream_destroy_v2;
}
