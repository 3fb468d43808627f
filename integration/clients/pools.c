/* An application with stream-ordered memory (cudaMallocAsync) from two pools.
 *
 *   pools [--mib N] [--seed S] [--piece-mib P]
 *
 * It allocates N MiB (default 64) in pieces of P MiB (default 4), and fills them by seed (default 1). The first half
 * comes from the device's pool in one stream, the second half from a pool of the program in another stream.
 * Then it executes commands from stdin, and replies to each with a line of JSON as in worker.c. "ok" is false if a
 * check failed. "line" is then the source line of that check:
 *
 *   verify, touch, streamsync     as in worker.c
 *   churn           frees every second piece, allocates it again in its stream, and fills it with the same contents
 *   swap            the same, but each piece is allocated in the other stream
 *   twice           frees a piece a second time, in a stream and without a stream
 *   attributes      checks the attributes of a piece and of the pools
 *   threshold       checks how much unused memory a pool keeps, and which calls release it
 *   early           checks that a stream does not get memory that another stream may still use
 *   capture         allocates and frees while another stream is captured
 *   outlive         checks that another context can use memory of a context that has ended
 *   full            checks that other allocations get the freed memory that a pool holds, nearly the whole GPU
 *   hold            from now on the pools keep as much unused memory as is in use; drop: ends that
 *   cost            allocates and frees a piece from held memory 10,000 times: "elapsed_us"
 *   end             frees everything; "missing_bytes": memory that was free at the start but is not now
 *   quit
 */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct pool_props {
    int kind, handle_types;
    struct location location;
    void *security;
    size_t most_bytes;
    unsigned short usage;
    unsigned char reserved[54];
};
struct ipc_handle {
    char bytes[64];
};
typedef struct CUpool_st *pool_handle;

#define MORE_FUNCTIONS(F)                                                                                             \
    F(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream))                                        \
    F(cuMemAllocFromPoolAsync, (CUdeviceptr * address, size_t bytes, pool_handle pool, CUstream stream))              \
    F(cuMemFreeAsync, (CUdeviceptr address, CUstream stream))                                                         \
    F(cuDeviceGetDefaultMemPool, (pool_handle * pool, CUdevice device))                                               \
    F(cuMemPoolCreate, (pool_handle * pool, const struct pool_props *props))                                          \
    F(cuMemPoolDestroy, (pool_handle pool))                                                                           \
    F(cuMemPoolTrimTo, (pool_handle pool, size_t keep))                                                               \
    F(cuMemPoolGetAttribute, (pool_handle pool, int attribute, void *value))                                          \
    F(cuMemPoolSetAttribute, (pool_handle pool, int attribute, void *value))                                          \
    F(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *bytes, CUdeviceptr address))                              \
    F(cuPointerGetAttribute, (void *data, int attribute, CUdeviceptr address))                                        \
    F(cuMemsetD32Async, (CUdeviceptr address, unsigned value, size_t count, CUstream stream))                         \
    F(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                                            \
    F(cuStreamDestroy_v2, (CUstream stream))                                                                          \
    F(cuStreamBeginCapture_v2, (CUstream stream, int mode))                                                           \
    F(cuStreamEndCapture, (CUstream stream, void **graph))                                                            \
    F(cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device))                                         \
    F(cuCtxDestroy_v2, (CUcontext context))                                                                           \
    F(cuIpcGetMemHandle, (struct ipc_handle * handle, CUdeviceptr address))

#define F(name, parameters) static CUresult(*name) parameters;
MORE_FUNCTIONS(F)
#undef F

/* Error codes of a call that is refused during a capture, and of a capture that such a call has invalidated. */
enum { REFUSED = 900, SPOILT = 901 };
enum { THRESHOLD = 4, RESERVED = 5, USED = 7, USED_HIGH = 8 };
#define MOST 1024
#define MIB ((size_t)1 << 20)

static struct client client, parts[MOST];
static size_t piece_bytes, pieces, free_before;
static uint32_t seed = 1;
static CUstream streams[2];
static pool_handle pools[2];
static int failed_line;
/* During a capture, a call that makes the driver's own pool grow may be refused. Calls for swappable memory may not be
 * refused. */
static int may_refuse;

/* Checks a condition. The program reports the source line of the first condition that fails. */
#define HOLDS(what)                                                                                                   \
    do {                                                                                                              \
        if (!(what) && failed_line == 0)                                                                              \
            failed_line = __LINE__;                                                                                   \
    } while (0)

static int side(size_t piece)
{
    return piece >= pieces / 2;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes, int which)
{
    if (which == 0)
        return cuMemAllocAsync(address, bytes, streams[0]);
    return cuMemAllocFromPoolAsync(address, bytes, pools[1], streams[1]);
}

/* Allocates a piece and fills it. The fill runs on the default stream, which waits for neither of the two streams. */
static CUresult make(size_t piece)
{
    struct client *part = &parts[piece];
    *part = client;
    part->words = piece_bytes / 4;
    TRY(allocate(&part->memory, piece_bytes, side(piece)));
    TRY(client.cuda.stream_sync(streams[side(piece)]));
    return client_write(part, seed + (uint32_t)piece);
}

static size_t free_bytes(void)
{
    size_t free = 0, total = 0;
    client.cuda.mem_info(&free, &total);
    return free;
}

static uint64_t level(int which, int attribute)
{
    uint64_t value = ~0ull;
    return cuMemPoolGetAttribute(pools[which], attribute, &value) == 0 ? value : ~0ull;
}

static CUresult keep(int which, uint64_t bytes)
{
    return cuMemPoolSetAttribute(pools[which], THRESHOLD, &bytes);
}

static CUresult open_pools(size_t mib)
{
    struct pool_props props;
    memset(&props, 0, sizeof props);
    props.kind = props.location.kind = 1;
    props.location.id = client.device;
    TRY(cuDeviceGetDefaultMemPool(&pools[0], client.device));
    TRY(cuMemPoolCreate(&pools[1], &props));
    for (int i = 0; i < 2; i++)
        TRY(client.cuda.stream_create(&streams[i], 1));
    pieces = mib * MIB / piece_bytes;
    if (pieces < 4 || pieces > MOST)
        return 1;
    free_before = free_bytes();
    for (size_t i = 0; i < pieces; i++)
        TRY(make(i));
    return 0;
}

static CUresult verify(void)
{
    TRY(client.cuda.ctx_sync());
    for (size_t i = 0; i < pieces; i++) {
        uint64_t wrong = 1, checksum;
        TRY(client_verify(&parts[i], &wrong, &checksum));
        HOLDS(wrong == 0);
    }
    return 0;
}

static CUresult touch(void)
{
    for (size_t i = 0; i < pieces; i++)
        TRY(client_touch(&parts[i]));
    return client.cuda.ctx_sync();
}

/* Frees and allocates pieces without a wait in between, as a framework's loop does. */
static CUresult churn(int other)
{
    CUevent event;
    TRY(client.cuda.event_create(&event, 2));
    TRY(client.cuda.ctx_sync());
    for (size_t i = 0; i < pieces; i += 2) {
        CUstream own = streams[side(i)], freeing = streams[side(i) ^ other];
        TRY(client.cuda.event_record(event, own));
        TRY(cuStreamWaitEvent(freeing, event, 0));
        TRY(cuMemFreeAsync(parts[i].memory, freeing));
    }
    for (size_t i = 0; i < pieces; i += 2)
        TRY(make(i));
    for (size_t i = 0; i < pieces; i++)
        for (size_t j = 0; j < i; j++)
            HOLDS(parts[i].memory != parts[j].memory);
    return 0;
}

static CUresult twice(void)
{
    TRY(cuMemFreeAsync(parts[0].memory, streams[0]));
    HOLDS(cuMemFreeAsync(parts[0].memory, streams[0]) == 1);
    HOLDS(cuMemFreeAsync(parts[0].memory, streams[1]) == 1);
    HOLDS(client.cuda.mem_free(parts[0].memory) == 1);
    HOLDS(cuMemFreeAsync(parts[1].memory + piece_bytes / 2, streams[0]) == 1);
    TRY(make(0));
    /* Frees the piece with the call for memory that belongs to no stream. */
    TRY(client.cuda.mem_free(parts[0].memory));
    HOLDS(cuMemFreeAsync(parts[0].memory, streams[0]) == 1);
    return make(0);
}

static CUresult attributes(void)
{
    for (int which = 0; which < 2; which++) {
        CUdeviceptr address = 0, base = 0;
        size_t odd = piece_bytes - 100, bytes = 0;
        struct ipc_handle handle;
        uint64_t used = level(which, USED);
        TRY(allocate(&address, odd, which));
        HOLDS(level(which, USED) >= used + odd && level(which, USED) < used + odd + 2 * MIB);
        HOLDS(level(which, USED_HIGH) >= level(which, USED));
        HOLDS(level(which, RESERVED) >= level(which, USED));
        HOLDS(cuMemGetAddressRange_v2(&base, &bytes, address + 100) == 0 && base == address && bytes == odd);
        for (int attribute = 1; attribute <= 17; attribute++) {
            uint64_t value = 0, expected;
            switch (attribute) {
            case 2: expected = 2; break;
            case 9: expected = (uint64_t)client.device; break;
            case 11: expected = address; break;
            case 12: expected = odd; break;
            case 13: expected = 1; break;
            case 16: expected = 3; break;
            case 17: expected = (uint64_t)(uintptr_t)pools[which]; break;
            case 1:
            case 8:
            case 10:
            case 14:
            case 15: expected = 0; break;
            default: continue;
            }
            if (cuPointerGetAttribute(&value, attribute, address + 100) != 0 || value != expected) {
                fprintf(stderr, "attribute %d: %llx\n", attribute, (unsigned long long)value);
                HOLDS(0);
            }
        }
        HOLDS(cuIpcGetMemHandle(&handle, address) != 0);
        TRY(cuMemFreeAsync(address, streams[which]));
        HOLDS(level(which, USED) == used);
        TRY(client.cuda.stream_sync(streams[which]));
        HOLDS(cuMemGetAddressRange_v2(&base, &bytes, address) != 0);
    }
    return 0;
}

/* Sets the pool's threshold to this many bytes, then allocates and frees the size of eight pieces in the stream. */
static CUresult free_one(uint64_t keep_bytes)
{
    CUdeviceptr address;
    TRY(keep(0, keep_bytes));
    TRY(allocate(&address, 8 * piece_bytes, 0));
    TRY(client.cuda.stream_sync(streams[0]));
    return cuMemFreeAsync(address, streams[0]);
}

static CUresult threshold(void)
{
    size_t more = 8 * piece_bytes, free;
    uint64_t reserved;
    CUevent event;
    TRY(client.cuda.event_create(&event, 2));
    TRY(keep(0, 0));
    TRY(client.cuda.ctx_sync());
    free = free_bytes();
    reserved = level(0, RESERVED);
    for (int call = 0; call < 3; call++) {
        TRY(free_one(0));
        HOLDS(level(0, RESERVED) >= reserved + more);
        TRY(client.cuda.event_record(event, streams[0]));
        if (call == 0)
            TRY(client.cuda.stream_sync(streams[0]));
        else if (call == 1)
            TRY(client.cuda.event_sync(event));
        else
            TRY(client.cuda.ctx_sync());
        HOLDS(free_bytes() >= free);
        HOLDS(level(0, RESERVED) == reserved);
    }
    TRY(free_one(~0ull));
    TRY(client.cuda.ctx_sync());
    HOLDS(free_bytes() <= free - more);
    HOLDS(level(0, RESERVED) >= reserved + more);
    TRY(cuMemPoolTrimTo(pools[0], level(0, RESERVED)));
    HOLDS(free_bytes() <= free - more);
    TRY(cuMemPoolTrimTo(pools[0], 0));
    HOLDS(free_bytes() >= free);
    HOLDS(level(0, RESERVED) == reserved);
    return keep(0, 0);
}

static CUresult early(void)
{
    CUdeviceptr first = 0, other = 0, same = 0;
    unsigned spin = 500, word = 0;
    void *parameters[] = {&spin};
    TRY(client.cuda.ctx_sync());
    TRY(cuMemAllocFromPoolAsync(&first, piece_bytes, pools[1], streams[0]));
    TRY(client.cuda.launch(client.spin, 1, 1, 1, 1, 1, 1, 0, streams[0], parameters, NULL));
    TRY(cuMemsetD32Async(first, 7, piece_bytes / 4, streams[0]));
    uint64_t start = now_us();
    TRY(cuMemFreeAsync(first, streams[0]));
    TRY(cuMemAllocFromPoolAsync(&other, piece_bytes, pools[1], streams[1]));
    TRY(cuMemsetD32Async(other, 8, piece_bytes / 4, streams[1]));
    if (now_us() - start < 400000)
        HOLDS(client.cuda.stream_query(streams[0]) == 600);
    TRY(client.cuda.stream_sync(streams[1]));
    TRY(cuMemAllocFromPoolAsync(&same, piece_bytes, pools[1], streams[0]));
    TRY(cuMemsetD32Async(same, 9, piece_bytes / 4, streams[0]));
    HOLDS(same != other);
    TRY(client.cuda.stream_sync(streams[0]));
    TRY(client.cuda.copy_out(&word, other + piece_bytes - 4, 4));
    HOLDS(word == 8);
    TRY(client.cuda.copy_out(&word, same + piece_bytes - 4, 4));
    HOLDS(word == 9);
    TRY(cuMemFreeAsync(other, streams[1]));
    TRY(cuMemFreeAsync(same, streams[0]));
    return client.cuda.ctx_sync();
}

static CUresult capture(void)
{
    CUdeviceptr address = 0, in_graph = 0, plain = 0;
    CUstream captured;
    void *graph = NULL;
    TRY(client.cuda.stream_create(&captured, 1));
    TRY(client.cuda.mem_alloc(&plain, piece_bytes));
    TRY(cuMemAllocAsync(&address, piece_bytes, captured));
    TRY(client.cuda.ctx_sync());
    for (int round = 0; round < 2; round++) {
        CUdeviceptr beside = 0, old = round == 0 ? address : plain;
        /* During this kind of capture, calls that can wait are forbidden in all threads. */
        TRY(cuStreamBeginCapture_v2(captured, 0));
        if (cuMemAllocAsync(&in_graph, piece_bytes, captured) == 0)
            TRY(cuMemFreeAsync(in_graph, captured));
        /* If the call is refused, the capture is invalid afterwards. */
        CUresult made = cuMemAllocFromPoolAsync(&beside, 3 * piece_bytes, pools[1], streams[1]);
        if (made == 0)
            TRY(cuMemFreeAsync(beside, streams[1]));
        CUresult freed = cuMemFreeAsync(old, streams[0]);
        CUresult ended = cuStreamEndCapture(captured, &graph);
        HOLDS(made == 0 || (may_refuse && made == REFUSED));
        HOLDS(freed == 0 || (may_refuse && freed == REFUSED));
        HOLDS(made == 0 && freed == 0 ? ended == 0 && graph != NULL : ended == SPOILT);
        if (freed != 0)
            TRY(cuMemFreeAsync(old, streams[0]));
        TRY(client.cuda.ctx_sync());
    }
    return cuStreamDestroy_v2(captured);
}

static CUresult outlive(void)
{
    CUdeviceptr kept[2] = {0, 0}, freed = 0;
    uint32_t word = 0;
    CUcontext other;
    CUstream stream;
    TRY(cuCtxCreate_v2(&other, 0, client.device));
    TRY(client.cuda.stream_create(&stream, 1));
    for (int i = 0; i < 2; i++) {
        TRY(cuMemAllocAsync(&kept[i], piece_bytes, stream));
        TRY(cuMemsetD32Async(kept[i], 7, piece_bytes / 4, stream));
    }
    TRY(cuMemAllocAsync(&freed, piece_bytes, stream));
    TRY(cuMemFreeAsync(freed, stream));
    TRY(client.cuda.stream_sync(stream));
    TRY(cuCtxDestroy_v2(other));
    TRY(client.cuda.ctx_set(client.context));
    for (int i = 0; i < 2; i++) {
        TRY(client.cuda.copy_out(&word, kept[i] + piece_bytes / 2, sizeof word));
        HOLDS(word == 7);
    }
    TRY(cuMemFreeAsync(kept[0], streams[0]));
    TRY(client.cuda.mem_free(kept[1]));
    HOLDS(cuMemFreeAsync(kept[1], streams[0]) == 1);
    return client.cuda.ctx_sync();
}

/* Allocates pieces until VRAM is full, at most *many. */
static CUresult fill_up(CUdeviceptr *at, size_t *many, size_t bytes)
{
    CUresult result = 0;
    for (*many = 0; *many < MOST && result == 0; *many += result == 0)
        result = allocate(&at[*many], bytes, 1);
    return result == 2 ? 0 : result;
}

static CUresult full(void)
{
    static CUdeviceptr at[MOST];
    size_t many, room = free_bytes(), bytes = (room / 16) & ~(2 * MIB - 1);
    CUdeviceptr address = 0;
    TRY(keep(1, ~0ull));
    for (int turn = 0; turn < 3; turn++) {
        TRY(fill_up(at, &many, bytes));
        HOLDS(many >= 12);
        for (size_t i = 0; i < many; i++)
            TRY(cuMemFreeAsync(at[i], streams[1]));
        TRY(client.cuda.ctx_sync());
        HOLDS(free_bytes() < room / 4);
        /* Each turn requests more memory than is free: without a stream, in another size in a stream, or from the other
         * pool. */
        if (turn == 0) {
            TRY(client.cuda.mem_alloc(&address, bytes * (many / 2)));
            TRY(client.cuda.mem_free(address));
        } else {
            TRY(allocate(&address, bytes * (many / 2), turn - 1));
            TRY(cuMemFreeAsync(address, streams[turn - 1]));
        }
        TRY(client.cuda.ctx_sync());
        TRY(cuMemPoolTrimTo(pools[1], 0));
    }
    TRY(keep(1, 0));
    return client.cuda.ctx_sync();
}

static CUresult hold(int begins)
{
    for (int which = 0; which < 2; which++) {
        TRY(keep(which, begins ? ~0ull : 0));
        for (size_t i = 0; begins && i < pieces / 2; i++) {
            CUdeviceptr address;
            TRY(allocate(&address, 2 * piece_bytes, which));
            TRY(cuMemsetD32Async(address, 0x5a5a5a5a, piece_bytes / 2, streams[which]));
            TRY(cuMemFreeAsync(address, streams[which]));
        }
    }
    return client.cuda.ctx_sync();
}

static CUresult cost(void)
{
    CUdeviceptr address = 0;
    TRY(keep(0, ~0ull));
    for (int i = 0; i < 10000; i++) {
        TRY(allocate(&address, piece_bytes, 0));
        TRY(cuMemFreeAsync(address, streams[0]));
    }
    return 0;
}

static CUresult end(size_t *missing)
{
    for (size_t i = 0; i < pieces; i++)
        TRY(cuMemFreeAsync(parts[i].memory, streams[side(i)]));
    TRY(cuMemPoolDestroy(pools[1]));
    TRY(client.cuda.ctx_sync());
    size_t free_now = free_bytes();
    *missing = free_now < free_before ? free_before - free_now : 0;
    return 0;
}

/* Executes a command. Returns 0 if the program must end. */
static int obey(char *command)
{
    size_t missing = 0;
    CUresult result = -1;
    uint64_t start = now_us();
    failed_line = 0;
    if (strcmp(command, "quit") == 0)
        return 0;
    if (strcmp(command, "verify") == 0)
        result = verify();
    else if (strcmp(command, "touch") == 0)
        result = touch();
    else if (strcmp(command, "streamsync") == 0)
        result = client.cuda.stream_sync(NULL);
    else if (strcmp(command, "churn") == 0)
        result = churn(0);
    else if (strcmp(command, "swap") == 0)
        result = churn(1);
    else if (strcmp(command, "twice") == 0)
        result = twice();
    else if (strcmp(command, "attributes") == 0)
        result = attributes();
    else if (strcmp(command, "threshold") == 0)
        result = threshold();
    else if (strcmp(command, "early") == 0)
        result = early();
    else if (strcmp(command, "capture") == 0)
        result = capture();
    else if (strcmp(command, "outlive") == 0)
        result = outlive();
    else if (strcmp(command, "full") == 0)
        result = full();
    else if (strcmp(command, "hold") == 0)
        result = hold(1);
    else if (strcmp(command, "drop") == 0)
        result = hold(0);
    else if (strcmp(command, "cost") == 0)
        result = cost();
    else if (strcmp(command, "end") == 0)
        result = end(&missing);
    answer(command, result, now_us() - start, "\"ok\":%s,\"line\":%d,\"missing_bytes\":%zu",
           result == 0 && failed_line == 0 ? "true" : "false", failed_line, missing);
    return 1;
}

int main(int argc, char **argv)
{
    size_t mib = 64;
    piece_bytes = 4 << 20;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--mib") == 0)
            mib = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--may-refuse") == 0)
            may_refuse = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--piece-mib") == 0)
            piece_bytes = strtoul(argv[i + 1], NULL, 10) << 20;
    }
    if (cuda_load(&client.cuda) != 0)
        return 3;
#define F(name, parameters) *(void **)&name = cuda_function(#name);
    MORE_FUNCTIONS(F)
#undef F
    CUresult result = client_open(&client, 0);
    answer("open", result, 0, "\"pid\":%d", (int)getpid());
    if (result == 0)
        result = open_pools(mib);
    answer("fill", result, 0, "\"mib\":%zu", mib);
    if (result != 0)
        return 4;
    client_listen(obey);
    return 0;
}
