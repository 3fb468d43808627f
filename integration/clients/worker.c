/* A CUDA application that executes commands.
 *
 *   PROGRAM [--mib N] [--seed S] [--piece-mib M] [--device D] [--script "touch;sleep 2000;verify"] [--period-ms P]
 *
 * It allocates N MiB (default 64), fills them by seed (default 1), then executes commands, one per line: first those of
 * --script, then those from stdin. With --script it ends at the end of the script, unless the script ends with "stdin".
 * With --period-ms, it launches a kernel every P ms and waits for it, between the commands from stdin, without end. It
 * replies to every command with one line of JSON on stdout. With --piece-mib, it maps its memory in pieces of M MiB
 * (cuMemCreate), as some allocators do:
 *
 *   {"command":"touch","result":0,"elapsed_us":12,"at_us":3456, ...}
 *
 * result is the CUresult, elapsed_us the time of the call, at_us CLOCK_MONOTONIC.
 *
 *   verify          compares all allocations: "ok", "wrong", "bytes" compared, "checksum"; the first allocation is
 *                   compared on the host, the others by a kernel
 *   check           compares with kernels only, which on a GPU takes a second for 60 GiB; no "checksum"
 *   touch           adds 1 to every word with a kernel (verify expects it), does not wait
 *   sync            cuCtxSynchronize
 *   streamsync, streamquery, eventsync, eventquery     on the program's own stream, and an event recorded on it
 *   record          cuEventRecord of that event
 *   streamcreate    cuStreamCreate
 *   meminfo         cuMemGetInfo: "free_bytes", "total_bytes"
 *   alloc N [V]     allocates N MiB more, filled with a pattern in which each word depends on its index, or with V in
 *                   every word; if V is -, it is neither filled nor verified
 *   free            frees the allocation that was made last
 *   set N V         sets every word of the Nth further allocation (counted from 0) to V
 *   poke OFFSET [N] changes a byte in the first allocation, or in the Nth further one; verify does not expect it
 *   stack N         sets the local memory of each thread of the GPU to N bytes
 *   limit           returns that number: "value"
 *   spin MS         launches a kernel of MS milliseconds, does not wait
 *   managed         allocates 1 MiB of managed memory
 *   stray           flips one bit of host memory with its copied-out contents
 *   peer            enables peer access from this device's context to the other device's
 *   fork            forks a child that makes a CUDA call and exits: "child_result", "child_status"
 *   orphan          forks a child that does nothing and outlives this program by up to a minute: "child"
 *   exec-info       "pid", "uid", "device_name", "driver_version", "program"
 *   init            calls cuInit again
 *   version         cuDriverGetVersion
 *   poll MS         starts a thread that queries the stream and the event every MS milliseconds
 *   polled          number of these queries: "polls"; "ok" if all returned that the work is done
 *   sleep MS
 *   quit
 *
 * The programs linked, dlopen_dlsym, proc_address_v1, proc_address_v2 and ptds are built from this file. Each finds the
 * driver's functions in a different way.
 */
#include "client.h"

#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_ALLOCATIONS 256
/* CU_LIMIT_STACK_SIZE */
#define STACK_SIZE 0

static struct client client;
static CUstream stream;
static CUevent event;
static CUdeviceptr allocations[MAX_ALLOCATIONS];
static size_t allocation_words[MAX_ALLOCATIONS];
static struct content allocation_contents[MAX_ALLOCATIONS];
static int allocation_is_filled[MAX_ALLOCATIONS];
static int allocation_count;
static const char *program;

#define TIMED(call)                                                                                                   \
    do {                                                                                                              \
        uint64_t start_ = now_us();                                                                                   \
        CUresult result_ = (call);                                                                                    \
        answer(command, result_, now_us() - start_, "%s", "");                                                        \
        return 1;                                                                                                     \
    } while (0)

static CUresult set_all(unsigned index, const char *value)
{
    if (value == NULL || index >= (unsigned)allocation_count)
        return 1;
    struct content *content = &allocation_contents[index];
    *content = (struct content){.add = (uint32_t)strtoul(value, NULL, 10)};
    allocation_is_filled[index] = 1;
    void *parameters[] = {&allocations[index], &allocation_words[index], &content->add};
    return client.cuda.launch(client.fill, 128, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
}

static CUresult alloc_more(size_t mib, const char *value)
{
    int index = allocation_count;
    if (index == MAX_ALLOCATIONS)
        return 2;
    TRY(client.cuda.mem_alloc(&allocations[index], mib << 20));
    allocation_count++;
    allocation_words[index] = mib << 18;
    allocation_is_filled[index] = 0;
    if (value != NULL)
        return strcmp(value, "-") == 0 ? 0 : set_all((unsigned)index, value);
    allocation_contents[index] = (struct content){.seed = 0x5eed0000u + (unsigned)index, .scale = 1};
    allocation_is_filled[index] = 1;
    return client_pattern(&client, allocations[index], allocation_words[index], allocation_contents[index].seed);
}

/* Counts the words with a wrong value, in all filled allocations. */
static CUresult verify_more(uint64_t *wrong, uint64_t *bytes)
{
    for (int index = 0; index < allocation_count; index++) {
        if (!allocation_is_filled[index])
            continue;
        TRY(client_check(&client, allocations[index], allocation_words[index], allocation_contents[index], wrong));
        *bytes += allocation_words[index] * 4;
    }
    return 0;
}

static CUresult free_last(void)
{
    if (allocation_count == 0)
        return 1;
    return client.cuda.mem_free(allocations[--allocation_count]);
}

/* Flips a bit of host memory, as a stray pointer in the program could. */
static CUresult stray(void)
{
    char line[512], *at = NULL;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && at == NULL && fgets(line, sizeof line, maps) != NULL)
        if (strstr(line, "affinode-copied-out") != NULL)
            at = (char *)strtoul(line, NULL, 16);
    if (maps != NULL)
        fclose(maps);
    if (at == NULL)
        return 1;
    at[4096] ^= 1;
    return 0;
}

static CUresult peer_access(void)
{
    int count;
    CUdevice other;
    CUcontext context;
    CUresult result = client.cuda.device_count(&count);
    if (result != 0 || count < 2)
        return result != 0 ? result : 101;
    if ((result = client.cuda.device_get(&other, client.device == 0 ? 1 : 0)) != 0 ||
        (result = client.cuda.primary_retain(&context, other)) != 0)
        return result;
    return client.cuda.ctx_enable_peer(context, 0);
}

static void verify(const char *command)
{
    uint64_t wrong = 0, checksum = 0, bytes = client.words * 4, start = now_us();
    CUresult result = client_verify(&client, &wrong, &checksum);
    if (result == 0)
        result = verify_more(&wrong, &bytes);
    answer(command, result, now_us() - start,
           "\"ok\":%s,\"wrong\":%llu,\"bytes\":%llu,\"checksum\":\"%016llx\",\"touches\":%u",
           result == 0 && wrong == 0 ? "true" : "false", (unsigned long long)wrong, (unsigned long long)bytes,
           (unsigned long long)checksum, client.touches);
}

static void check(const char *command)
{
    uint64_t wrong = 0, bytes = client.words * 4, start = now_us();
    struct content content = {.seed = client.seed, .scale = 1, .add = client.touches};
    CUresult result = client_check(&client, client.memory, client.words, content, &wrong);
    if (result == 0)
        result = verify_more(&wrong, &bytes);
    answer(command, result, now_us() - start, "\"ok\":%s,\"wrong\":%llu,\"bytes\":%llu",
           result == 0 && wrong == 0 ? "true" : "false", (unsigned long long)wrong, (unsigned long long)bytes);
}

static void meminfo(const char *command)
{
    size_t free_bytes = 0, total_bytes = 0;
    uint64_t start = now_us();
    CUresult result = client.cuda.mem_info(&free_bytes, &total_bytes);
    answer(command, result, now_us() - start, "\"free_bytes\":%zu,\"total_bytes\":%zu", free_bytes, total_bytes);
}

static void fork_child(const char *command)
{
    int status = 0, pipes[2];
    CUresult result = -1;
    uint64_t start = now_us();
    if (pipe(pipes) != 0)
        return;
    pid_t child = fork();
    if (child == 0) {
        result = client.cuda.ctx_set(client.context);
        _exit(write(pipes[1], &result, sizeof result) != sizeof result);
    }
    close(pipes[1]);
    if (read(pipes[0], &result, sizeof result) < 0)
        result = -1;
    close(pipes[0]);
    waitpid(child, &status, 0);
    answer(command, child < 0, now_us() - start, "\"child_result\":%d,\"child_status\":%d", result, status);
}

static void orphan(const char *command)
{
    pid_t child = fork();
    if (child == 0) {
        sleep_ms(60000);
        _exit(0);
    }
    answer(command, child < 0, 0, "\"child\":%d", (int)child);
}

static unsigned poll_ms, polls, polls_wrong;

/* Makes the calls of an idle framework: makes its context current, then queries a stream and an event. */
static void *poll_for_ever(void *unused)
{
    for (;; sleep_ms(poll_ms)) {
        CUresult result = client.cuda.ctx_set(client.context);
        if (result == 0)
            result = client.cuda.stream_query(stream);
        if (result == 0)
            result = client.cuda.event_query(event);
        __atomic_fetch_add(&polls_wrong, result != 0, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&polls, 1, __ATOMIC_SEQ_CST);
    }
    return unused;
}

static CUresult start_polling(unsigned ms)
{
    pthread_t thread;
    poll_ms = ms;
    return pthread_create(&thread, NULL, poll_for_ever, NULL);
}

static void polled(const char *command)
{
    unsigned wrong = __atomic_load_n(&polls_wrong, __ATOMIC_SEQ_CST);
    answer(command, 0, 0, "\"polls\":%u,\"ok\":%s", __atomic_load_n(&polls, __ATOMIC_SEQ_CST),
           wrong == 0 ? "true" : "false");
}

static void exec_info(const char *command)
{
    char name[100] = "";
    int version = 0;
    CUresult result = client.cuda.device_name(name, sizeof name, client.device);
    client.cuda.driver_version(&version);
    answer(command, result, 0, "\"pid\":%d,\"uid\":%d,\"device_name\":\"%s\",\"driver_version\":%d,\"program\":\"%s\"",
           (int)getpid(), (int)getuid(), name, version, program);
}

/* Changes a byte at this offset, in the first allocation or in the Nth of the later ones. */
static CUresult poke(size_t offset, const char *which)
{
    unsigned char byte = 0;
    unsigned index = which ? (unsigned)strtoul(which, NULL, 10) : 0;
    if (which != NULL && index >= (unsigned)allocation_count)
        return 1;
    CUdeviceptr at = (which != NULL ? allocations[index] : client.memory) + offset;
    CUresult result = client.cuda.copy_out(&byte, at, 1);
    byte ^= 1;
    return result != 0 ? result : client.cuda.copy_in(at, &byte, 1);
}

static void limit(const char *command)
{
    size_t value = 0;
    uint64_t start = now_us();
    CUresult result = client.cuda.ctx_get_limit(&value, STACK_SIZE);
    answer(command, result, now_us() - start, "\"value\":%zu", value);
}

/* Executes a command. Returns 0 if the program must end. */
static int obey(char *line)
{
    char *save = NULL;
    const char *command = strtok_r(line, " \t\r\n", &save);
    const char *argument = strtok_r(NULL, " \t\r\n", &save);
    unsigned number = argument ? (unsigned)strtoul(argument, NULL, 10) : 0;
    struct cuda *cuda = &client.cuda;
    CUstream another;
    CUdeviceptr managed;
    int version;
    if (command == NULL)
        return 1;
    if (strcmp(command, "quit") == 0) {
        answer(command, 0, 0, "%s", "");
        return 0;
    }
    if (strcmp(command, "touch") == 0)
        TIMED(client_touch(&client));
    if (strcmp(command, "sync") == 0)
        TIMED(cuda->ctx_sync());
    if (strcmp(command, "streamsync") == 0)
        TIMED(cuda->stream_sync(stream));
    if (strcmp(command, "streamquery") == 0)
        TIMED(cuda->stream_query(stream));
    if (strcmp(command, "eventsync") == 0)
        TIMED(cuda->event_sync(event));
    if (strcmp(command, "eventquery") == 0)
        TIMED(cuda->event_query(event));
    if (strcmp(command, "record") == 0)
        TIMED(cuda->event_record(event, stream));
    if (strcmp(command, "streamcreate") == 0)
        TIMED(cuda->stream_create(&another, 0));
    if (strcmp(command, "alloc") == 0)
        TIMED(alloc_more(number, strtok_r(NULL, " \t\r\n", &save)));
    if (strcmp(command, "set") == 0)
        TIMED(set_all(number, strtok_r(NULL, " \t\r\n", &save)));
    if (strcmp(command, "free") == 0)
        TIMED(free_last());
    if (strcmp(command, "stack") == 0)
        TIMED(cuda->ctx_set_limit(STACK_SIZE, number));
    if (strcmp(command, "spin") == 0)
        TIMED(client_spin(&client, number));
    if (strcmp(command, "poke") == 0)
        TIMED(poke(number, strtok_r(NULL, " \t\r\n", &save)));
    if (strcmp(command, "stray") == 0)
        TIMED(stray());
    if (strcmp(command, "managed") == 0)
        TIMED(cuda->mem_managed(&managed, 1 << 20, 1));
    if (strcmp(command, "peer") == 0)
        TIMED(peer_access());
    if (strcmp(command, "init") == 0)
        TIMED(cuda->init(0));
    if (strcmp(command, "version") == 0)
        TIMED(cuda->driver_version(&version));
    if (strcmp(command, "sleep") == 0)
        TIMED((sleep_ms(number), 0));
    if (strcmp(command, "poll") == 0)
        TIMED(start_polling(number));
    if (strcmp(command, "polled") == 0)
        polled(command);
    else if (strcmp(command, "verify") == 0)
        verify(command);
    else if (strcmp(command, "check") == 0)
        check(command);
    else if (strcmp(command, "meminfo") == 0)
        meminfo(command);
    else if (strcmp(command, "limit") == 0)
        limit(command);
    else if (strcmp(command, "fork") == 0)
        fork_child(command);
    else if (strcmp(command, "orphan") == 0)
        orphan(command);
    else if (strcmp(command, "exec-info") == 0)
        exec_info(command);
    else
        answer("unknown", -1, 0, "%s", "");
    return 1;
}

/* Executes commands from stdin until `quit` or the end of input. With a period, it also works between commands, and
 * continues after the end of input. */
static void obey_stdin(unsigned period_ms)
{
    static char buffer[4096];
    size_t length = 0;
    int open = 1;
    uint64_t due = now_us();
    while (open || period_ms > 0) {
        struct pollfd wait = {open ? STDIN_FILENO : -1, POLLIN, 0};
        int64_t left_us = period_ms > 0 ? (int64_t)(due - now_us()) : -1;
        int ready = poll(&wait, 1, period_ms == 0 ? -1 : left_us > 0 ? (int)(left_us / 1000 + 1) : 0);
        if (ready > 0) {
            ssize_t got = read(STDIN_FILENO, buffer + length, sizeof buffer - 1 - length);
            if (got <= 0)
                open = 0;
            else
                length += (size_t)got;
            char *end;
            while ((end = memchr(buffer, '\n', length)) != NULL) {
                size_t used = (size_t)(end - buffer) + 1;
                *end = 0;
                if (!obey(buffer))
                    return;
                memmove(buffer, buffer + used, length -= used);
            }
            if (length == sizeof buffer - 1)
                length = 0;
        }
        if (period_ms > 0 && now_us() >= due) {
            uint64_t start = now_us();
            CUresult result = client_touch(&client);
            if (result == 0)
                result = client.cuda.ctx_sync();
            answer("period", result, now_us() - start, "\"touches\":%u", client.touches);
            due += (uint64_t)period_ms * 1000;
            if (due < now_us())
                due = now_us() + (uint64_t)period_ms * 1000;
        }
    }
}

/* Maps memory in pieces at consecutive addresses, and fills it as client_fill does. */
static CUresult fill_in_pieces(size_t mib, size_t piece_bytes, uint32_t seed)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long) =
        dlsym(library, "cuMemAddressReserve");
    CUresult (*create)(memory_handle *, size_t, const struct allocation_prop *, unsigned long long) =
        dlsym(library, "cuMemCreate");
    CUresult (*map)(CUdeviceptr, size_t, size_t, memory_handle, unsigned long long) = dlsym(library, "cuMemMap");
    CUresult (*set_access)(CUdeviceptr, size_t, const struct access *, size_t) = dlsym(library, "cuMemSetAccess");
    size_t bytes = (mib << 20) / piece_bytes * piece_bytes;
    struct allocation_prop prop;
    memset(&prop, 0, sizeof prop);
    prop.kind = prop.location.kind = 1;
    prop.location.id = client.device;
    struct access access = {{1, client.device}, 3};
    TRY(reserve(&client.memory, bytes, 0, 0, 0));
    for (size_t at = 0; at < bytes; at += piece_bytes) {
        memory_handle handle;
        TRY(create(&handle, piece_bytes, &prop, 0));
        TRY(map(client.memory + at, piece_bytes, 0, handle, 0));
    }
    TRY(set_access(client.memory, bytes, &access, 1));
    client.words = bytes / 4;
    return client_write(&client, seed);
}

int worker_main(int argc, char **argv)
{
    size_t mib = 64, piece_mib = 0;
    uint32_t seed = 1;
    int device = 0;
    unsigned period_ms = 0;
    char *script = NULL;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--mib") == 0)
            mib = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--piece-mib") == 0)
            piece_mib = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--device") == 0)
            device = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--period-ms") == 0)
            period_ms = (unsigned)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--script") == 0)
            script = argv[i + 1];
        else {
            fprintf(stderr, "%s: unknown option %s; see the head of worker.c\n", argv[0], argv[i]);
            return 2;
        }
    }
    program = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    if (cuda_load(&client.cuda) != 0)
        return 3;
    uint64_t start = now_us();
    CUresult result = client_open(&client, device);
    if (result == 0)
        result = client.cuda.stream_create(&stream, 0);
    if (result == 0)
        result = client.cuda.event_create(&event, 0);
    if (result == 0)
        result = client.cuda.event_record(event, stream);
    answer("open", result, now_us() - start, "\"pid\":%d,\"program\":\"%s\"", (int)getpid(), program);
    if (result != 0)
        return 4;
    start = now_us();
    result = piece_mib > 0 ? fill_in_pieces(mib, piece_mib << 20, seed) : client_fill(&client, mib, seed);
    answer("fill", result, now_us() - start, "\"mib\":%zu,\"seed\":%u", mib, seed);
    if (result != 0)
        return 4;
    /* All driver calls of the start precede the reply to `fill`, so a freeze after that reply interrupts no call. */
    int from_stdin = script == NULL || period_ms > 0;
    char *save = NULL;
    for (char *command = script ? strtok_r(script, ";", &save) : NULL; command; command = strtok_r(NULL, ";", &save)) {
        if (strcmp(command, "stdin") == 0)
            from_stdin = 1;
        else if (!obey(command))
            return 0;
    }
    if (from_stdin)
        obey_stdin(period_ms);
    return 0;
}
