/* The part of the CUDA driver interface that these programs use. Types and
 * signatures are the same in all drivers of CUDA 11 to 13.
 *
 * CUDA_FUNCTIONS lists each function once, with all names by which a program may
 * look it up: X(field, exported name, name with per-thread default stream, base name, parameters)
 */
#ifndef CUDA_MIN_H
#define CUDA_MIN_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;

/* Types of the calls that manage physical memory: handle, CUmemLocation, CUmemAllocationProp, CUmemAccessDesc. */
typedef unsigned long long memory_handle;
struct location {
    int kind, id;
};
struct allocation_prop {
    int kind, handle_types;
    struct location location;
    void *win32;
    unsigned char flags[8];
};
struct access {
    struct location location;
    int flags;
};

#define CUDA_FUNCTIONS(X)                                                                                             \
    X(init, cuInit, cuInit, "cuInit", (unsigned flags))                                                               \
    X(driver_version, cuDriverGetVersion, cuDriverGetVersion, "cuDriverGetVersion", (int *version))                   \
    X(device_count, cuDeviceGetCount, cuDeviceGetCount, "cuDeviceGetCount", (int *count))                             \
    X(device_get, cuDeviceGet, cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                          \
    X(device_name, cuDeviceGetName, cuDeviceGetName, "cuDeviceGetName", (char *name, int length, CUdevice device))    \
    X(primary_retain, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                 \
      (CUcontext * context, CUdevice device))                                                                         \
    X(ctx_set, cuCtxSetCurrent, cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext context))                              \
    X(ctx_sync, cuCtxSynchronize, cuCtxSynchronize, "cuCtxSynchronize", (void))                                       \
    X(ctx_set_limit, cuCtxSetLimit, cuCtxSetLimit, "cuCtxSetLimit", (unsigned which, size_t value))                     \
    X(ctx_get_limit, cuCtxGetLimit, cuCtxGetLimit, "cuCtxGetLimit", (size_t * value, unsigned which))                   \
    X(ctx_enable_peer, cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess",                         \
      (CUcontext peer, unsigned flags))                                                                               \
    X(mem_info, cuMemGetInfo_v2, cuMemGetInfo_v2, "cuMemGetInfo", (size_t * free_bytes, size_t *total_bytes))         \
    X(mem_alloc, cuMemAlloc_v2, cuMemAlloc_v2, "cuMemAlloc", (CUdeviceptr * address, size_t bytes))                   \
    X(mem_free, cuMemFree_v2, cuMemFree_v2, "cuMemFree", (CUdeviceptr address))                                       \
    X(mem_managed, cuMemAllocManaged, cuMemAllocManaged, "cuMemAllocManaged",                                         \
      (CUdeviceptr * address, size_t bytes, unsigned flags))                                                          \
    X(copy_in, cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, "cuMemcpyHtoD",                                                 \
      (CUdeviceptr to, const void *from, size_t bytes))                                                               \
    X(copy_out, cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, "cuMemcpyDtoH", (void *to, CUdeviceptr from, size_t bytes))    \
    X(stream_create, cuStreamCreate, cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned flags))           \
    X(stream_sync, cuStreamSynchronize, cuStreamSynchronize_ptsz, "cuStreamSynchronize", (CUstream stream))           \
    X(stream_query, cuStreamQuery, cuStreamQuery_ptsz, "cuStreamQuery", (CUstream stream))                            \
    X(event_create, cuEventCreate, cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                 \
    X(event_record, cuEventRecord, cuEventRecord_ptsz, "cuEventRecord", (CUevent event, CUstream stream))             \
    X(event_query, cuEventQuery, cuEventQuery, "cuEventQuery", (CUevent event))                                       \
    X(event_sync, cuEventSynchronize, cuEventSynchronize, "cuEventSynchronize", (CUevent event))                      \
    X(module_load, cuModuleLoadData, cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void *image))    \
    X(module_function, cuModuleGetFunction, cuModuleGetFunction, "cuModuleGetFunction",                               \
      (CUfunction * function, CUmodule module, const char *name))                                                     \
    X(launch, cuLaunchKernel, cuLaunchKernel_ptsz, "cuLaunchKernel",                                                  \
      (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,             \
       unsigned shared_bytes, CUstream stream, void **parameters, void **extra))

#endif
