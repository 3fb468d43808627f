/* A program that has loaded a tool, on the simulated GPU.
 *
 *   tools [MIB]
 *
 * It fills MIB (default 16) of memory and prints "ready". Then it executes commands, one per line:
 *
 *   begin [MS]   starts the profiler; the first time this takes MS milliseconds (default 0)
 *   end          ends the profiler
 *   video        requests the private table as a video library does
 *   devices      queries constants: the number of devices, and the first one's name
 *   verify       "ok": whether all memory is unchanged */
#include "client.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Id of the table that libnvcuvid requests. */
static const unsigned char VIDEO[16] = {0x9a, 0xf0, 0x70, 0x7b, 0x8e, 0x2d, 0xd8, 0x4c,
                                        0x8e, 0x4e, 0xb9, 0x94, 0xc8, 0x2d, 0xdc, 0x35};

static struct client client;

/* Finds a function of CUPTI, which is loaded by this program's search path: the folder that contains the program. */
static void *of_cupti(const char *name)
{
    void *library = dlopen("libcupti.so.12", RTLD_NOW);
    void *found = library ? dlsym(library, name) : NULL;
    if (found == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    return found;
}

static CUresult devices(void)
{
    int count = 0;
    char name[96] = "";
    CUresult result = client.cuda.device_count(&count);
    if (result == 0)
        result = client.cuda.device_name(name, sizeof name, client.device);
    return result == 0 && (count < 1 || name[0] == 0) ? 999 : result;
}

static int obey(char *command)
{
    uint64_t start = now_us(), wrong = 0, checksum = 0;
    CUresult result = 1;
    if (strncmp(command, "begin", 5) == 0) {
        CUresult (*begin)(unsigned) = of_cupti("begin");
        result = begin((unsigned)strtoul(command + 5, NULL, 10));
        command[5] = 0;
    } else if (strcmp(command, "end") == 0) {
        CUresult (*end)(void) = of_cupti("end");
        result = end();
    } else if (strcmp(command, "video") == 0) {
        const void *table;
        CUresult (*export)(const void **, const void *) = cuda_function("cuGetExportTable");
        result = export(&table, VIDEO);
    } else if (strcmp(command, "devices") == 0) {
        result = devices();
    } else if (strcmp(command, "verify") == 0) {
        result = client_verify(&client, &wrong, &checksum);
    }
    answer(command, result, now_us() - start, "\"ok\":%s", result == 0 && wrong == 0 ? "true" : "false");
    return 1;
}

int main(int argc, char **argv)
{
    if (cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 1 ? strtoul(argv[1], NULL, 10) : 16, 1);
    answer("ready", result, 0, "\"pid\":%d", (int)getpid());
    client_listen(obey);
    return 0;
}
