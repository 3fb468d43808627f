/* Loads a library whose constructor makes a CUDA call. The thread holds the dynamic loader's lock until that call
 * returns.
 *
 *   constructor [MIB]
 *
 * It fills MIB (default 8) of memory and prints "ready". Then it executes commands, one per line:
 *
 *   load     a thread loads the library; the reply is sent after that
 *   verify   "ok": whether all memory is unchanged */
#ifdef LIBRARY

#include <dlfcn.h>
#include <stddef.h>

__attribute__((constructor)) static void call(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*memory_info)(size_t *, size_t *) = driver ? dlsym(driver, "cuMemGetInfo_v2") : NULL;
    size_t free_bytes, total_bytes;
    if (memory_info != NULL)
        memory_info(&free_bytes, &total_bytes);
}

#else

#include "client.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct client client;

static void *load(void *unused)
{
    uint64_t start = now_us();
    void *library = dlopen("libconstructor.so", RTLD_NOW);
    answer("load", library == NULL, now_us() - start, "\"ok\":%s", library ? "true" : "false");
    return NULL;
}

static int obey(char *command)
{
    uint64_t start = now_us(), wrong = 0, checksum = 0;
    CUresult result = 1;
    pthread_t thread;
    if (strcmp(command, "load") == 0)
        return pthread_create(&thread, NULL, load, NULL) == 0 && pthread_detach(thread) == 0;
    if (strcmp(command, "verify") == 0)
        result = client_verify(&client, &wrong, &checksum);
    answer(command, result, now_us() - start, "\"ok\":%s", result == 0 && wrong == 0 ? "true" : "false");
    return 1;
}

int main(int argc, char **argv)
{
    if (cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 1 ? strtoul(argv[1], NULL, 10) : 8, 1);
    answer("ready", result, 0, "\"ok\":true");
    client_listen(obey);
    return 0;
}

#endif
