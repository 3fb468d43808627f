/* Shares memory with another process by legacy IPC, on command.
 *
 *   ipc [--mib N] [--seed S] [--by-name V]
 *
 * With --by-name it gets cuIpcOpenMemHandle of CUDA version V from cuGetProcAddress, as the runtime does. Otherwise
 * it gets cuIpcOpenMemHandle_v2 from dlsym. With --mib it allocates this much memory and fills it by seed. Without --mib
 * it has no memory until it opens some. It executes commands from stdin, and replies to each with one line of JSON.
 * result is the CUresult, or the outcome of the command's own steps:
 *
 *   handle [OFFSET]      cuIpcGetMemHandle of an address inside: "handle", in hex
 *   open HEX MIB SEED    cuIpcOpenMemHandle; later commands use this memory; "ok": it was not open before, or has the
 *                        same address
 *   flags HEX FLAGS      the same call with other flags, for its result
 *   verify, touch, sync  as in worker.c, on that memory
 *   touched              says that another process has added 1 to every word, so that verify expects it
 *   facts                queries range, attributes and context of an inner address; "ok": as in a whole allocation
 *   inner                cuIpcCloseMemHandle with an inner address
 *   close                cuIpcCloseMemHandle
 *   busyclose            the same while a kernel runs; "ok": the kernel has ended when the call returns
 *   capable              "ok": CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE is set for the memory
 *   free                 cuMemFree
 *   reset                ends the primary context and creates another; this closes all imports
 *   fork                 forks a child that makes a CUDA call and exits; the result is the child's
 *   attack HEX           requests forbidden memory from the socket that the handle names, and floods the socket; "ok":
 *                        it sent only the memory of the handle
 *   reached              "ok": other devices on the bus can access the memory (GPUDirect RDMA)
 *   more MIB             allocates and fills memory that is never shared
 *   verifymore           as verify, on the memory that is never shared
 *   meminfo              "free_bytes"
 *   quit
 */
#define _GNU_SOURCE
#include "client.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* Size of a request, and of a reply. */
#define FRAME_BYTES 128

struct ipc_handle {
    unsigned char bytes[64];
};

#define MORE_FUNCTIONS(F)                                                                                             \
    F(cuIpcGetMemHandle, (struct ipc_handle * handle, CUdeviceptr address))                                           \
    F(cuIpcOpenMemHandle_v2, (CUdeviceptr * address, struct ipc_handle handle, unsigned flags))                       \
    F(cuIpcCloseMemHandle, (CUdeviceptr address))                                                                     \
    F(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *bytes, CUdeviceptr address))                              \
    F(cuPointerGetAttribute, (void *data, int attribute, CUdeviceptr address))                                        \
    F(cuDevicePrimaryCtxReset_v2, (CUdevice device))

#define F(name, parameters) static CUresult(*name) parameters;
MORE_FUNCTIONS(F)
#undef F

static struct client client;

static struct ipc_handle from_hex(const char *hex)
{
    struct ipc_handle handle = {{0}};
    unsigned byte;
    for (int i = 0; i < 64 && sscanf(hex + 2 * i, "%2x", &byte) == 1; i++)
        handle.bytes[i] = (unsigned char)byte;
    return handle;
}

static void tell_handle(const char *offset)
{
    struct ipc_handle handle = {{0}};
    char hex[129] = "";
    CUresult result = cuIpcGetMemHandle(&handle, client.memory + strtoull(offset, NULL, 0));
    for (int i = 0; i < 64; i++)
        sprintf(hex + 2 * i, "%02x", handle.bytes[i]);
    answer("handle", result, 0, "\"handle\":\"%s\"", hex);
}

static CUresult open_handle(const char *arguments, int *ok)
{
    char hex[129] = "";
    size_t mib = 0;
    uint32_t seed = 0;
    CUdeviceptr address = 0;
    if (sscanf(arguments, "%128s %zu %u", hex, &mib, &seed) != 3)
        return 999;
    TRY(cuIpcOpenMemHandle_v2(&address, from_hex(hex), 1));
    *ok = client.memory == 0 || client.memory == address;
    client.memory = address;
    client.words = mib << 18;
    client.seed = seed;
    return 0;
}

static CUresult open_flags(const char *arguments)
{
    char hex[129] = "";
    unsigned flags = 0;
    CUdeviceptr address = 0;
    if (sscanf(arguments, "%128s %u", hex, &flags) != 2)
        return 999;
    return cuIpcOpenMemHandle_v2(&address, from_hex(hex), flags);
}

static CUresult facts(int *ok)
{
    CUdeviceptr inside = client.memory + client.words * 2 + 12, base = 0, start = 0;
    size_t bytes = 0, range = 0;
    void *context = NULL;
    int kind = 0, device = -1;
    TRY(cuMemGetAddressRange_v2(&base, &bytes, inside));
    TRY(cuPointerGetAttribute(&context, 1, inside));
    TRY(cuPointerGetAttribute(&kind, 2, inside));
    TRY(cuPointerGetAttribute(&device, 9, inside));
    TRY(cuPointerGetAttribute(&start, 11, inside));
    TRY(cuPointerGetAttribute(&range, 12, inside));
    *ok = base == client.memory && start == base && bytes == client.words * 4 && range == bytes && kind == 2 &&
          device == client.device && context == (void *)client.context;
    return 0;
}

static CUresult close_while_busy(int *ok)
{
    TRY(client_spin(&client, 300));
    TRY(cuIpcCloseMemHandle(client.memory));
    *ok = client.cuda.stream_query(NULL) == 0;
    return 0;
}

static CUresult capable(int *ok)
{
    unsigned is = 0;
    TRY(cuPointerGetAttribute(&is, 13, client.memory + 4096));
    *ok = is == 1;
    return 0;
}

static CUresult reached(int *ok)
{
    unsigned char is = 0;
    TRY(cuPointerGetAttribute(&is, 15, client.memory));
    *ok = is == 1;
    return 0;
}

static CUresult reset(void)
{
    TRY(cuDevicePrimaryCtxReset_v2(client.device));
    client.memory = 0;
    client.touches = 0;
    return client_open(&client, client.device);
}

static CUresult in_child(void)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0)
        _exit(client.cuda.ctx_sync());
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 999;
}

static int dial(const struct ipc_handle *handle)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = sprintf(address.sun_path + 1, "affinode-ipc-");
    for (int i = 0; i < 16; i++)
        length += sprintf(address.sun_path + 1 + length, "%02x", handle->bytes[8 + i]);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address.sun_family + 1 + (size_t)length) == 0)
        return fd;
    close(fd);
    return -1;
}

static void send_to(int socket, const void *data, size_t bytes, int fd, int flags)
{
    char space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {(void *)(uintptr_t)data, bytes};
    struct msghdr message = {NULL, 0, &part, 1, space, sizeof space, 0};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (fd < 0)
        message.msg_controllen = 0;
    sendmsg(socket, &message, flags | MSG_NOSIGNAL);
}

/* Whether the reply to a request contains a descriptor. */
static int is_given(int socket, const unsigned char *frame, size_t bytes)
{
    char space[CMSG_SPACE(sizeof(int))];
    unsigned char buffer[FRAME_BYTES];
    struct iovec part = {buffer, sizeof buffer};
    struct msghdr message = {NULL, 0, &part, 1, space, sizeof space, 0};
    int ends[2], fd = -1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0)
        exit(5);
    send_to(socket, frame, bytes, ends[1], 0);
    close(ends[1]);
    if (recvmsg(ends[0], &message, 0) > 0 && CMSG_FIRSTHDR(&message) != NULL)
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    close(ends[0]);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

/* Attacks that any process of the network namespace can make on the socket. */
static int attack(const char *hex)
{
    enum { KIND = 4, WORD = 8, ADDRESS = 24, SINCE = 32 };
    struct ipc_handle handle = from_hex(hex);
    unsigned char good[FRAME_BYTES + 1] = "AFNf", bad[FRAME_BYTES + 1];
    int ok = 1, pipes[2], socket = dial(&handle);
    if (socket < 0 || pipe(pipes) != 0)
        return 0;
    good[KIND] = 241;
    memcpy(good + WORD, handle.bytes + 24, 16);
    memcpy(good + ADDRESS, handle.bytes + 48, 16);
    ok &= is_given(socket, good, FRAME_BYTES);
    /* Requests with one wrong byte, in every position that is checked. */
    for (int at = 0; at < SINCE + 8; at++) {
        memcpy(bad, good, sizeof bad);
        bad[at] ^= 1;
        ok &= !is_given(socket, bad, FRAME_BYTES);
    }
    for (size_t bytes = 0; bytes <= FRAME_BYTES + 1; bytes++)
        ok &= is_given(socket, good, bytes) == (bytes == FRAME_BYTES);
    /* Correct requests without a descriptor for the reply, and with descriptors to which no reply can be sent. */
    send_to(socket, good, FRAME_BYTES, -1, 0);
    send_to(socket, good, FRAME_BYTES, pipes[0], 0);
    send_to(socket, good, FRAME_BYTES, pipes[1], 0);
    send_to(socket, good, FRAME_BYTES, socket, 0);
    /* More correct and wrong requests than the socket's queue can hold. */
    for (int i = 0; i < 20000; i++)
        send_to(socket, i % 3 ? bad : good, FRAME_BYTES, i % 2 ? pipes[1] : -1, MSG_DONTWAIT);
    ok &= is_given(socket, good, FRAME_BYTES);
    close(pipes[0]);
    close(pipes[1]);
    close(socket);
    return ok;
}

/* Memory that is never shared. */
static struct client more;

static CUresult allocate_more(const char *mib)
{
    more = client;
    return client_fill(&more, strtoul(mib, NULL, 10), 5);
}

/* Executes a command. Returns 0 if the program must end. */
static int obey(char *command)
{
    char *arguments = command + strcspn(command, " ");
    if (*arguments)
        *arguments++ = 0;
    int ok = 1;
    size_t free_bytes = 0, total = 0;
    uint64_t wrong = 0, checksum = 0;
    CUresult result = -1;
    if (strcmp(command, "quit") == 0)
        return 0;
    if (strcmp(command, "handle") == 0) {
        tell_handle(arguments);
        return 1;
    }
    if (strcmp(command, "open") == 0)
        result = open_handle(arguments, &ok);
    else if (strcmp(command, "flags") == 0)
        result = open_flags(arguments);
    else if (strcmp(command, "verify") == 0)
        result = client_verify(&client, &wrong, &checksum);
    else if (strcmp(command, "touch") == 0)
        result = client_touch(&client);
    else if (strcmp(command, "sync") == 0)
        result = client.cuda.ctx_sync();
    else if (strcmp(command, "touched") == 0)
        result = 0, client.touches++;
    else if (strcmp(command, "facts") == 0)
        result = facts(&ok);
    else if (strcmp(command, "inner") == 0)
        result = cuIpcCloseMemHandle(client.memory + (2 << 20));
    else if (strcmp(command, "close") == 0)
        result = cuIpcCloseMemHandle(client.memory);
    else if (strcmp(command, "busyclose") == 0)
        result = close_while_busy(&ok);
    else if (strcmp(command, "capable") == 0)
        result = capable(&ok);
    else if (strcmp(command, "reached") == 0)
        result = reached(&ok);
    else if (strcmp(command, "free") == 0)
        result = client.cuda.mem_free(client.memory);
    else if (strcmp(command, "reset") == 0)
        result = reset();
    else if (strcmp(command, "fork") == 0)
        result = in_child();
    else if (strcmp(command, "attack") == 0)
        result = 0, ok = attack(arguments);
    else if (strcmp(command, "more") == 0)
        result = allocate_more(arguments);
    else if (strcmp(command, "verifymore") == 0)
        result = client_verify(&more, &wrong, &checksum);
    else if (strcmp(command, "meminfo") == 0)
        result = client.cuda.mem_info(&free_bytes, &total);
    answer(command, result, 0, "\"ok\":%s,\"free_bytes\":%zu", ok && wrong == 0 ? "true" : "false", free_bytes);
    return 1;
}

int main(int argc, char **argv)
{
    size_t mib = 0;
    uint32_t seed = 1;
    int version = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--mib") == 0)
            mib = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--by-name") == 0)
            version = atoi(argv[i + 1]);
    }
    if (cuda_load(&client.cuda) != 0)
        return 3;
    /* Only one of the two names is used, because both return the same function. */
#define F(name, parameters)                                                                                           \
    if (!version || strcmp(#name, "cuIpcOpenMemHandle_v2") != 0)                                                      \
        *(void **)&name = cuda_function(#name);
    MORE_FUNCTIONS(F)
#undef F
    CUresult (*by_name)(const char *, void *, int, uint64_t, int *) = cuda_function("cuGetProcAddress_v2");
    if (version && by_name("cuIpcOpenMemHandle", &cuIpcOpenMemHandle_v2, version, 0, NULL) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    answer("open", result, 0, "\"pid\":%d", (int)getpid());
    if (result == 0 && mib > 0)
        result = client_fill(&client, mib, seed);
    answer("fill", result, 0, "\"mib\":%zu", mib);
    if (result != 0)
        return 4;
    client_listen(obey);
    return 0;
}
