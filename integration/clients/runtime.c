/* Looks up the driver's functions as libcudart does, on the simulated GPU. It calls cuGetProcAddress for every
 * function, in both variants of the default stream, hundreds of times. Then it requests private tables, checks them by a
 * hash over its process and all addresses, and uses them between its calls.
 *
 *   runtime [MIB]
 *
 * It fills MIB (default 16) of memory and prints "ready". Then it executes commands, one per line:
 *
 *   check    "ok": whether the table is the driver's own
 *   touch    adds 1 to every word, with uses of the table before and after
 *   settle   calls a function of the table that needs the context: if the context is checkpointed, the program ends
 *   verify   "ok": whether all memory is unchanged */
#include "client.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef CUresult (*proc_address)(const char *name, void **address, int cuda_version, uint64_t flags, int *status);

struct runtime_table {
    size_t bytes;
    CUresult (*check)(uint64_t hash, uint64_t unused);
    CUresult (*storage)(uint64_t unused, uint64_t unused_too);
    CUresult (*settle)(uint64_t unused, uint64_t unused_too);
};

/* Id of a table that libcudart requests. */
static const unsigned char TABLE[16] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                        0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
#define LOOK_UPS 12
#define PER_THREAD_DEFAULT_STREAM 2

static struct client client;
static const struct runtime_table *table;

static int look_up(void)
{
    int status = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    proc_address ask = library ? (proc_address)dlsym(library, "cuGetProcAddress_v2") : NULL;
    if (ask == NULL)
        return 1;
    for (int n = 0; n < LOOK_UPS; n++) {
        void *function;
        uint64_t flags = n % 6 == 0 ? PER_THREAD_DEFAULT_STREAM : 0;
#define X(field, symbol, ptds, base, parameters)                                                                      \
    if (ask(base, &function, 12080, flags, &status) != 0 || status != 0 || function == NULL)                          \
        return 1;
        CUDA_FUNCTIONS(X)
#undef X
    }
    CUresult (*export)(const void **, const void *);
    return ask("cuGetExportTable", (void **)&export, 12080, 0, &status) != 0 || export((const void **)&table, TABLE) != 0;
}

static CUresult check(void)
{
    uint64_t seen[] = {(uint64_t)getpid(), (uint64_t)table, (uint64_t)table->check, (uint64_t)table->storage,
                       (uint64_t)table->settle};
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t n = 0; n < sizeof seen / sizeof *seen; n++)
        hash = (hash ^ seen[n]) * 0x100000001b3u;
    return table->check(hash, 0);
}

static CUresult touch(void)
{
    /* storage works in every state, so it may be called here. The public function after it waits at the gate. */
    TRY(table->storage(0, 0));
    TRY(client_touch(&client));
    TRY(client.cuda.ctx_sync());
    return table->storage(0, 0);
}

static int obey(char *command)
{
    uint64_t start = now_us(), wrong = 0, checksum = 0;
    CUresult result = 1;
    if (strcmp(command, "check") == 0)
        result = check();
    else if (strcmp(command, "touch") == 0)
        result = touch();
    else if (strcmp(command, "verify") == 0)
        result = client_verify(&client, &wrong, &checksum);
    else if (strcmp(command, "settle") == 0)
        result = table->settle(0, 0);
    answer(command, result, now_us() - start, "\"ok\":%s", result == 0 && wrong == 0 ? "true" : "false");
    return 1;
}

int main(int argc, char **argv)
{
    if (look_up() != 0 || cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 1 ? strtoul(argv[1], NULL, 10) : 16, 1);
    answer("ready", result != 0 ? result : check(), 0, "\"pid\":%d", (int)getpid());
    client_listen(obey);
    return 0;
}
