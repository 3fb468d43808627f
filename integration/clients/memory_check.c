/* Checks properties of device memory that applications rely on and that concern more than a single call.
 *
 *   memory_check             prints a line of JSON per check; exit status 0 if all pass
 *
 * The driver's own allocations have all these properties, so allocations that Affinode makes must have them, too. The
 * checks cover waits for work, contexts and objects that end with them, pitch, attributes, threads and fork.
 */
#include "client.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MORE_FUNCTIONS(F)                                                                                             \
    F(cuMemAllocPitch_v2, (CUdeviceptr * address, size_t *pitch, size_t width, size_t height, unsigned element))      \
    F(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *bytes, CUdeviceptr address))                              \
    F(cuPointerGetAttribute, (void *data, int attribute, CUdeviceptr address))                                        \
    F(cuPointerGetAttributes, (unsigned count, const int *attributes, void **data, CUdeviceptr address))              \
    F(cuMemsetD8_v2, (CUdeviceptr address, unsigned char value, size_t count))                                        \
    F(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes))                                              \
    F(cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device))                                         \
    F(cuCtxDestroy_v2, (CUcontext context))                                                                           \
    F(cuDevicePrimaryCtxReset_v2, (CUdevice device))                                                                  \
    F(cuDevicePrimaryCtxRelease_v2, (CUdevice device))

#define F(name, parameters) static CUresult(*name) parameters;
MORE_FUNCTIONS(F)
#undef F

#define MIB ((size_t)1 << 20)
#define THREADS 4
#define MANY 48
static struct client client;
static struct cuda *cuda = &client.cuda;
static int failures;

#define check(name, call, expected, holds)                                                                            \
    do {                                                                                                              \
        CUresult result_ = (call);                                                                                    \
        int ok_ = result_ == (expected) && (holds);                                                                   \
        failures += !ok_;                                                                                             \
        answer(name, result_, 0, "\"expected\":%d,\"ok\":%s", expected, ok_ ? "true" : "false");                      \
    } while (0)

static unsigned char byte_at(CUdeviceptr address)
{
    unsigned char byte = 0;
    return cuda->copy_out(&byte, address, 1) == 0 ? byte : 0xff;
}

static size_t free_bytes(void)
{
    size_t free = 0, total = 0;
    cuda->mem_info(&free, &total);
    return free;
}

static void attributes(void)
{
    enum { CONTEXT = 1, TYPE = 2, ORDINAL = 9, START = 11, SIZE = 12 };
    const int names[] = {CONTEXT, TYPE, ORDINAL, START, SIZE};
    CUcontext context = NULL;
    unsigned type = 0;
    int ordinal = -1;
    CUdeviceptr a = 0, base = 0, start = 0;
    size_t bytes = 0, size = 0;
    void *data[] = {&context, &type, &ordinal, &start, &size};
    check("alloc an odd size", cuda->mem_alloc(&a, 5 * MIB), 0, a % (2 * MIB) == 0);
    check("range", cuMemGetAddressRange_v2(&base, &bytes, a + 3 * MIB), 0, base == a && bytes == 5 * MIB);
    check("range without a size", cuMemGetAddressRange_v2(&base, NULL, a), 0, base == a);
    check("attributes", cuPointerGetAttributes(5, names, data, a + 100), 0,
          context == client.context && type == 2 && ordinal == client.device && start == a && size == 5 * MIB);
    size = 0;
    check("size", cuPointerGetAttribute(&size, SIZE, a + 100), 0, size == 5 * MIB);
    check("last byte", cuMemsetD8_v2(a + 5 * MIB - 1, 7, 1), 0, byte_at(a + 5 * MIB - 1) == 7);
    check("free inside", cuda->mem_free(a + 2 * MIB), 1, 1);
    check("free", cuda->mem_free(a), 0, 1);
    check("attribute of what was freed", cuPointerGetAttribute(&type, TYPE, a), 1, 1);
    check("free twice", cuda->mem_free(a), 1, 1);
}

static void pitch(void)
{
    CUdeviceptr a = 0;
    size_t wide = 0, narrow = 0;
    check("pitch", cuMemAllocPitch_v2(&a, &wide, 1000, 4096, 4), 0, wide >= 1000 && wide % 512 == 0);
    check("last row", cuMemsetD8_v2(a + 4095 * wide + 999, 5, 1), 0, byte_at(a + 4095 * wide + 999) == 5);
    check("free pitched", cuda->mem_free(a), 0, 1);
    check("small pitch", cuMemAllocPitch_v2(&a, &narrow, 1000, 4, 4), 0, narrow == wide);
    check("free small pitched", cuda->mem_free(a), 0, 1);
}

static void waiting(void)
{
    CUdeviceptr a = 0;
    CUstream stream;
    unsigned ms = 300;
    void *parameters[] = {&ms};
    CUresult result;
    cuda->stream_create(&stream, 1);
    check("alloc", cuda->mem_alloc(&a, 8 * MIB), 0, 1);
    /* On a busy machine this thread may check too late. It then tries again with longer work. */
    do {
        check("work", cuda->launch(client.spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL), 0, 1);
        result = cuda->stream_query(stream);
        ms *= 2;
    } while (result == 0 && ms < 10000);
    check("it runs", result, 600, 1);
    check("free beside work", cuda->mem_free(a), 0, 1);
    check("free has waited", cuda->stream_query(stream), 0, 1);
}

static void room(void)
{
    size_t before = free_bytes();
    CUdeviceptr a = 0, b = 0;
    check("alloc nothing", cuda->mem_alloc(&b, 0), 1, 1);
    check("alloc too much", cuda->mem_alloc(&b, (size_t)1 << 45), 2, 1);
    check("alloc what is there", cuda->mem_alloc(&a, 64 * MIB), 0, before - free_bytes() >= 64 * MIB);
    check("free what was there", cuda->mem_free(a), 0, free_bytes() == before);
}

static void many(void)
{
    CUdeviceptr at[MANY];
    int right = 1;
    for (int i = 0; i < MANY; i++)
        right &= cuda->mem_alloc(&at[i], (size_t)(1 + i % 5) * MIB) == 0 &&
                 cuMemsetD8_v2(at[i], (unsigned char)i, (size_t)(1 + i % 5) * MIB) == 0;
    for (int i = 0; i < MANY; i += 2)
        right &= cuda->mem_free(at[i]) == 0;
    for (int i = 1; i < MANY; i += 2)
        right &= byte_at(at[i] + MIB - 1) == i && cuMemcpyDtoD_v2(at[i], at[1], 1) == 0 && byte_at(at[i]) == 1;
    for (int i = 1; i < MANY; i += 2)
        right &= cuda->mem_free(at[i]) == 0;
    check("many at once", 0, 0, right);
}

static void *churn(void *seed)
{
    uintptr_t right = cuda->ctx_set(client.context) == 0;
    unsigned char mark = (unsigned char)(uintptr_t)seed;
    for (int i = 0; i < 20; i++) {
        CUdeviceptr a = 0;
        right &= cuda->mem_alloc(&a, (size_t)(2 + i % 3) * MIB) == 0 && cuMemsetD8_v2(a, mark, MIB) == 0 &&
                 byte_at(a + MIB - 1) == mark && cuda->mem_free(a) == 0;
    }
    return (void *)right;
}

static void threads(void)
{
    pthread_t thread[THREADS];
    int right = 1;
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, churn, (void *)(i + 1));
    for (int i = 0; i < THREADS; i++) {
        void *got = NULL;
        pthread_join(thread[i], &got);
        right &= got != NULL;
    }
    check("threads", 0, 0, right);
}

/* A forked child has no driver, so none of its calls may change the parent's memory. */
static void forked(void)
{
    CUdeviceptr a = 0;
    CUresult result = 0;
    int pipes[2], status = 0;
    check("alloc before a fork", cuda->mem_alloc(&a, 4 * MIB), 0, cuMemsetD8_v2(a, 9, 4 * MIB) == 0);
    if (pipe(pipes) != 0)
        return;
    pid_t child = fork();
    if (child == 0) {
        result = cuda->mem_free(a);
        _exit(write(pipes[1], &result, sizeof result) != sizeof result);
    }
    if (read(pipes[0], &result, sizeof result) != sizeof result)
        result = -1;
    waitpid(child, &status, 0);
    check("free in a child", result, 3, status == 0);
    check("the parent's memory", 0, 0, byte_at(a) == 9);
    check("free after a fork", cuda->mem_free(a), 0, 1);
}

/* The end of a context frees the memory of that context. */
static void contexts(void)
{
    CUdeviceptr a = 0, b = 0;
    CUcontext other = NULL, found = NULL;
    unsigned type = 0;
    check("alloc in the primary context", cuda->mem_alloc(&a, 16 * MIB), 0, cuMemsetD8_v2(a, 3, 16 * MIB) == 0);
    size_t before = free_bytes();
    check("a context", cuCtxCreate_v2(&other, 0, client.device), 0, 1);
    check("alloc in it", cuda->mem_alloc(&b, 64 * MIB), 0, 1);
    check("its context", cuPointerGetAttribute(&found, 1, b), 0, found == other);
    check("destroy it", cuCtxDestroy_v2(other), 0, 1);
    cuda->ctx_set(client.context);
    check("its memory is gone", cuPointerGetAttribute(&type, 2, b), 1, free_bytes() + 32 * MIB >= before);
    check("the other's is not", 0, 0, byte_at(a) == 3);
    before = free_bytes();
    check("reset", cuDevicePrimaryCtxReset_v2(client.device), 0, 1);
    check("retain", cuda->primary_retain(&client.context, client.device), 0, 1);
    cuda->ctx_set(client.context);
    check("reset has freed", cuda->mem_alloc(&b, 16 * MIB), 0, cuPointerGetAttribute(&type, 2, a) == 1 || a - b < 16 * MIB);
    check("release", cuDevicePrimaryCtxRelease_v2(client.device), 0, 1);
    check("retain after release", cuda->primary_retain(&client.context, client.device), 0, 1);
    cuda->ctx_set(client.context);
    check("alloc after release", cuda->mem_alloc(&a, 4 * MIB), 0, cuda->mem_free(a) == 0);
}

int main(void)
{
    if (cuda_load(cuda) != 0)
        return 3;
#define F(name, parameters) *(void **)&name = cuda_function(#name);
    MORE_FUNCTIONS(F)
#undef F
    if (client_open(&client, 0) != 0)
        return 4;
    attributes();
    pitch();
    waiting();
    room();
    many();
    threads();
    forked();
    contexts();
    answer("done", 0, 0, "\"ok\":%s", failures ? "false" : "true");
    return failures != 0;
}
