/* Ends while it has memory on the GPU, and prints the results of the driver calls in its exit handler.
 *
 *   exits release|ended|results [MIB]
 *
 * It fills MIB (default 64) of memory, prints "ready", waits for a line on stdin, and calls exit(7). Its exit handler
 * prints one reply, "exit".
 *
 *   release   the handler runs before the driver's own and releases everything; prints the results of these calls
 *   ended     the handler runs after the driver's own and makes the same calls; prints their results
 *   results   the handler runs before the driver's own and copies all memory to the host; prints whether it is correct,
 *             and its checksum; then frees the memory */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct client client;
static CUstream stream;
static CUevent event;

static void release(void)
{
    CUresult (*stream_destroy)(CUstream) = cuda_function("cuStreamDestroy_v2");
    CUresult (*event_destroy)(CUevent) = cuda_function("cuEventDestroy_v2");
    CUresult (*module_unload)(CUmodule) = cuda_function("cuModuleUnload");
    CUresult (*primary_release)(CUdevice) = cuda_function("cuDevicePrimaryCtxRelease_v2");
    CUresult got[7];
    got[0] = client.cuda.ctx_sync();
    got[1] = client.cuda.stream_sync(stream);
    got[2] = event_destroy(event);
    got[3] = stream_destroy(stream);
    got[4] = client.cuda.mem_free(client.memory);
    got[5] = module_unload(client.module);
    got[6] = primary_release(client.device);
    answer("exit", 0, 0, "\"checksum\":\"%d %d %d %d %d %d %d\"", got[0], got[1], got[2], got[3], got[4], got[5],
           got[6]);
}

static void results(void)
{
    uint64_t wrong = 0, checksum = 0;
    CUresult result = client_verify(&client, &wrong, &checksum);
    CUresult freed = client.cuda.mem_free(client.memory);
    answer("exit", result, 0, "\"ok\":%s,\"checksum\":\"%016llx %d\"", result == 0 && wrong == 0 ? "true" : "false",
           (unsigned long long)checksum, freed);
}

int main(int argc, char **argv)
{
    char line[64];
    const char *kind = argc > 1 ? argv[1] : "";
    if (strcmp(kind, "ended") == 0)
        atexit(release);
    if (cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 2 ? strtoul(argv[2], NULL, 10) : 64, 1);
    if (result == 0)
        result = client.cuda.stream_create(&stream, 0);
    if (result == 0)
        result = client.cuda.event_create(&event, 0);
    if (result == 0)
        result = client.cuda.event_record(event, stream);
    if (strcmp(kind, "release") == 0)
        atexit(release);
    if (strcmp(kind, "results") == 0)
        atexit(results);
    answer("ready", result, 0, "\"ok\":true");
    if (result != 0)
        return 4;
    if (fgets(line, sizeof line, stdin) == NULL)
        return 5;
    exit(7);
}
