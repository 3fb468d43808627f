/* Finds the driver's functions by cuGetProcAddress, as the CUDA runtime does. VERSION 1 uses the signature of
 * CUDA 11.3, VERSION 2 that of CUDA 12. */
#include "client.h"

#include <dlfcn.h>
#include <stdio.h>

#if VERSION == 1
typedef CUresult (*proc_address)(const char *name, void **address, int cuda_version, uint64_t flags);
#define PROC_ADDRESS "cuGetProcAddress"
#define ASK(name, address) ask(name, address, 11030, 0)
#else
typedef CUresult (*proc_address)(const char *name, void **address, int cuda_version, uint64_t flags, int *status);
#define PROC_ADDRESS "cuGetProcAddress_v2"
#define ASK(name, address) ask(name, address, 12080, 0, &status)
#endif

int cuda_load(struct cuda *cuda)
{
    int status = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    proc_address ask = library ? (proc_address)dlsym(library, PROC_ADDRESS) : NULL;
    if (ask == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
#define X(field, symbol, ptds, base, parameters)                                                                      \
    if (ASK(base, (void **)&cuda->field) != 0 || status != 0 || cuda->field == NULL) {                                \
        fprintf(stderr, PROC_ADDRESS " has no %s\n", base);                                                           \
        return 1;                                                                                                     \
    }
    CUDA_FUNCTIONS(X)
#undef X
    return 0;
}
