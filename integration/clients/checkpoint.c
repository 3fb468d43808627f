/* Makes the driver's checkpoint calls from a shell.
 *
 *   checkpoint PID [lock[=TIMEOUT_MS] | checkpoint | restore[=swap] | unlock | state | thread | announce]...
 *
 * PID 0 is the program itself, after cuInit. restore=swap exchanges GPU 0 and 1, restore=partial passes a map of only
 * one GPU. announce only prints a line: the next call begins immediately after it. Prints one line of JSON per call.
 * Continues after a failure. Exit status 0 if every call succeeded. */
#include "client.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct pair {
    unsigned char old_uuid[16], new_uuid[16];
};

struct restore_args {
    struct pair *pairs;
    unsigned count;
    char reserved[44];
    uint64_t reserved1;
};

static void *library;

static void *function(const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "libcuda.so.1 has no %s; the driver must be 570 or later\n", name);
        exit(3);
    }
    return found;
}

static CUresult restore(int pid, const char *how)
{
    CUresult (*init)(unsigned) = function("cuInit");
    CUresult (*uuid)(void *, CUdevice) = function("cuDeviceGetUuid");
    CUresult (*call)(int, struct restore_args *) = function("cuCheckpointProcessRestore");
    struct pair pairs[2];
    struct restore_args arguments;
    memset(&arguments, 0, sizeof arguments);
    CUresult result = init(0);
    if (result != 0 || how == NULL)
        return result != 0 ? result : call(pid, NULL);
    for (int i = 0; i < 2; i++)
        if ((result = uuid(pairs[i].old_uuid, i)) != 0 || (result = uuid(pairs[i].new_uuid, 1 - i)) != 0)
            return result;
    arguments.pairs = pairs;
    arguments.count = strcmp(how, "partial") == 0 ? 1 : 2;
    return call(pid, &arguments);
}

int main(int argc, char **argv)
{
    int failed = 0;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL || argc < 3) {
        fprintf(stderr, "%s\n", library == NULL ? dlerror() : "usage: see the head of checkpoint.c");
        return 2;
    }
    int pid = atoi(argv[1]);
    if (pid == 0) {
        CUresult (*init)(unsigned) = function("cuInit");
        init(0);
        pid = (int)getpid();
    }
    for (int i = 2; i < argc; i++) {
        char *argument = strchr(argv[i], '=');
        if (argument != NULL)
            *argument++ = 0;
        const char *command = argv[i];
        int value = -1;
        CUresult result = -1;
        uint64_t start = now_us();
        if (strcmp(command, "lock") == 0) {
            CUresult (*call)(int, void *) = function("cuCheckpointProcessLock");
            unsigned arguments[16] = {argument ? (unsigned)strtoul(argument, NULL, 10) : 0};
            result = call(pid, arguments);
        } else if (strcmp(command, "checkpoint") == 0) {
            CUresult (*call)(int, void *) = function("cuCheckpointProcessCheckpoint");
            result = call(pid, NULL);
        } else if (strcmp(command, "restore") == 0) {
            result = restore(pid, argument);
        } else if (strcmp(command, "unlock") == 0) {
            CUresult (*call)(int, void *) = function("cuCheckpointProcessUnlock");
            result = call(pid, NULL);
        } else if (strcmp(command, "state") == 0) {
            CUresult (*call)(int, int *) = function("cuCheckpointProcessGetState");
            result = call(pid, &value);
        } else if (strcmp(command, "announce") == 0) {
            result = 0;
        } else if (strcmp(command, "thread") == 0) {
            CUresult (*call)(int, int *) = function("cuCheckpointProcessGetRestoreThreadId");
            result = call(pid, &value);
        }
        answer(command, result, now_us() - start, "\"value\":%d", value);
        failed |= result != 0;
    }
    return failed;
}
