/* Calls the driver in a way that bypasses all hooks.
 *
 *   hidden call|nvml [MIB]
 *
 * It fills MIB (default 64) of memory and prints "ready". Then it executes commands, one per line:
 *
 *   hidden   a thread makes the call; the reply is sent after the call has returned
 *   verify   "ok": whether all memory is unchanged
 *
 * The first argument selects the call:
 *
 *   call     a function of the simulated driver's library that a real driver does not have
 *   nvml     nvmlDeviceGetMemoryInfo, found by libc's own dlsym. A second copy of NVML in a namespace of its own would
 *            not block: its calls return while the process is checkpointed (H200, driver 580.159) */
#define _GNU_SOURCE
#include "client.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct client client;
static CUresult (*hidden_call)(void);
static int (*memory_info)(void *device, uint64_t *memory);
static void *device;
static void *nvml;
static char why[256];

/* Stores a description of the failure for the reply, escaped for JSON. */
static void explain(const char *what, const char *error)
{
    snprintf(why, sizeof why, "%s: %s", what, error ? error : "no text");
    for (char *at = why; *at != '\0'; at++)
        if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ')
            *at = ' ';
}

static CUresult ask_nvml(void)
{
    uint64_t memory[3] = {0, 0, 0};
    int result = memory_info(device, memory);
    return result != 0 ? result : memory[0] == 0;
}

static void load_nvml(void)
{
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (nvml == NULL)
        explain("NVML cannot be loaded", dlerror());
}

static CUresult open_nvml(void)
{
    load_nvml();
    if (nvml == NULL)
        return 500;
    /* dlsym is in libc since glibc 2.34, and was in libdl before. */
    void *libc = dlopen("libc.so.6", RTLD_NOW), *libdl = dlopen("libdl.so.2", RTLD_NOW);
    void *(*find)(void *, const char *) = libc ? dlsym(libc, "dlsym") : NULL;
    if (find == NULL && libdl != NULL)
        find = dlsym(libdl, "dlsym");
    if (find == NULL) {
        explain("no dlsym in libc or libdl", dlerror());
        return 500;
    }
    int (*init)(void) = find(nvml, "nvmlInit_v2");
    int (*by_index)(unsigned, void **) = find(nvml, "nvmlDeviceGetHandleByIndex_v2");
    memory_info = find(nvml, "nvmlDeviceGetMemoryInfo");
    hidden_call = ask_nvml;
    int result = init();
    if (result == 0)
        result = by_index(0, &device);
    return result != 0 ? result : ask_nvml();
}

static void *call(void *result)
{
    *(CUresult *)result = hidden_call();
    return NULL;
}

static int obey(char *command)
{
    uint64_t start = now_us(), wrong = 0, checksum = 0;
    CUresult result = 1;
    pthread_t thread;
    if (strcmp(command, "hidden") == 0 && pthread_create(&thread, NULL, call, &result) == 0)
        pthread_join(thread, NULL);
    else if (strcmp(command, "verify") == 0)
        result = client_verify(&client, &wrong, &checksum);
    answer(command, result, now_us() - start, "\"ok\":%s", result == 0 && wrong == 0 ? "true" : "false");
    return 1;
}

int main(int argc, char **argv)
{
    int is_nvml = argc > 1 && strcmp(argv[1], "nvml") == 0;
    if (cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 2 ? strtoul(argv[2], NULL, 10) : 64, 1);
    if (result == 0 && is_nvml)
        result = open_nvml();
    else
        hidden_call = cuda_function("affinode_sim_hidden_call");
    answer("ready", result, 0, "\"pid\":%d,\"why\":\"%s\"", (int)getpid(), why);
    if (result != 0)
        return 4;
    client_listen(obey);
    return 0;
}
