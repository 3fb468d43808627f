/* Finds the driver's functions by dlopen and dlsym. If PTDS is defined, uses the variants for the per-thread default
 * stream. */
#include "client.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int cuda_load(struct cuda *cuda)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
#ifdef PTDS
#define NAME(symbol, ptds) #ptds
#else
#define NAME(symbol, ptds) #symbol
#endif
#define X(field, symbol, ptds, base, parameters)                                                                      \
    if ((*(void **)&cuda->field = dlsym(library, NAME(symbol, ptds))) == NULL) {                                      \
        fprintf(stderr, "libcuda.so.1 has no %s\n", NAME(symbol, ptds));                                              \
        return 1;                                                                                                     \
    }
    CUDA_FUNCTIONS(X)
#undef X
    return 0;
}

void *cuda_function(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "libcuda.so.1 has no %s\n", name);
        exit(3);
    }
    return found;
}
