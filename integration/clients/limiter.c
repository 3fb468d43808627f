/* A library that hooks the driver to limit VRAM. It is preloaded together with Affinode's library, and hooks as
 * HAMi's does. It has a dlsym of its own, which finds the next dlsym by dlvsym. A program finds its functions by
 * their exported names, by dlsym or by cuGetProcAddress. It finds the driver's functions by dlsym from libcuda.so.1.
 *
 * Allocations beyond LIMIT_MIB (environment variable) fail with "out of memory".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_min.h"

#define OUT_OF_MEMORY 2
#define ENTRIES 256
#define VISIBLE __attribute__((visibility("default")))

typedef void *(*dlsym_fn)(void *, const char *);
typedef CUresult (*door_v1)(const char *, void **, int, uint64_t);
typedef CUresult (*door_v2)(const char *, void **, int, uint64_t, int *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    CUdeviceptr address;
    size_t bytes;
} entries[ENTRIES];
static size_t used_bytes;

static dlsym_fn next_dlsym(void)
{
    static dlsym_fn next;
    if (next == NULL)
        next = (dlsym_fn)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return next;
}

/* Finds the driver's function with the dlsym that comes next after this library's. */
static void *driver(const char *name)
{
    void *found = next_dlsym()(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NODELETE), name);
    if (found == NULL) {
        fprintf(stderr, "limiter: libcuda.so.1 has no %s\n", name);
        exit(4);
    }
    return found;
}

static size_t limit_bytes(void)
{
    const char *text = getenv("LIMIT_MIB");
    return text == NULL ? (size_t)-1 : strtoul(text, NULL, 10) << 20;
}

VISIBLE CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    CUresult (*real)(CUdeviceptr *, size_t) = driver("cuMemAlloc_v2");
    pthread_mutex_lock(&lock);
    CUresult result = used_bytes + bytes > limit_bytes() ? OUT_OF_MEMORY : real(address, bytes);
    for (int i = 0; result == 0 && i < ENTRIES; i++) {
        if (entries[i].bytes == 0) {
            entries[i].address = *address;
            entries[i].bytes = bytes;
            used_bytes += bytes;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

VISIBLE CUresult cuMemFree_v2(CUdeviceptr address)
{
    CUresult (*real)(CUdeviceptr) = driver("cuMemFree_v2");
    pthread_mutex_lock(&lock);
    CUresult result = real(address);
    for (int i = 0; result == 0 && i < ENTRIES; i++) {
        if (entries[i].bytes != 0 && entries[i].address == address) {
            used_bytes -= entries[i].bytes;
            entries[i].bytes = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

VISIBLE CUresult cuGetProcAddress(const char *, void **, int, uint64_t);
VISIBLE CUresult cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

/* Returns this library's function for a base name, as passed to cuGetProcAddress. */
static void *ours(const char *base)
{
    if (strcmp(base, "cuMemAlloc") == 0)
        return cuMemAlloc_v2;
    return strcmp(base, "cuMemFree") == 0 ? (void *)cuMemFree_v2 : NULL;
}

VISIBLE CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    CUresult result = ((door_v1)driver("cuGetProcAddress"))(name, function, version, flags);
    if (result == 0 && ours(name) != NULL)
        *function = ours(name);
    return result;
}

VISIBLE CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    CUresult result = ((door_v2)driver("cuGetProcAddress_v2"))(name, function, version, flags, status);
    if (result == 0 && ours(name) != NULL)
        *function = ours(name);
    return result;
}

VISIBLE void *dlsym(void *handle, const char *name)
{
    if (name[0] == 'c' && name[1] == 'u') {
        Dl_info self;
        void *found = NULL;
        if (dladdr(cuMemAlloc_v2, &self) != 0)
            found = next_dlsym()(dlopen(self.dli_fname, RTLD_LAZY), name);
        if (found != NULL)
            return found;
    }
    return next_dlsym()(handle, name);
}
