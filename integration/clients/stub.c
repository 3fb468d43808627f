/* Replaces libcuda.so.1 while the program `linked` is linked on a machine without a driver. It is never installed. */
#include "cuda_min.h"

#define X(field, symbol, ptds, base, parameters)                                                                      \
    CUresult symbol parameters                                                                                        \
    {                                                                                                                 \
        return 100;                                                                                                   \
    }
CUDA_FUNCTIONS(X)
