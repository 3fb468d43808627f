/* Checks the documented behaviour of the driver call by call, to compare the simulated GPU with a real one.
 *
 *   api_check [NAME...]      runs all groups, or those named; one line of JSON per check; exit status 0 if all pass
 *
 * Groups: memory pointers streams legacy modules vmm share ipc entry checkpoint
 * All checks passed on an H200 with driver 580.159.04. One GPU is enough. `share` and `ipc` fork before they use the
 * driver. */
#include "client.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct ipc_handle {
    char bytes[64];
};

#define MORE_FUNCTIONS(F)                                                                                             \
    F(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *bytes, CUdeviceptr address))                              \
    F(cuPointerGetAttribute, (void *data, int attribute, CUdeviceptr address))                                        \
    F(cuMemsetD8_v2, (CUdeviceptr address, unsigned char value, size_t count))                                        \
    F(cuMemsetD32Async, (CUdeviceptr address, unsigned value, size_t count, CUstream stream))                         \
    F(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes))                                              \
    F(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes))                                                     \
    F(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                              \
    F(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream))                                        \
    F(cuMemFreeAsync, (CUdeviceptr address, CUstream stream))                                                         \
    F(cuMemAllocHost_v2, (void **address, size_t bytes))                                                              \
    F(cuMemFreeHost, (void *address))                                                                                 \
    F(cuMemHostRegister_v2, (void *address, size_t bytes, unsigned flags))                                            \
    F(cuMemHostUnregister, (void *address))                                                                           \
    F(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                                            \
    F(cuStreamDestroy_v2, (CUstream stream))                                                                          \
    F(cuLaunchHostFunc, (CUstream stream, void (*function)(void *), void *data))                                      \
    F(cuEventElapsedTime, (float *ms, CUevent start, CUevent end))                                                    \
    F(cuModuleUnload, (CUmodule module))                                                                              \
    F(cuCtxGetCurrent, (CUcontext * context))                                                                         \
    F(cuMemGetAllocationGranularity, (size_t * bytes, const struct allocation_prop *prop, int option))                \
    F(cuMemAddressReserve,                                                                                            \
      (CUdeviceptr * address, size_t bytes, size_t align, CUdeviceptr hint, unsigned long long flags))                \
    F(cuMemAddressFree, (CUdeviceptr address, size_t bytes))                                                          \
    F(cuMemCreate,                                                                                                    \
      (memory_handle * handle, size_t bytes, const struct allocation_prop *prop, unsigned long long flags))           \
    F(cuMemRelease, (memory_handle handle))                                                                           \
    F(cuMemMap, (CUdeviceptr address, size_t bytes, size_t offset, memory_handle handle, unsigned long long flags))   \
    F(cuMemUnmap, (CUdeviceptr address, size_t bytes))                                                                \
    F(cuMemSetAccess, (CUdeviceptr address, size_t bytes, const struct access *access, size_t count))                 \
    F(cuMemExportToShareableHandle, (void *shareable, memory_handle handle, int kind, unsigned long long flags))      \
    F(cuMemImportFromShareableHandle, (memory_handle * handle, void *shareable, int kind))                            \
    F(cuIpcGetMemHandle, (struct ipc_handle * handle, CUdeviceptr address))                                           \
    F(cuIpcOpenMemHandle_v2, (CUdeviceptr * address, struct ipc_handle handle, unsigned flags))                       \
    F(cuIpcCloseMemHandle, (CUdeviceptr address))                                                                     \
    F(cuGetProcAddress_v2, (const char *name, void **address, int version, uint64_t flags, int *status))              \
    F(cuGetErrorName, (CUresult result, const char **name))                                                           \
    F(cuCheckpointProcessLock, (int pid, void *arguments))                                                            \
    F(cuCheckpointProcessCheckpoint, (int pid, void *arguments))                                                      \
    F(cuCheckpointProcessRestore, (int pid, void *arguments))                                                         \
    F(cuCheckpointProcessUnlock, (int pid, void *arguments))                                                          \
    F(cuCheckpointProcessGetState, (int pid, int *state))

#define F(name, parameters) static CUresult(*name) parameters;
MORE_FUNCTIONS(F)
#undef F

#define BYTES (4u << 20)
static struct client client;
static struct cuda *cuda = &client.cuda;
static int failures;

static void judge(const char *name, CUresult result, CUresult expected, int holds)
{
    int ok = result == expected && holds;
    failures += !ok;
    answer(name, result, 0, "\"expected\":%d,\"ok\":%s", expected, ok ? "true" : "false");
}

/* Makes the call, compares its result, then checks a condition that must hold after it. */
#define check(name, call, expected, holds)                                                                            \
    do {                                                                                                              \
        CUresult result_ = (call);                                                                                    \
        judge(name, result_, expected, holds);                                                                        \
    } while (0)

static unsigned word_at(CUdeviceptr address)
{
    unsigned word = 0xdeadbeef;
    CUresult result = cuda->copy_out(&word, address, sizeof word);
    return result == 0 ? word : 0xdead0000u + (unsigned)result;
}

static void memory_checks(void)
{
    CUdeviceptr a = 0, b = 0;
    unsigned in[4] = {1, 2, 3, 4}, out[4] = {0};
    check("alloc", cuda->mem_alloc(&a, BYTES), 0, a != 0);
    check("alloc nothing", cuda->mem_alloc(&b, 0), 1, 1);
    check("alloc too much", cuda->mem_alloc(&b, (size_t)1 << 45), 2, 1);
    check("alloc another", cuda->mem_alloc(&b, BYTES), 0, b != 0 && b != a);
    check("copy to an offset", cuda->copy_in(a + 4096 + 8, in, sizeof in), 0, 1);
    check("copy from an offset", cuda->copy_out(out, a + 4096 + 12, 8), 0, out[0] == 2 && out[1] == 3);
    check("memset", cuMemsetD8_v2(a + 1, 0x7f, 6), 0, 1);
    check("memset is seen", 0, 0, (word_at(a) >> 8) == 0x7f7f7f && (word_at(a + 4) & 0xffffff) == 0x7f7f7f);
    check("copy on the device", cuMemcpyDtoD_v2(b, a + 4096 + 8, 16), 0, word_at(b + 12) == 4);
    check("copy by address alone", cuMemcpy((CUdeviceptr)(uintptr_t)out, b, 16), 0, out[3] == 4);
    check("copy beyond the end", cuda->copy_in(a + BYTES - 4, in, 16), 1, 1);
    check("copy to nowhere", cuda->copy_in(4096, in, 16), 1, 1);
    check("free inside", cuda->mem_free(a + 4096), 1, 1);
    check("free", cuda->mem_free(a), 0, 1);
    check("free twice", cuda->mem_free(a), 1, 1);
    check("free null", cuda->mem_free(0), 0, 1);
    check("free the other", cuda->mem_free(b), 0, 1);
}

static void pointer_checks(void)
{
    CUdeviceptr a = 0, base = 0, managed = 0;
    void *pinned = NULL, *context = NULL, *page = NULL;
    size_t bytes = 0;
    unsigned type = 0;
    int ordinal = -1;
    cuda->mem_alloc(&a, BYTES);
    check("range", cuMemGetAddressRange_v2(&base, &bytes, a + 100), 0, base == a && bytes == BYTES);
    check("range of nothing", cuMemGetAddressRange_v2(&base, &bytes, 4096), 500, 1);
    check("memory type", cuPointerGetAttribute(&type, 2, a + 100), 0, type == 2);
    check("context of memory", cuPointerGetAttribute(&context, 1, a), 0, context == client.context);
    check("ordinal of memory", cuPointerGetAttribute(&ordinal, 9, a), 0, ordinal == client.device);
    check("attribute of nothing", cuPointerGetAttribute(&type, 2, 4096), 1, 1);
    check("pinned", cuMemAllocHost_v2(&pinned, BYTES), 0, pinned != NULL);
    check("memory type of pinned", cuPointerGetAttribute(&type, 2, (CUdeviceptr)(uintptr_t)pinned), 0, type == 1);
    check("unpinned", cuMemFreeHost(pinned), 0, 1);
    if (posix_memalign(&page, 4096, BYTES) != 0)
        return;
    check("register", cuMemHostRegister_v2(page, BYTES, 0), 0, 1);
    check("register twice", cuMemHostRegister_v2(page, BYTES, 0), 712, 1);
    check("unregister", cuMemHostUnregister(page), 0, 1);
    check("unregister twice", cuMemHostUnregister(page), 713, 1);
    free(page);
    check("managed", cuda->mem_managed(&managed, BYTES, 1), 0, managed != 0);
    memset((void *)(uintptr_t)managed, 7, 16);
    check("managed from the host", cuda->ctx_sync(), 0, word_at(managed) == 0x07070707);
    check("free managed", cuda->mem_free(managed), 0, 1);
    cuda->mem_free(a);
}

static void note(void *data)
{
    *(volatile int *)data = 1;
}

static void stream_checks(void)
{
    CUdeviceptr a = 0;
    CUstream one, two;
    CUevent event, later;
    float ms = 0;
    unsigned spin = 200;
    volatile int noted = 0;
    void *parameters[] = {&spin};
    cuda->mem_alloc(&a, BYTES);
    check("stream", cuda->stream_create(&one, 1), 0, 1);
    check("another", cuda->stream_create(&two, 1), 0, 1);
    cuda->event_create(&event, 0);
    cuda->event_create(&later, 0);
    check("event without a record", cuda->event_query(event), 0, 1);
    check("memset", cuMemsetD32Async(a, 1, BYTES / 4, one), 0, 1);
    check("spin", cuda->launch(client.spin, 1, 1, 1, 1, 1, 1, 0, one, parameters, NULL), 0, 1);
    check("busy", cuda->stream_query(one), 600, 1);
    check("the other is not", cuda->stream_query(two), 0, 1);
    check("host function", cuLaunchHostFunc(one, note, (void *)&noted), 0, noted == 0);
    check("second memset", cuMemsetD32Async(a, 2, BYTES / 4, one), 0, 1);
    check("record", cuda->event_record(event, one), 0, 1);
    check("event is not there yet", cuda->event_query(event), 600, 1);
    check("wait on the other stream", cuStreamWaitEvent(two, event, 0), 0, 1);
    check("copy after it", cuMemcpyDtoHAsync_v2(&spin, a, 4, two), 0, 1);
    check("record on the other", cuda->event_record(later, two), 0, 1);
    check("synchronise", cuda->stream_sync(two), 0, spin == 2 && noted == 1);
    check("event is there", cuda->event_query(event), 0, 1);
    check("elapsed", cuEventElapsedTime(&ms, event, later), 0, ms >= 0 && ms < 60000);
    check("destroy", cuStreamDestroy_v2(one), 0, 1);
    check("alloc in a stream", cuMemAllocAsync(&a, BYTES, two), 0, 1);
    check("use it", cuMemsetD32Async(a, 5, 16, two), 0, 1);
    check("synchronise again", cuda->stream_sync(two), 0, word_at(a) == 5);
    check("free in the stream", cuMemFreeAsync(a, two), 0, 1);
    check("all done", cuda->ctx_sync(), 0, 1);
    spin = 200;
    check("alloc outside of streams", cuda->mem_alloc(&a, BYTES), 0, 1);
    check("set it", cuMemsetD32Async(a, 6, BYTES / 4, two), 0, 1);
    check("spin beside it", cuda->launch(client.spin, 1, 1, 1, 1, 1, 1, 0, two, parameters, NULL), 0, 1);
    check("free it in the stream", cuMemFreeAsync(a, two), 0, 1);
    check("that does not wait", cuda->stream_query(two), 600, 1);
    check("wait", cuda->stream_sync(two), 0, 1);
    cuStreamDestroy_v2(two);
}

/* A blocking stream and the legacy default stream wait for each other. A non-blocking stream does not wait. */
static void legacy_checks(void)
{
    CUdeviceptr a = 0;
    CUstream blocking, loose;
    unsigned spin = 200;
    void *parameters[] = {&spin};
    cuda->mem_alloc(&a, 4096);
    cuda->stream_create(&blocking, 0);
    cuda->stream_create(&loose, 1);
    check("spin", cuda->launch(client.spin, 1, 1, 1, 1, 1, 1, 0, blocking, parameters, NULL), 0, 1);
    check("memset in its stream", cuMemsetD32Async(a, 9, 4, blocking), 0, 1);
    check("the loose stream goes on", cuMemsetD32Async(a + 16, 3, 4, loose), 0, 1);
    check("and is done first", cuda->stream_sync(loose), 0, cuda->stream_query(blocking) == 600);
    check("the default stream waits", cuda->copy_out(&spin, a, 4), 0, spin == 9);
    spin = 200;
    check("spin on the default stream", cuda->launch(client.spin, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), 0, 1);
    check("memset after it", cuMemsetD32Async(a, 4, 4, blocking), 0, cuda->stream_query(blocking) == 600);
    check("synchronise", cuda->stream_sync(blocking), 0, word_at(a) == 4);
    cuStreamDestroy_v2(blocking);
    cuStreamDestroy_v2(loose);
    cuda->mem_free(a);
}

static void module_checks(void)
{
    CUdeviceptr a = 0;
    CUfunction function;
    uint64_t address, count = 1000;
    unsigned value = 11;
    struct {
        uint64_t address, count;
        unsigned value;
    } buffer;
    size_t bytes = 20;
    cuda->mem_alloc(&a, BYTES);
    cuMemsetD8_v2(a, 0, BYTES);
    address = a + 4;
    void *parameters[] = {&address, &count, &value};
    check("fill", cuda->launch(client.fill, 4, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL), 0, 1);
    check("fill is seen", cuda->ctx_sync(), 0, word_at(a) == 0 && word_at(a + 4) == 11 && word_at(a + 4004) == 0);
    buffer.address = a;
    buffer.count = 2;
    buffer.value = 5;
    void *extra[] = {(void *)1, &buffer, (void *)2, &bytes, NULL};
    check("add with a buffer", cuda->launch(client.add, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, extra), 0, 1);
    check("add is seen", cuda->ctx_sync(), 0, word_at(a) == 5 && word_at(a + 4) == 16 && word_at(a + 8) == 11);
    check("no such kernel", cuda->module_function(&function, client.module, "nothing"), 500, 1);
    check("no block", cuda->launch(client.fill, 1, 1, 1, 0, 1, 1, 0, NULL, parameters, NULL), 1, 1);
    check("bad image", cuda->module_load((CUmodule *)&function, "// not a module"), 200, 1);
    cuda->mem_free(a);
}

static struct allocation_prop device_memory(void)
{
    struct allocation_prop prop;
    memset(&prop, 0, sizeof prop);
    prop.kind = 1;
    prop.handle_types = 1;
    prop.location.kind = 1;
    prop.location.id = client.device;
    return prop;
}

static CUresult map(CUdeviceptr address, size_t bytes, memory_handle handle)
{
    struct access access = {{1, client.device}, 3};
    CUresult result = cuMemMap(address, bytes, 0, handle, 0);
    return result != 0 ? result : cuMemSetAccess(address, bytes, &access, 1);
}

static void vmm_checks(void)
{
    struct allocation_prop prop = device_memory();
    CUdeviceptr base = 0;
    size_t unit = 0;
    memory_handle one = 0, two = 0;
    check("granularity", cuMemGetAllocationGranularity(&unit, &prop, 0), 0, unit == 2 << 20);
    check("reserve", cuMemAddressReserve(&base, 4 * unit, 0, 0, 0), 0, base % unit == 0);
    check("create", cuMemCreate(&one, unit, &prop, 0), 0, 1);
    check("create odd", cuMemCreate(&two, unit + 1, &prop, 0), 1, 1);
    check("create more", cuMemCreate(&two, unit, &prop, 0), 0, one != two);
    check("map", map(base, unit, one), 0, 1);
    check("map over it", cuMemMap(base, unit, 0, two, 0), 1, 1);
    check("map beside it", map(base + unit, unit, two), 0, 1);
    check("fill across", cuMemsetD8_v2(base, 1, 2 * unit), 0, word_at(base + 2 * unit - 4) == 0x01010101);
    check("beyond", cuMemsetD8_v2(base, 1, 3 * unit), 1, 1);
    check("release while mapped", cuMemRelease(one), 0, word_at(base) == 0x01010101);
    check("unmap", cuMemUnmap(base, unit), 0, 1);
    check("unmapped", cuMemsetD8_v2(base, 1, 16), 1, 1);
    check("map the second there too", map(base, unit, two), 0, word_at(base) == 0x01010101);
    check("write", cuMemsetD8_v2(base + 4, 2, 4), 0, 1);
    check("one memory at two addresses", 0, 0, word_at(base + unit + 4) == 0x02020202);
    check("unmap both", cuMemUnmap(base, 2 * unit), 0, 1);
    check("release", cuMemRelease(two), 0, 1);
    check("free addresses", cuMemAddressFree(base, 4 * unit), 0, 1);
}

static void send_fd(int socket, int fd)
{
    char byte = 0, space[CMSG_SPACE(sizeof fd)];
    struct iovec data = {&byte, 1};
    struct msghdr message = {NULL, 0, &data, 1, space, sizeof space, 0};
    memset(space, 0, sizeof space);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(socket, &message, 0) < 0)
        perror("sendmsg");
}

static int receive_fd(int socket)
{
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec data = {&byte, 1};
    struct msghdr message = {NULL, 0, &data, 1, space, sizeof space, 0};
    int fd = -1;
    if (recvmsg(socket, &message, 0) <= 0)
        return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL)
        memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

/* Writes a short message to the other process, as a whole. */
static void say(int socket, const void *data, size_t bytes)
{
    if (write(socket, data, bytes) != (ssize_t)bytes)
        exit(5);
}

static void hear(int socket, void *data, size_t bytes)
{
    if (recv(socket, data, bytes, MSG_WAITALL) != (ssize_t)bytes)
        exit(5);
}

/* The other process imports the memory, sees the contents, and changes them. */
static void share_child(int socket)
{
    struct allocation_prop prop = device_memory();
    CUdeviceptr base = 0;
    size_t unit = 0;
    memory_handle handle = 0;
    char go = 0;
    client_open(&client, 0);
    cuMemGetAllocationGranularity(&unit, &prop, 0);
    int fd = receive_fd(socket);
    check("import", cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd, 1), 0, 1);
    close(fd);
    cuMemAddressReserve(&base, unit, 0, 0, 0);
    check("map the import", map(base, unit, handle), 0, word_at(base) == 0x03030303);
    check("change it", cuMemsetD8_v2(base, 4, unit), 0, cuda->ctx_sync() == 0);
    say(socket, &go, 1);
    hear(socket, &go, 1);
    check("the owner is done, the memory is there", 0, 0, word_at(base + unit - 4) == 0x04040404);
}

static void share_parent(int socket)
{
    struct allocation_prop prop = device_memory();
    CUdeviceptr base = 0;
    size_t unit = 0;
    memory_handle handle = 0;
    int fd = -1;
    char go = 0;
    client_open(&client, 0);
    cuMemGetAllocationGranularity(&unit, &prop, 0);
    cuMemAddressReserve(&base, unit, 0, 0, 0);
    cuMemCreate(&handle, unit, &prop, 0);
    map(base, unit, handle);
    cuMemsetD8_v2(base, 3, unit);
    cuda->ctx_sync();
    check("export", cuMemExportToShareableHandle(&fd, handle, 1, 0), 0, fd >= 0);
    send_fd(socket, fd);
    close(fd);
    hear(socket, &go, 1);
    check("changed by the other process", 0, 0, word_at(base) == 0x04040404);
    check("unmap", cuMemUnmap(base, unit), 0, 1);
    check("release", cuMemRelease(handle), 0, 1);
    say(socket, &go, 1);
}

static void ipc_child(int socket)
{
    struct ipc_handle handle, other;
    CUdeviceptr a = 0, b = 0;
    size_t bytes = 0;
    void *context = NULL;
    char go = 0;
    client_open(&client, 0);
    hear(socket, &handle, sizeof handle);
    check("open", cuIpcOpenMemHandle_v2(&a, handle, 1), 0, word_at(a + 8) == 0x05050505);
    check("change it", cuMemsetD8_v2(a, 6, 16), 0, cuda->ctx_sync() == 0);
    check("open it again", cuIpcOpenMemHandle_v2(&b, handle, 1), 0, b == a);
    check("its range", cuMemGetAddressRange_v2(&b, &bytes, a + 4096), 0, b == a && bytes == BYTES);
    check("its context", cuPointerGetAttribute(&context, 1, a + 4096), 0, context != NULL);
    check("a handle of what was opened", cuIpcGetMemHandle(&other, a), 1, 1);
    check("free what was opened", cuda->mem_free(a), 1, 1);
    check("close inside", cuIpcCloseMemHandle(a + 4096), 1, 1);
    check("close one of two", cuIpcCloseMemHandle(a), 0, word_at(a) == 0x06060606);
    check("close", cuIpcCloseMemHandle(a), 0, 1);
    check("close once more", cuIpcCloseMemHandle(a), 1, 1);
    check("open and close again", cuIpcOpenMemHandle_v2(&a, handle, 1), 0, cuIpcCloseMemHandle(a) == 0);
    memset(&other, 0x5a, sizeof other);
    check("open garbage", cuIpcOpenMemHandle_v2(&a, other, 1), 1, 1);
    cuda->mem_alloc(&a, BYTES);
    check("close what is one's own", cuIpcCloseMemHandle(a), 1, 1);
    cuda->mem_free(a);
    say(socket, &go, 1);
}

static void ipc_parent(int socket)
{
    struct ipc_handle handle, inside;
    CUdeviceptr a = 0, other = 0;
    char go = 0;
    client_open(&client, 0);
    cuda->mem_alloc(&a, BYTES);
    cuMemsetD8_v2(a, 5, BYTES);
    cuda->ctx_sync();
    check("handle", cuIpcGetMemHandle(&handle, a), 0, 1);
    check("the same from inside", cuIpcGetMemHandle(&inside, a + 4096), 0, memcmp(&inside, &handle, sizeof handle) == 0);
    check("own handle cannot be opened", cuIpcOpenMemHandle_v2(&other, handle, 1), 201, 1);
    say(socket, &handle, sizeof handle);
    hear(socket, &go, 1);
    check("changed by the other process", 0, 0, word_at(a + 8) == 0x06060606);
    cuda->mem_free(a);
}

static void two_processes(void (*parent)(int), void (*child)(int))
{
    int sockets[2], status = 0;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0)
        exit(5);
    pid_t pid = fork();
    if (pid == 0) {
        close(sockets[0]);
        child(sockets[1]);
        _exit(failures != 0);
    }
    close(sockets[1]);
    parent(sockets[0]);
    waitpid(pid, &status, 0);
    check("the other process ends well", 0, 0, status == 0);
}

static void entry_checks(void)
{
    void *address = NULL;
    int status = -1;
    const char *name = NULL;
    CUcontext context = NULL;
    check("known", cuGetProcAddress_v2("cuMemAlloc", &address, 12000, 0, &status), 0, status == 0 && address != NULL);
    check("unknown", cuGetProcAddress_v2("cuNothing", &address, 12000, 0, &status), 0, status == 1 && !address);
    check("too new", cuGetProcAddress_v2("cuMemCreate", &address, 10000, 0, &status), 0, status == 2 && !address);
    check("newer than the driver", cuGetProcAddress_v2("cuInit", &address, 99000, 0, &status), 1, 1);
    check("error name", cuGetErrorName(2, &name), 0, name != NULL && strcmp(name, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
    check("no such error", cuGetErrorName(123456, &name), 1, 1);
    check("current context", cuCtxGetCurrent(&context), 0, context == client.context);
    check("no context", cuda->ctx_set(NULL), 0, cuCtxGetCurrent(&context) == 0 && context == NULL);
    check("work without one", cuda->stream_create((CUstream *)&address, 0), 201, 1);
    cuda->ctx_set(client.context);
}

static void *own_checkpoint(void *data)
{
    CUresult *results = data;
    int pid = (int)getpid(), state = -1;
    unsigned lock[16] = {0}, bad[16] = {0, 1};
    results[0] = cuCheckpointProcessLock(pid, bad);
    results[1] = cuCheckpointProcessUnlock(pid, NULL);
    results[2] = cuCheckpointProcessCheckpoint(pid, NULL);
    results[3] = cuCheckpointProcessLock(pid, lock);
    results[4] = cuCheckpointProcessLock(pid, lock);
    results[5] = cuCheckpointProcessGetState(pid, &state) == 0 ? state : -1;
    results[6] = cuCheckpointProcessRestore(pid, NULL);
    results[7] = cuCheckpointProcessCheckpoint(pid, NULL);
    results[8] = cuCheckpointProcessGetState(pid, &state) == 0 ? state : -1;
    results[9] = cuCheckpointProcessUnlock(pid, NULL);
    results[10] = cuCheckpointProcessRestore(pid, NULL);
    results[11] = cuCheckpointProcessGetState(pid, &state) == 0 ? state : -1;
    results[12] = cuCheckpointProcessUnlock(pid, NULL);
    results[13] = cuCheckpointProcessGetState(pid, &state) == 0 ? state : -1;
    return NULL;
}

static void checkpoint_checks(void)
{
    pthread_t thread;
    CUresult got[14];
    uint64_t wrong = 1, checksum;
    static const struct {
        const char *name;
        CUresult expected;
    } steps[14] = {{"reserved word in lock", 1},   {"unlock while running", 401},
                   {"checkpoint while running", 401}, {"lock", 0},
                   {"lock twice", 401},            {"state locked", 1},
                   {"restore while locked", 401},  {"checkpoint", 0},
                   {"state checkpointed", 2},      {"unlock while checkpointed", 401},
                   {"restore", 0},                 {"state restored", 1},
                   {"unlock", 0},                  {"state running", 0}};
    client_fill(&client, 8, 3);
    client_touch(&client);
    pthread_create(&thread, NULL, own_checkpoint, got);
    pthread_join(thread, NULL);
    for (int i = 0; i < 14; i++)
        check(steps[i].name, got[i], steps[i].expected, 1);
    check("contents", client_verify(&client, &wrong, &checksum), 0, wrong == 0);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
        void (*parent)(int), (*child)(int);
    } groups[] = {{"share", NULL, share_parent, share_child}, {"ipc", NULL, ipc_parent, ipc_child},
                  {"memory", memory_checks, NULL, NULL},      {"pointers", pointer_checks, NULL, NULL},
                  {"streams", stream_checks, NULL, NULL},     {"legacy", legacy_checks, NULL, NULL},
                  {"modules", module_checks, NULL, NULL},     {"vmm", vmm_checks, NULL, NULL},
                  {"entry", entry_checks, NULL, NULL},        {"checkpoint", checkpoint_checks, NULL, NULL}};
    if (cuda_load(cuda) != 0)
        return 3;
#define F(name, parameters) *(void **)&name = cuda_function(#name);
    MORE_FUNCTIONS(F)
#undef F
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        int wanted = argc < 2;
        for (int j = 1; j < argc; j++)
            wanted |= strcmp(argv[j], groups[i].name) == 0;
        if (!wanted)
            continue;
        answer("group", 0, 0, "\"name\":\"%s\"", groups[i].name);
        /* Each group runs in its own process, because a child cannot use the driver if its parent used the driver
         * before the fork. */
        pid_t pid = fork();
        if (pid == 0) {
            if (groups[i].run == NULL)
                two_processes(groups[i].parent, groups[i].child);
            else if (client_open(&client, 0) != 0)
                failures = 1;
            else
                groups[i].run();
            _exit(failures != 0);
        }
        int status = 0;
        waitpid(pid, &status, 0);
        failures += status != 0;
    }
    answer("done", 0, 0, "\"ok\":%s", failures ? "false" : "true");
    return failures != 0;
}
