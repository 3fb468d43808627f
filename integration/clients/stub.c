/* Stands in for libcuda.so.1 when `linked` is linked on a machine without a driver. Never installed. */
#include "cuda_min.h"

#define X(field, symbol, ptds, base, parameters)                                                                      \
    CUresult symbol parameters                                                                                        \
    {                                                                                                                 \
        return 100;                                                                                                   \
    }
CUDA_FUNCTIONS(X)
