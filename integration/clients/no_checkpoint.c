/* Ends with SIGILL if the driver's checkpoint is called in it.
 *
 *   no_checkpoint [MIB]
 *
 * It fills MIB (default 64) of memory, overwrites the driver's checkpoint functions with an instruction that no
 * processor has, and prints "ready". Then it executes commands, one per line:
 *
 *   verify   "ok": whether all memory is unchanged */
#define _GNU_SOURCE
#include "client.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct client client;

static const char *const FUNCTIONS[] = {"cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint",
                                        "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"};

#if defined(__x86_64__)
static const unsigned char ILLEGAL[] = {0x0f, 0x0b};
#elif defined(__aarch64__)
static const unsigned char ILLEGAL[] = {0x00, 0x00, 0x00, 0x00};
#endif

static int trap(char *function)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *start = (char *)((size_t)function & ~(page - 1));
    size_t length = (size_t)(function + sizeof ILLEGAL - start);
    if (mprotect(start, length, PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
        return -1;
    memcpy(function, ILLEGAL, sizeof ILLEGAL);
    __builtin___clear_cache(function, function + sizeof ILLEGAL);
    return mprotect(start, length, PROT_READ | PROT_EXEC);
}

/* Overwrites the functions and returns their number. They are found by libc's own dlsym, so that hooks of the same name
 * are not overwritten instead. */
static int trap_all(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *libc = dlopen("libc.so.6", RTLD_NOW);
    /* dlsym is in libc since glibc 2.34, and was in libdl before. */
    void *(*find)(void *, const char *) = libc ? dlsym(libc, "dlsym") : NULL;
    void *libdl = find == NULL ? dlopen("libdl.so.2", RTLD_NOW) : NULL;
    int trapped = 0;
    if (libdl != NULL)
        find = dlsym(libdl, "dlsym");
    for (size_t i = 0; find != NULL && driver != NULL && i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++) {
        char *function = find(driver, FUNCTIONS[i]);
        trapped += function != NULL && trap(function) == 0;
    }
    return trapped;
}

static int obey(char *command)
{
    uint64_t start = now_us(), wrong = 0, checksum = 0;
    CUresult result = 1;
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
        result = client_fill(&client, argc > 1 ? strtoul(argv[1], NULL, 10) : 64, 1);
    int trapped = trap_all();
    answer("ready", result, 0, "\"value\":%d", trapped);
    if (result != 0)
        return 4;
    client_listen(obey);
    return 0;
}
