/* Finds the driver's functions by linking to libcuda.so.1. */
#include "client.h"

#define X(field, symbol, ptds, base, parameters) CUresult symbol parameters;
CUDA_FUNCTIONS(X)
#undef X

int cuda_load(struct cuda *cuda)
{
#define X(field, symbol, ptds, base, parameters) cuda->field = symbol;
    CUDA_FUNCTIONS(X)
#undef X
    return 0;
}
