/* Uses CUDA and makes NVML queries. NVML is found by dlopen and dlsym, or, if LINKED is defined, by a direct link.
 *
 *   nvml [MIB]
 *
 * It fills MIB (default 16) of memory and prints "ready". Then it executes commands from stdin. "result" is NVML's:
 *
 *   init         calls nvmlInit_v2, and gets the handle of the first device
 *   shutdown     nvmlShutdown
 *   ask          queries memory and utilisation of the device ("free_bytes")
 *   utilization  queries the utilisation of the device's processes; blocks while the process is checkpointed
 *   monitor MS   a thread queries every MS milliseconds
 *   asked        number of the monitor's queries ("polls"); elapsed_us is the longest query, result the last error
 *   verify       verifies the program's memory ("ok") */
#include "client.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct memory {
    unsigned long long total, free, used;
};
struct rates {
    unsigned gpu, memory;
};
struct sample {
    unsigned pid;
    unsigned long long at_us;
    unsigned sm, memory, encoder, decoder;
};

#define FUNCTIONS(X)                                                                                                  \
    X(nvmlInit_v2, (void))                                                                                            \
    X(nvmlShutdown, (void))                                                                                           \
    X(nvmlDeviceGetHandleByIndex_v2, (unsigned index, void **device))                                                 \
    X(nvmlDeviceGetMemoryInfo, (void *device, struct memory *memory))                                                 \
    X(nvmlDeviceGetUtilizationRates, (void *device, struct rates *rates))                                             \
    X(nvmlDeviceGetProcessUtilization, (void *device, struct sample *samples, unsigned *count, unsigned long long after))

#ifdef STUB
/* Replaces libnvidia-ml.so.1 while the program is linked on a machine without a driver. It is never installed. */
#define DEFINE(name, parameters)                                                                                      \
    int name parameters                                                                                               \
    {                                                                                                                 \
        return 999;                                                                                                   \
    }
FUNCTIONS(DEFINE)
#else

#ifdef LINKED
#define DECLARE(name, parameters) int name parameters;
#define LOAD(name, parameters)
#define CALL(name) name
#else
#define DECLARE(name, parameters) static int(*name##_) parameters;
#define LOAD(name, parameters)                                                                                        \
    if (library == NULL || (*(void **)&name##_ = dlsym(library, #name)) == NULL)                                      \
        return 13;
#define CALL(name) name##_
#endif
FUNCTIONS(DECLARE)

static struct client client;
static void *device;
static unsigned pause_ms;
static volatile unsigned asked, worst_result;
static volatile unsigned long long longest_us;

static int load(void)
{
#ifndef LINKED
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    FUNCTIONS(LOAD)
#endif
    return 0;
}

static int ask(struct memory *memory)
{
    struct rates rates;
    int result = CALL(nvmlDeviceGetMemoryInfo)(device, memory);
    return result != 0 ? result : CALL(nvmlDeviceGetUtilizationRates)(device, &rates);
}

static void *monitor(void *unused)
{
    for (;;) {
        struct memory memory;
        uint64_t start = now_us();
        int result = ask(&memory);
        uint64_t took = now_us() - start;
        if (took > longest_us)
            longest_us = took;
        if (result != 0)
            worst_result = (unsigned)result;
        asked++;
        sleep_ms(pause_ms);
    }
    return unused;
}

static int obey(char *command)
{
    uint64_t start = now_us();
    int result = 999;
    if (strcmp(command, "init") == 0) {
        result = CALL(nvmlInit_v2)();
        if (result == 0)
            result = CALL(nvmlDeviceGetHandleByIndex_v2)(0, &device);
    } else if (strcmp(command, "shutdown") == 0) {
        result = CALL(nvmlShutdown)();
    } else if (strcmp(command, "ask") == 0) {
        struct memory memory = {0, 0, 0};
        result = ask(&memory);
        answer(command, (CUresult)result, now_us() - start, "\"free_bytes\":%llu", memory.free);
        return 1;
    } else if (strcmp(command, "utilization") == 0) {
        /* A real driver returns 7 if the array cannot hold all samples that the driver may have. */
        static struct sample samples[4096];
        unsigned count = sizeof samples / sizeof *samples;
        result = CALL(nvmlDeviceGetProcessUtilization)(device, samples, &count, 0);
        /* The result 6 means that no process was busy in the sampled time. Here it counts as success. */
        result = result == 6 ? 0 : result;
    } else if (sscanf(command, "monitor %u", &pause_ms) == 1) {
        pthread_t thread;
        result = pthread_create(&thread, NULL, monitor, NULL);
    } else if (strcmp(command, "asked") == 0) {
        answer(command, (CUresult)worst_result, longest_us, "\"polls\":%u", asked);
        return 1;
    } else if (strcmp(command, "verify") == 0) {
        uint64_t wrong = 0, checksum = 0;
        result = (int)client_verify(&client, &wrong, &checksum);
        answer(command, (CUresult)result, now_us() - start, "\"ok\":%s", result == 0 && wrong == 0 ? "true" : "false");
        return 1;
    }
    answer(command, (CUresult)result, now_us() - start, "\"ok\":%s", result == 0 ? "true" : "false");
    return 1;
}

int main(int argc, char **argv)
{
    if (cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 1 ? strtoul(argv[1], NULL, 10) : 16, 1);
    if (result == 0)
        result = (CUresult)load();
    answer("ready", result, 0, "\"ok\":true");
    if (result != 0)
        return 4;
    client_listen(obey);
    return 0;
}
#endif
