/* Does one thing that makes, or could make, a checkpoint unsafe.
 *
 *   hazards plain|managed|peer|ipc-import|ipc-export|pinned|async|detach|green|capture|exit [MIB]
 *
 * It fills MIB (default 16) of memory, creates the hazard, and prints "ready". For each line on stdin it verifies all
 * its memory, including the hazard's (reply "verify" with "ok"). It ends when stdin ends.
 *
 *   managed      1 MiB by cuMemAllocManaged
 *   peer         peer access to the other device
 *   ipc-import   a child exports memory, this process opens the handle
 *   ipc-export   a handle that no process opens
 *   pinned       4 MiB of pinned host memory, used for copies
 *   async        4 MiB by cuMemAllocAsync
 *   detach       a context that cuCtxDetach has ended, with 4 MiB of memory
 *   green        a stream of a green context that has ended, with 4 MiB that were freed in it
 *   capture      a stream capture in the mode GLOBAL that begins before "ready", and ends at the first line
 *   exit         ends at the first line, while another of its threads makes a call; its last exit handler lingers */
#include "client.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MORE_BYTES (4u << 20)

struct ipc_handle {
    char reserved[64];
};

static struct client client;
/* Memory of the hazard on the device, and on the host. 0: none. */
static CUdeviceptr more;
static unsigned char *pinned;
static size_t more_bytes;
/* Stream that is being captured. NULL: none. */
static CUstream captured;

static CUresult fill_more(void)
{
    unsigned char *bytes = malloc(more_bytes);
    if (bytes == NULL)
        return 2;
    for (size_t i = 0; i < more_bytes; i++)
        bytes[i] = (unsigned char)(i * 31 + 7);
    CUresult result = client.cuda.copy_in(more, bytes, more_bytes);
    free(bytes);
    return result;
}

/* Counts the bytes of the hazard's memory that have changed. */
static CUresult verify_more(uint64_t *wrong)
{
    unsigned char *bytes = pinned ? pinned : malloc(more_bytes);
    CUresult result = 0;
    for (size_t i = 0; pinned && i < more_bytes; i++)
        *wrong += pinned[i] != (unsigned char)(i * 31 + 7);
    if (pinned)
        memset(pinned, 0, more_bytes);
    if (more)
        result = client.cuda.copy_out(bytes, more, more_bytes);
    for (size_t i = 0; more && result == 0 && i < more_bytes; i++)
        *wrong += bytes[i] != (unsigned char)(i * 31 + 7);
    if (!pinned)
        free(bytes);
    return result;
}

static CUresult ipc_export(struct ipc_handle *handle)
{
    CUresult (*get)(struct ipc_handle *, CUdeviceptr) = cuda_function("cuIpcGetMemHandle");
    return get(handle, client.memory);
}

/* Starts a child with memory of its own, which sends its IPC handle through a pipe. Called before this process uses the
 * driver. */
static int exporter(void)
{
    int pipes[2];
    if (pipe(pipes) != 0)
        return -1;
    if (fork() == 0) {
        struct ipc_handle handle;
        CUresult result = cuda_load(&client.cuda);
        if (result == 0)
            result = client_open(&client, 0);
        if (result == 0)
            result = client_fill(&client, 4, 9);
        if (result == 0)
            result = ipc_export(&handle);
        if (result != 0 || write(pipes[1], &handle, sizeof handle) != sizeof handle)
            _exit(1);
        for (;;)
            pause();
    }
    close(pipes[1]);
    return pipes[0];
}

/* Enables access from each device to the other's memory, and copies from one device to the other. Restores of such
 * processes always failed on some machines, and succeeded on others. */
static CUresult peer_access(void)
{
    int count = 0;
    CUdevice other;
    CUcontext own, context;
    CUdeviceptr there;
    CUresult (*current)(CUcontext *) = cuda_function("cuCtxGetCurrent");
    CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t) = cuda_function("cuMemcpyDtoD_v2");
    CUresult (*synchronize)(void) = cuda_function("cuCtxSynchronize");
    CUresult result = client.cuda.device_count(&count);
    if (result != 0 || count < 2)
        return result != 0 ? result : 101;
    if ((result = current(&own)) != 0 || (result = client.cuda.device_get(&other, 1)) != 0 ||
        (result = client.cuda.primary_retain(&context, other)) != 0 ||
        (result = client.cuda.ctx_set(context)) != 0 ||
        (result = client.cuda.mem_alloc(&there, MORE_BYTES)) != 0 ||
        (result = client.cuda.ctx_enable_peer(own, 0)) != 0 || (result = client.cuda.ctx_set(own)) != 0 ||
        (result = client.cuda.ctx_enable_peer(context, 0)) != 0 ||
        (result = client.cuda.mem_alloc(&more, MORE_BYTES)) != 0 || (result = fill_more()) != 0 ||
        (result = copy(there, more, MORE_BYTES)) != 0)
        return result;
    return synchronize();
}

/* Creates a second context with memory, and ends it as PyCUDA does. */
static CUresult detach(void)
{
    CUcontext context;
    CUdeviceptr memory;
    CUresult (*create)(CUcontext *, unsigned, CUdevice) = cuda_function("cuCtxCreate_v2");
    CUresult (*end)(CUcontext) = cuda_function("cuCtxDetach");
    TRY(create(&context, 0, client.device));
    TRY(client.cuda.mem_alloc(&memory, MORE_BYTES));
    TRY(end(context));
    return client.cuda.ctx_set(client.context);
}

/* Frees pool memory in a stream of a green context, and ends the context. */
static CUresult green(void)
{
    enum { SM_RESOURCE = 1, DEFAULT_STREAM = 1, NON_BLOCKING = 1, NOT_SUPPORTED = 801 };
    unsigned char resource[256] = {0}; /* CUdevResource has 144 bytes in CUDA 12.4 */
    void *description, *context;
    CUstream stream;
    CUdeviceptr memory;
    if (dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGreenCtxCreate") == NULL)
        return NOT_SUPPORTED;
    CUresult (*resource_of)(CUdevice, void *, int) = cuda_function("cuDeviceGetDevResource");
    CUresult (*describe)(void **, void *, unsigned) = cuda_function("cuDevResourceGenerateDesc");
    CUresult (*create)(void **, void *, CUdevice, unsigned) = cuda_function("cuGreenCtxCreate");
    CUresult (*stream_of)(CUstream *, void *, unsigned, int) = cuda_function("cuGreenCtxStreamCreate");
    CUresult (*alloc)(CUdeviceptr *, size_t, CUstream) = cuda_function("cuMemAllocAsync");
    CUresult (*free_in)(CUdeviceptr, CUstream) = cuda_function("cuMemFreeAsync");
    CUresult (*end)(void *) = cuda_function("cuGreenCtxDestroy");
    TRY(resource_of(client.device, resource, SM_RESOURCE));
    TRY(describe(&description, resource, 1));
    TRY(create(&context, description, client.device, DEFAULT_STREAM));
    TRY(stream_of(&stream, context, NON_BLOCKING, 0));
    TRY(alloc(&memory, MORE_BYTES, stream));
    TRY(free_in(memory, stream));
    return end(context);
}

/* Begins a capture that forbids unsafe calls in all threads of the process. */
static CUresult capture(void)
{
    enum { NON_BLOCKING = 1, GLOBAL = 0 };
    CUstream stream;
    CUresult (*create)(CUstream *, unsigned) = cuda_function("cuStreamCreate");
    CUresult (*begin)(CUstream, int) = cuda_function("cuStreamBeginCapture_v2");
    TRY(create(&stream, NON_BLOCKING));
    TRY(begin(stream, GLOBAL));
    captured = stream;
    return 0;
}

/* Ends the capture, if one is open. An error means that a call has made it invalid. */
static CUresult end_capture(void)
{
    void *graph;
    CUresult (*end)(CUstream, void **) = cuda_function("cuStreamEndCapture");
    CUstream stream = captured;
    captured = NULL;
    return stream == NULL ? 0 : end(stream, &graph);
}

static CUresult do_thing(const char *kind, int handles)
{
    more_bytes = MORE_BYTES;
    if (strcmp(kind, "managed") == 0) {
        more_bytes = 1 << 20;
        CUresult result = client.cuda.mem_managed(&more, more_bytes, 1);
        return result != 0 ? result : fill_more();
    }
    if (strcmp(kind, "peer") == 0)
        return peer_access();
    if (strcmp(kind, "detach") == 0)
        return detach();
    if (strcmp(kind, "green") == 0)
        return green();
    if (strcmp(kind, "capture") == 0)
        return capture();
    if (strcmp(kind, "ipc-import") == 0) {
        struct ipc_handle handle;
        CUdeviceptr imported;
        CUresult (*open)(CUdeviceptr *, struct ipc_handle, unsigned) = cuda_function("cuIpcOpenMemHandle_v2");
        if (read(handles, &handle, sizeof handle) != sizeof handle)
            return 999;
        return open(&imported, handle, 1);
    }
    if (strcmp(kind, "ipc-export") == 0) {
        struct ipc_handle handle;
        return ipc_export(&handle);
    }
    if (strcmp(kind, "pinned") == 0) {
        CUresult (*host)(void **, size_t, unsigned) = cuda_function("cuMemHostAlloc");
        CUresult result = host((void **)&pinned, more_bytes, 0);
        for (size_t i = 0; result == 0 && i < more_bytes; i++)
            pinned[i] = (unsigned char)(i * 31 + 7);
        if (result == 0)
            result = client.cuda.mem_alloc(&more, more_bytes);
        return result != 0 ? result : client.cuda.copy_in(more, pinned, more_bytes);
    }
    if (strcmp(kind, "async") == 0) {
        CUresult (*alloc)(CUdeviceptr *, size_t, CUstream) = cuda_function("cuMemAllocAsync");
        CUresult result = alloc(&more, more_bytes, NULL);
        if (result == 0)
            result = client.cuda.ctx_sync();
        return result != 0 ? result : fill_more();
    }
    return 0;
}

static void *call_and_wait(void *unused)
{
    if (client.cuda.ctx_set(client.context) == 0)
        client_touch(&client);
    return unused;
}

/* An exit handler. It is registered before the driver's own handler, so it runs after the driver's handler. */
static void linger(void)
{
    sleep_ms(1000);
}

int main(int argc, char **argv)
{
    char line[64];
    const char *kind = argc > 1 ? argv[1] : "";
    if (strcmp(kind, "exit") == 0)
        atexit(linger);
    int handles = strcmp(kind, "ipc-import") == 0 ? exporter() : -1;
    if (cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 2 ? strtoul(argv[2], NULL, 10) : 16, 1);
    if (result == 0)
        result = do_thing(kind, handles);
    answer("ready", result, 0, "\"pid\":%d", (int)getpid());
    if (result != 0)
        return 4;
    while (fgets(line, sizeof line, stdin) != NULL) {
        uint64_t wrong = 0, checksum = 0, start = now_us();
        if (strcmp(kind, "exit") == 0) {
            pthread_t thread;
            pthread_create(&thread, NULL, call_and_wait, NULL);
            sleep_ms(50);
            exit(0);
        }
        result = end_capture();
        if (result == 0)
            result = client_verify(&client, &wrong, &checksum);
        if (result == 0 && (more || pinned))
            result = verify_more(&wrong);
        answer("verify", result, now_us() - start, "\"ok\":%s,\"wrong\":%llu", result == 0 && wrong == 0 ? "true" : "false",
               (unsigned long long)wrong);
    }
    return 0;
}
