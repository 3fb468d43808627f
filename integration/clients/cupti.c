/* A stand-in for CUPTI: the libcupti.so.12 of programs on the simulated GPU. Like CUPTI, it requests the driver's
 * private table for tools, and starts slowly. A thread of it calls the driver through the table, even after end().
 * If CUPTI_WAITS is set in the environment, the thread also waits for the GPU's work.
 *
 *   begin(ms)   attaches; the first time this takes ms milliseconds, without a call of a public function
 *   end()       detaches */
#include "cuda_min.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct tool_table {
    size_t bytes;
    CUresult (*attach)(uint64_t takes_ms, uint64_t unused);
    CUresult (*detach)(uint64_t unused, uint64_t unused_too);
    CUresult (*look)(uint64_t unused, uint64_t unused_too);
};

/* Id of the first table that CUPTI requests. */
static const unsigned char TABLE[16] = {0x2c, 0x8e, 0x0a, 0xd8, 0x07, 0x10, 0xab, 0x4e,
                                        0x90, 0xdd, 0x54, 0x71, 0x9f, 0xe5, 0xf7, 0x4b};

static const struct tool_table *table;
static pthread_t thread;
static void *context;
static CUresult (*set_current)(void *), (*synchronize)(void);

static void *watch(void *unused)
{
    struct timespec pause = {0, 20 * 1000000};
    int waits = getenv("CUPTI_WAITS") != NULL;
    if (waits)
        set_current(context);
    for (;;) {
        table->look(0, 0);
        if (waits)
            synchronize();
        nanosleep(&pause, NULL);
    }
    return unused;
}

static CUresult find_table(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CUresult (*export)(const void **, const void *) = driver ? dlsym(driver, "cuGetExportTable") : NULL;
    CUresult (*get_current)(void **) = driver ? dlsym(driver, "cuCtxGetCurrent") : NULL;
    set_current = driver ? dlsym(driver, "cuCtxSetCurrent") : NULL;
    synchronize = driver ? dlsym(driver, "cuCtxSynchronize") : NULL;
    if (!get_current || !set_current || !synchronize || get_current(&context) != 0)
        return 3;
    return export ? export((const void **)&table, TABLE) : 3;
}

CUresult begin(unsigned takes_ms)
{
    CUresult result = table ? 0 : find_table();
    if (result == 0)
        result = table->attach(thread ? 0 : takes_ms, 0);
    if (result == 0 && !thread && pthread_create(&thread, NULL, watch, NULL) != 0)
        result = 999;
    return result;
}

CUresult end(void)
{
    return table->detach(0, 0);
}
