/* Measures what two GPUs can do together, without Affinode. Prints a line of JSON per figure ("what", "value", "unit"),
 * and a line per check of contents ("what", "ok").
 *
 * "links copy N"     copies of N MiB of pinned host memory: to the first GPU over its own link, to the second GPU, to
 *                    both at the same time, and to the first GPU with a part relayed through the second GPU
 * "links remap N"    N MiB of mapped memory of the first GPU that both GPUs may access: released, then made again at the
 *                    same address, with access for both
 * "links import N"   as "remap", with memory that another process has imported: on the first GPU, then on the second
 */
#include "client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROUNDS 5
#define PIECE ((size_t)32 << 20)
/* Number of buffers of the second GPU through which pieces are relayed to the first GPU. */
#define SLOTS 4
/* CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts. */
#define PORTABLE 1
#define NON_BLOCKING 1
#define DISABLE_TIMING 2
#define PINNED 1
#define ON_DEVICE 1
#define READ_WRITE 3
#define FILE_DESCRIPTOR 1

static CUresult (*pin)(void *, size_t, unsigned);
static CUresult (*copy_in)(CUdeviceptr, const void *, size_t, CUstream);
static CUresult (*copy_out)(void *, CUdeviceptr, size_t);
static CUresult (*copy_peer)(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream);
static CUresult (*stream_wait)(CUstream, CUevent, unsigned);
static CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
static CUresult (*create)(memory_handle *, size_t, const struct allocation_prop *, unsigned long long);
static CUresult (*map)(CUdeviceptr, size_t, size_t, memory_handle, unsigned long long);
static CUresult (*unmap)(CUdeviceptr, size_t);
static CUresult (*release)(memory_handle);
static CUresult (*set_access)(CUdeviceptr, size_t, const struct access *, size_t);
static CUresult (*export_handle)(void *, memory_handle, int, unsigned long long);
static CUresult (*import_handle)(memory_handle *, void *, int);

static struct client gpus[2];
static char *host;

#define OK(call)                                                                                                      \
    do {                                                                                                              \
        CUresult result_ = (call);                                                                                    \
        if (result_ != 0) {                                                                                           \
            fprintf(stderr, "links: line %d: %s: %d\n", __LINE__, #call, result_);                                    \
            exit(4);                                                                                                  \
        }                                                                                                             \
    } while (0)

/* Who measures, with the GPU of the importer: a part of each figure's name. */
static char who[40];

static void say(const char *what, double value, const char *unit)
{
    printf("{\"what\":\"%s%s\",\"value\":%.3f,\"unit\":\"%s\"}\n", who, what, value, unit);
    fflush(stdout);
}

/* Prints whether contents are as expected. */
static void judge(const char *what, int ok)
{
    printf("{\"what\":\"%s%s\",\"ok\":%s}\n", who, what, ok ? "true" : "false");
    fflush(stdout);
}

static void look_up(void)
{
    pin = cuda_function("cuMemHostRegister_v2");
    copy_in = cuda_function("cuMemcpyHtoDAsync_v2");
    copy_out = cuda_function("cuMemcpyDtoH_v2");
    copy_peer = cuda_function("cuMemcpyPeerAsync");
    stream_wait = cuda_function("cuStreamWaitEvent");
    reserve = cuda_function("cuMemAddressReserve");
    create = cuda_function("cuMemCreate");
    map = cuda_function("cuMemMap");
    unmap = cuda_function("cuMemUnmap");
    release = cuda_function("cuMemRelease");
    set_access = cuda_function("cuMemSetAccess");
    export_handle = cuda_function("cuMemExportToShareableHandle");
    import_handle = cuda_function("cuMemImportFromShareableHandle");
}

static void open_gpu(int index)
{
    OK(cuda_load(&gpus[index].cuda));
    OK(client_open(&gpus[index], index));
}

static void use(int index)
{
    OK(gpus[index].cuda.ctx_set(gpus[index].context));
}

/* Pinned host memory, filled with a word that depends on its position. A single copy must stay within a part: the
 * driver refuses copies across registrations. */
static void make_host(size_t bytes, size_t part)
{
    host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED)
        exit(5);
    madvise(host, bytes, MADV_HUGEPAGE);
    for (size_t at = 0; at < bytes; at += 4096)
        *(size_t *)(host + at) = at;
    for (size_t at = 0; at < bytes; at += part)
        OK(pin(host + at, part, PORTABLE));
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values)
{
    qsort(values, ROUNDS, sizeof *values, compare);
    return values[ROUNDS / 2];
}

/* Whether the device's memory has the words of the host's memory from this offset on. Looks at one word of each 4 MiB. */
static int arrived(int index, CUdeviceptr at, size_t bytes, size_t offset)
{
    use(index);
    for (size_t done = 0; done < bytes; done += 4 << 20) {
        size_t word = 0;
        OK(copy_out(&word, at + done, sizeof word));
        if (word != offset + done)
            return 0;
    }
    return 1;
}

struct relay {
    CUstream own, in, out;
    CUdeviceptr slot[SLOTS];
    CUevent filled[SLOTS], drained[SLOTS];
};

/* Copies to the first GPU. Of each eight pieces, `relayed` go through the second GPU. */
static double relay_ms(struct relay *relay, CUdeviceptr to, size_t bytes, unsigned relayed)
{
    uint64_t start = now_us();
    unsigned next = 0;
    for (size_t done = 0, piece = 0; done < bytes; done += PIECE, piece++) {
        if (piece * 5 % 8 >= relayed) {
            use(0);
            OK(copy_in(to + done, host + done, PIECE, relay->own));
            continue;
        }
        unsigned slot = next++ % SLOTS;
        use(1);
        OK(stream_wait(relay->in, relay->drained[slot], 0));
        OK(copy_in(relay->slot[slot], host + done, PIECE, relay->in));
        OK(gpus[1].cuda.event_record(relay->filled[slot], relay->in));
        OK(stream_wait(relay->out, relay->filled[slot], 0));
        OK(copy_peer(to + done, gpus[0].context, relay->slot[slot], gpus[1].context, PIECE, relay->out));
        OK(gpus[1].cuda.event_record(relay->drained[slot], relay->out));
    }
    use(0);
    OK(gpus[0].cuda.stream_sync(relay->own));
    use(1);
    OK(gpus[1].cuda.stream_sync(relay->out));
    return (double)(now_us() - start) / 1e3;
}

/* Copies host memory to both GPUs at the same time. Each GPU copies different host memory, because a second copy of the
 * same memory would read the processor's cache. */
static double both_ms(const CUdeviceptr to[2], const CUstream streams[2], size_t bytes, int first, int last)
{
    uint64_t start = now_us();
    for (size_t done = 0; done < bytes; done += PIECE)
        for (int gpu = first; gpu <= last; gpu++) {
            use(gpu);
            OK(copy_in(to[gpu] + done, host + (size_t)gpu * bytes + done, PIECE, streams[gpu]));
        }
    for (int gpu = first; gpu <= last; gpu++) {
        use(gpu);
        OK(gpus[gpu].cuda.stream_sync(streams[gpu]));
    }
    return (double)(now_us() - start) / 1e3;
}

static void copies(size_t bytes)
{
    static const struct {
        const char *what;
        int first, last;
    } ways[] = {{"to the first GPU", 0, 0}, {"to the second GPU", 1, 1}, {"to both at the same time, each", 0, 1}};
    CUdeviceptr to[2];
    CUstream streams[2];
    struct relay relay;
    double took[ROUNDS];
    char what[120];

    open_gpu(0);
    open_gpu(1);
    use(0);
    OK(gpus[0].cuda.ctx_enable_peer(gpus[1].context, 0));
    use(1);
    OK(gpus[1].cuda.ctx_enable_peer(gpus[0].context, 0));
    make_host(2 * bytes, PIECE);
    for (int gpu = 0; gpu < 2; gpu++) {
        use(gpu);
        OK(gpus[gpu].cuda.mem_alloc(&to[gpu], bytes));
        OK(gpus[gpu].cuda.stream_create(&streams[gpu], NON_BLOCKING));
    }
    relay.own = streams[0];
    relay.in = streams[1];
    OK(gpus[1].cuda.stream_create(&relay.out, NON_BLOCKING));
    for (int slot = 0; slot < SLOTS; slot++) {
        OK(gpus[1].cuda.mem_alloc(&relay.slot[slot], PIECE));
        OK(gpus[1].cuda.event_create(&relay.filled[slot], DISABLE_TIMING));
        OK(gpus[1].cuda.event_create(&relay.drained[slot], DISABLE_TIMING));
    }
    for (size_t way = 0; way < sizeof ways / sizeof ways[0]; way++) {
        for (int gpu = 0; gpu < 2; gpu++) {
            /* Old words would hide a piece that was not copied. */
            use(gpu);
            OK(client_pattern(&gpus[gpu], to[gpu], bytes / 4, 1));
            OK(gpus[gpu].cuda.ctx_sync());
        }
        both_ms(to, streams, bytes, ways[way].first, ways[way].last);
        for (int round = 0; round < ROUNDS; round++)
            took[round] = both_ms(to, streams, bytes, ways[way].first, ways[way].last);
        double ms = median(took);
        say(ways[way].what, ms, "ms");
        snprintf(what, sizeof what, "%s, rate", ways[way].what);
        say(what, (double)bytes / ms / 1e6, "GB/s");
        for (int gpu = ways[way].first; gpu <= ways[way].last; gpu++) {
            snprintf(what, sizeof what, "%s: GPU %d has the words", ways[way].what, gpu);
            judge(what, arrived(gpu, to[gpu], bytes, (size_t)gpu * bytes));
        }
    }
    for (unsigned relayed = 2; relayed <= 8; relayed += relayed == 4 ? 4 : 1) {
        relay_ms(&relay, to[0], bytes, relayed);
        for (int round = 0; round < ROUNDS; round++) {
            use(0);
            /* The memory is overwritten first, because old words would hide a piece that was not copied. */
            OK(client_pattern(&gpus[0], to[0], bytes / 4, 1));
            OK(gpus[0].cuda.ctx_sync());
            took[round] = relay_ms(&relay, to[0], bytes, relayed);
        }
        double ms = median(took);
        snprintf(what, sizeof what, "to the first GPU, %u of 8 pieces through the second", relayed);
        say(what, ms, "ms");
        snprintf(what, sizeof what, "to the first GPU, %u of 8 through the second, rate", relayed);
        say(what, (double)bytes / ms / 1e6, "GB/s");
        snprintf(what, sizeof what, "%u of 8 through the second: GPU 0 has the words", relayed);
        judge(what, arrived(0, to[0], bytes, 0));
    }
}

/* Memory of the first GPU at an address that is reserved once. */
struct piece {
    CUdeviceptr at;
    memory_handle handle;
    size_t bytes;
};

static void place(struct piece *piece, int importer)
{
    struct access access[2] = {{{ON_DEVICE, 0}, READ_WRITE}, {{ON_DEVICE, importer}, READ_WRITE}};
    uint64_t start = now_us();
    OK(map(piece->at, piece->bytes, 0, piece->handle, 0));
    uint64_t mapped = now_us();
    OK(set_access(piece->at, piece->bytes, access, importer == 0 ? 1 : 2));
    say("cuMemMap", (double)(mapped - start) / 1e3, "ms");
    say(importer == 0 ? "cuMemSetAccess, for one GPU" : "cuMemSetAccess, for both GPUs", (double)(now_us() - mapped) / 1e3,
        "ms");
}

static void make(struct piece *piece, int handle_types, int importer)
{
    struct allocation_prop prop = {PINNED, handle_types, {ON_DEVICE, 0}, NULL, {0}};
    uint64_t start = now_us();
    OK(create(&piece->handle, piece->bytes, &prop, 0));
    say("cuMemCreate", (double)(now_us() - start) / 1e3, "ms");
    place(piece, importer);
}

static void give_up(struct piece *piece)
{
    uint64_t start = now_us();
    OK(unmap(piece->at, piece->bytes));
    OK(release(piece->handle));
    say("cuMemUnmap and cuMemRelease", (double)(now_us() - start) / 1e3, "ms");
}

static double free_mib(int index)
{
    size_t free_bytes, total_bytes;
    use(index);
    OK(gpus[index].cuda.mem_info(&free_bytes, &total_bytes));
    return (double)free_bytes / (1 << 20);
}

static int is_right(int index, const struct piece *piece, uint32_t seed)
{
    struct content content = {seed, 1, 0};
    uint64_t wrong = 0;
    use(index);
    OK(client_check(&gpus[index], piece->at, piece->bytes / 4, content, &wrong));
    return wrong == 0;
}

static void write_by(int index, const struct piece *piece, uint32_t seed)
{
    use(index);
    OK(client_pattern(&gpus[index], piece->at, piece->bytes / 4, seed));
    OK(gpus[index].cuda.ctx_sync());
}

static void remap(size_t bytes)
{
    struct piece piece = {0, 0, bytes};
    open_gpu(0);
    open_gpu(1);
    use(0);
    OK(gpus[0].cuda.ctx_enable_peer(gpus[1].context, 0));
    use(1);
    OK(gpus[1].cuda.ctx_enable_peer(gpus[0].context, 0));
    use(0);
    make_host(bytes, bytes);
    OK(reserve(&piece.at, bytes, 0, 0, 0));
    make(&piece, 0, 1);
    write_by(0, &piece, 7);
    judge("the second GPU reads", is_right(1, &piece, 7));
    write_by(1, &piece, 8);
    judge("the first GPU reads what the second wrote", is_right(0, &piece, 8));
    OK(copy_out(host, piece.at, bytes));
    double before = free_mib(0);
    give_up(&piece);
    say("released memory", free_mib(0) - before, "MiB");
    /* Other memory takes the place of the released memory, so that old words cannot be read by chance. */
    CUdeviceptr other;
    OK(gpus[0].cuda.mem_alloc(&other, bytes));
    OK(client_pattern(&gpus[0], other, bytes / 4, 9));
    OK(gpus[0].cuda.ctx_sync());
    OK(gpus[0].cuda.mem_free(other));
    make(&piece, 0, 1);
    OK(copy_in(piece.at, host, bytes, NULL));
    OK(gpus[0].cuda.ctx_sync());
    judge("the second GPU reads at the same address", is_right(1, &piece, 8));
    judge("the first GPU reads at the same address", is_right(0, &piece, 8));
    struct access none = {{ON_DEVICE, 1}, 0}, again = {{ON_DEVICE, 1}, READ_WRITE};
    uint64_t start = now_us();
    CUresult taken = set_access(piece.at, bytes, &none, 1);
    uint64_t middle = now_us();
    OK(set_access(piece.at, bytes, &again, 1));
    uint64_t end = now_us();
    judge("access of the second GPU alone is taken away", taken == 0);
    say("cuMemSetAccess to none", (double)(middle - start) / 1e3, "ms");
    say("cuMemSetAccess for the second GPU again", (double)(end - middle) / 1e3, "ms");
    judge("the second GPU reads after that", is_right(1, &piece, 8));
}

static void send_handle(int socket, int handle)
{
    char space[CMSG_SPACE(sizeof(int))] = {0}, byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &handle, sizeof handle);
    if (sendmsg(socket, &message, 0) != 1)
        exit(6);
}

static int receive_handle(int socket)
{
    char space[CMSG_SPACE(sizeof(int))], byte;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    int handle;
    if (recvmsg(socket, &message, 0) != 1 || CMSG_FIRSTHDR(&message) == NULL)
        exit(6);
    memcpy(&handle, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof handle);
    return handle;
}

static void pass(int socket)
{
    char byte = 0;
    if (write(socket, &byte, 1) != 1)
        exit(6);
}

static void wait_for(int socket)
{
    char byte;
    if (read(socket, &byte, 1) != 1)
        exit(6);
}

static void import_from(struct piece *piece, int socket, int gpu)
{
    struct access access = {{ON_DEVICE, gpu}, READ_WRITE};
    int handle = receive_handle(socket);
    uint64_t start = now_us();
    OK(import_handle(&piece->handle, (void *)(uintptr_t)handle, FILE_DESCRIPTOR));
    OK(map(piece->at, piece->bytes, 0, piece->handle, 0));
    OK(set_access(piece->at, piece->bytes, &access, 1));
    say("import, map and access", (double)(now_us() - start) / 1e3, "ms");
    close(handle);
}

/* The process that imports the memory, on this GPU. */
static int importer(int socket, size_t bytes, int gpu)
{
    struct piece piece = {0, 0, bytes};
    open_gpu(gpu);
    OK(reserve(&piece.at, bytes, 0, 0, 0));
    import_from(&piece, socket, gpu);
    judge("reads", is_right(gpu, &piece, 7));
    write_by(gpu, &piece, 8);
    pass(socket);
    /* Waits until the owner has released its memory. */
    wait_for(socket);
    judge("still reads after the owner's release", is_right(gpu, &piece, 8));
    give_up(&piece);
    pass(socket);
    import_from(&piece, socket, gpu);
    judge("reads at the same address", is_right(gpu, &piece, 8));
    write_by(gpu, &piece, 9);
    pass(socket);
    wait_for(socket);
    return 0;
}

static void owner(int socket, size_t bytes)
{
    struct piece piece = {0, 0, bytes};
    int handle;
    open_gpu(0);
    make_host(bytes, bytes);
    OK(reserve(&piece.at, bytes, 0, 0, 0));
    make(&piece, FILE_DESCRIPTOR, 0);
    write_by(0, &piece, 7);
    OK(export_handle(&handle, piece.handle, FILE_DESCRIPTOR, 0));
    send_handle(socket, handle);
    close(handle);
    wait_for(socket);
    judge("reads what the importer wrote", is_right(0, &piece, 8));
    OK(copy_out(host, piece.at, bytes));
    double before = free_mib(0);
    give_up(&piece);
    say("released while the importer maps it", free_mib(0) - before, "MiB");
    pass(socket);
    wait_for(socket);
    say("released after the importer's release", free_mib(0) - before, "MiB");
    make(&piece, FILE_DESCRIPTOR, 0);
    OK(copy_in(piece.at, host, bytes, NULL));
    OK(gpus[0].cuda.ctx_sync());
    OK(export_handle(&handle, piece.handle, FILE_DESCRIPTOR, 0));
    send_handle(socket, handle);
    close(handle);
    wait_for(socket);
    judge("reads what the importer wrote then", is_right(0, &piece, 9));
    pass(socket);
}

static int imports(size_t bytes, int gpu)
{
    int pair[2], status;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        return 6;
    pid_t child = fork();
    if (child == 0) {
        close(pair[0]);
        look_up();
        snprintf(who, sizeof who, "importer on GPU %d: ", gpu);
        exit(importer(pair[1], bytes, gpu));
    }
    close(pair[1]);
    pid_t parent = fork();
    if (parent == 0) {
        look_up();
        snprintf(who, sizeof who, "owner, importer on GPU %d: ", gpu);
        owner(pair[0], bytes);
        exit(0);
    }
    close(pair[0]);
    for (int ended = 0; ended < 2; ended++)
        if (wait(&status) < 0 || status != 0)
            return 7;
    return 0;
}

int main(int argc, char **argv)
{
    size_t bytes = argc == 3 ? strtoull(argv[2], NULL, 10) << 20 : 0;
    if (bytes == 0 || bytes % PIECE != 0) {
        fprintf(stderr, "usage: links copy|remap|import MIB, a multiple of %zu\n", PIECE >> 20);
        return 1;
    }
    if (strcmp(argv[1], "import") == 0) {
        int result = imports(bytes, 0);
        return result != 0 ? result : imports(bytes, 1);
    }
    look_up();
    if (strcmp(argv[1], "copy") == 0)
        copies(bytes);
    else
        remap(bytes);
    return 0;
}
