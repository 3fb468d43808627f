/* What the client programs share: the driver's functions, a GPU set up for use,
 * a pattern in its memory, and answers as lines of JSON. */
#ifndef CLIENT_H
#define CLIENT_H

#include "cuda_min.h"

#define X(field, symbol, ptds, base, parameters) CUresult(*field) parameters;
struct cuda {
    CUDA_FUNCTIONS(X)
};
#undef X

/* Returns what a call did not like, from a function that returns such. */
#define TRY(call)                                                                                                     \
    do {                                                                                                              \
        CUresult result_ = (call);                                                                                    \
        if (result_ != 0)                                                                                             \
            return result_;                                                                                           \
    } while (0)

/* Fills the table. One loader is linked into each program; it says on stderr what is missing. 0: all there. */
int cuda_load(struct cuda *cuda);
/* A function of the driver beyond the table; the program ends with status 3 when there is none. Of load_dlsym.c. */
void *cuda_function(const char *name);

/* One allocation, filled by seed, on a device made ready. */
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

/* cuInit, primary context, kernels. Returns the first CUresult that is not 0. */
CUresult client_open(struct client *client, int device);
/* Allocates and fills by seed. */
CUresult client_fill(struct client *client, size_t mib, uint32_t seed);
/* Fills by seed the words that are at memory. */
CUresult client_write(struct client *client, uint32_t seed);
/* Obeys each line of stdin, until it is told not to (0) or there is none. */
void client_listen(int (*obey)(char *command));
/* Adds 1 to every word with a kernel, on the default stream; does not wait. */
CUresult client_touch(struct client *client);
/* Keeps the default stream busy; does not wait. */
CUresult client_spin(struct client *client, unsigned ms);
/* Reads everything back: the number of wrong words, and a checksum of all. */
CUresult client_verify(struct client *client, uint64_t *wrong, uint64_t *checksum);

/* What words hold: the pattern of the seed at each index, times scale, plus add. */
struct content {
    uint32_t seed, scale, add;
};

/* Fills words by seed with a kernel, each by its place, as client_write does; does not wait. */
CUresult client_pattern(struct client *client, CUdeviceptr at, size_t words, uint32_t seed);
/* Reads all words with a kernel and adds to wrong how many are not so. Waits. */
CUresult client_check(struct client *client, CUdeviceptr at, size_t words, struct content content, uint64_t *wrong);

/* CLOCK_MONOTONIC in microseconds, in nanoseconds. */
uint64_t now_us(void);
uint64_t now_ns(void);
/* Sleeps, over signals too. */
void sleep_ms(unsigned ms);
/* One line of JSON: command, result, elapsed_us and what more says, printed at once. */
void answer(const char *command, CUresult result, uint64_t elapsed_us, const char *more, ...)
    __attribute__((format(printf, 4, 5)));

#endif
