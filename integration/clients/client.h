/* The parts that the client programs share: the driver's functions, the setup of a GPU,
 * a pattern in its memory, and replies as lines of JSON. */
#ifndef CLIENT_H
#define CLIENT_H

#include "cuda_min.h"

#define X(field, symbol, ptds, base, parameters) CUresult(*field) parameters;
struct cuda {
    CUDA_FUNCTIONS(X)
};
#undef X

/* If a call fails, returns its error from the calling function, which must return a CUresult. */
#define TRY(call)                                                                                                     \
    do {                                                                                                              \
        CUresult result_ = (call);                                                                                    \
        if (result_ != 0)                                                                                             \
            return result_;                                                                                           \
    } while (0)

/* Fills the table of driver functions. Each program is linked with one loader, which defines this function. It prints
 * missing functions to stderr, and returns 0 if none is missing. */
int cuda_load(struct cuda *cuda);
/* Returns a driver function that is not in the table. If there is none, the program ends with status 3. Defined in
 * load_dlsym.c. */
void *cuda_function(const char *name);

/* An initialised device, and one allocation that is filled by a seed. */
struct client {
    struct cuda cuda;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction fill, add, spin, pattern, check;
    CUdeviceptr memory;
    size_t words;
    uint32_t seed;
    uint32_t touches;
};

/* Calls cuInit, retains the primary context and loads the kernels. Returns the first CUresult that is not 0. */
CUresult client_open(struct client *client, int device);
/* Allocates memory and fills it by the seed. */
CUresult client_fill(struct client *client, size_t mib, uint32_t seed);
/* Fills the words of the allocation by the seed. */
CUresult client_write(struct client *client, uint32_t seed);
/* Calls obey for each line of stdin, until obey returns 0 or the input ends. */
void client_listen(int (*obey)(char *command));
/* Adds 1 to every word with a kernel on the default stream. Does not wait for the kernel. */
CUresult client_touch(struct client *client);
/* Keeps the default stream busy for this time. Does not wait. */
CUresult client_spin(struct client *client, unsigned ms);
/* Copies all words to the host. Returns the number of wrong words, and a checksum of all words. */
CUresult client_verify(struct client *client, uint64_t *wrong, uint64_t *checksum);

/* Expected value of each word: the seed's pattern at its index, times scale, plus add. */
struct content {
    uint32_t seed, scale, add;
};

/* Fills words by the seed and their index with a kernel, as client_write does. Does not wait for the kernel. */
CUresult client_pattern(struct client *client, CUdeviceptr at, size_t words, uint32_t seed);
/* Compares all words in a kernel, and adds the number of wrong words to *wrong. Waits for the kernel. */
CUresult client_check(struct client *client, CUdeviceptr at, size_t words, struct content content, uint64_t *wrong);

/* CLOCK_MONOTONIC, in microseconds and in nanoseconds. */
uint64_t now_us(void);
uint64_t now_ns(void);
/* Sleeps for the whole time, even if signals arrive. */
void sleep_ms(unsigned ms);
/* Prints one line of JSON with a single write: command, result, elapsed_us, and the fields in more. */
void answer(const char *command, CUresult result, uint64_t elapsed_us, const char *more, ...)
    __attribute__((format(printf, 4, 5)));

#endif
