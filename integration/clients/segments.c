/* An application that maps its memory itself, as allocators with growing segments do.
 *
 *   segments [--mib N] [--seed S] [--piece-mib P] [--handle-types T]
 *
 * It maps N MiB (default 64) at consecutive addresses, in pieces of P MiB (default 4), and fills them by seed
 * (default 1). The memory can be exported as handle type T (default 1: a descriptor; 0: it cannot be exported).
 * Then it executes commands from stdin, and replies to each with a line of JSON as in worker.c:
 *
 *   verify, touch, streamsync     as in worker.c
 *   swap            exchanges the memory of the first and the last piece
 *   release         releases all handles while everything is mapped; retain: gets them again by address
 *   alias           maps the second piece a second time, at other addresses; "ok" if both have the same contents
 *   unalias         removes the second mapping
 *   readonly        makes the third piece read-only; writable: makes it writable again
 *   export          exports a descriptor of the fourth piece, and closes it immediately
 *   properties      reads the properties of the second piece; "ok" if it was created with them
 *   replace         unmaps and releases the last piece, and maps a new one with the same contents in its place
 *   end             unmaps and releases everything; "missing_bytes": memory that was free at the start but is not now
 *   quit
 */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MORE_FUNCTIONS(F)                                                                                             \
    F(cuMemAddressReserve,                                                                                            \
      (CUdeviceptr * address, size_t bytes, size_t align, CUdeviceptr hint, unsigned long long flags))                \
    F(cuMemAddressFree, (CUdeviceptr address, size_t bytes))                                                          \
    F(cuMemCreate,                                                                                                    \
      (memory_handle * handle, size_t bytes, const struct allocation_prop *prop, unsigned long long flags))           \
    F(cuMemRelease, (memory_handle handle))                                                                           \
    F(cuMemMap, (CUdeviceptr address, size_t bytes, size_t offset, memory_handle handle, unsigned long long flags))   \
    F(cuMemUnmap, (CUdeviceptr address, size_t bytes))                                                                \
    F(cuMemSetAccess, (CUdeviceptr address, size_t bytes, const struct access *access, size_t count))                 \
    F(cuMemRetainAllocationHandle, (memory_handle * handle, void *address))                                           \
    F(cuMemGetAllocationPropertiesFromHandle, (struct allocation_prop * prop, memory_handle handle))                  \
    F(cuMemExportToShareableHandle, (void *shareable, memory_handle handle, int kind, unsigned long long flags))

#define F(name, parameters) static CUresult(*name) parameters;
MORE_FUNCTIONS(F)
#undef F

#define MOST 4096

static struct client client;
static memory_handle handles[MOST];
static size_t piece_bytes, pieces, free_before;
static unsigned int handle_types = 1;
static CUdeviceptr second_place;

static struct allocation_prop device_memory(void)
{
    struct allocation_prop prop;
    memset(&prop, 0, sizeof prop);
    prop.kind = prop.location.kind = 1;
    prop.handle_types = handle_types;
    prop.location.id = client.device;
    return prop;
}

static CUdeviceptr at(size_t piece)
{
    return client.memory + piece * piece_bytes;
}

static CUresult give_access(CUdeviceptr address, size_t bytes, int flags)
{
    struct access access = {{1, client.device}, flags};
    return cuMemSetAccess(address, bytes, &access, 1);
}

static CUresult create(size_t piece)
{
    struct allocation_prop prop = device_memory();
    TRY(cuMemCreate(&handles[piece], piece_bytes, &prop, 0));
    return cuMemMap(at(piece), piece_bytes, 0, handles[piece], 0);
}

static size_t free_bytes(void)
{
    size_t free = 0, total = 0;
    client.cuda.mem_info(&free, &total);
    return free;
}

static CUresult make(size_t mib)
{
    pieces = (mib << 20) / piece_bytes;
    if (pieces < 4 || pieces > MOST)
        return 1;
    client.words = pieces * piece_bytes / 4;
    free_before = free_bytes();
    TRY(cuMemAddressReserve(&client.memory, pieces * piece_bytes, 0, 0, 0));
    for (size_t i = 0; i < pieces; i++)
        TRY(create(i));
    return give_access(client.memory, pieces * piece_bytes, 3);
}

static CUresult swap(void)
{
    size_t last = pieces - 1;
    memory_handle first = handles[0];
    TRY(client.cuda.ctx_sync());
    TRY(cuMemUnmap(at(0), piece_bytes));
    TRY(cuMemUnmap(at(last), piece_bytes));
    handles[0] = handles[last];
    handles[last] = first;
    TRY(cuMemMap(at(0), piece_bytes, 0, handles[0], 0));
    TRY(cuMemMap(at(last), piece_bytes, 0, handles[last], 0));
    TRY(give_access(at(0), piece_bytes, 3));
    return give_access(at(last), piece_bytes, 3);
}

static CUresult release(void)
{
    for (size_t i = 0; i < pieces; i++)
        TRY(cuMemRelease(handles[i]));
    return 0;
}

static CUresult retain(void)
{
    for (size_t i = 0; i < pieces; i++)
        TRY(cuMemRetainAllocationHandle(&handles[i], (void *)(uintptr_t)(at(i) + 4096)));
    return 0;
}

static CUresult alias(int *ok)
{
    unsigned one = 0, other = 1;
    TRY(cuMemAddressReserve(&second_place, piece_bytes, 0, 0, 0));
    TRY(cuMemMap(second_place, piece_bytes, 0, handles[1], 0));
    TRY(give_access(second_place, piece_bytes, 3));
    TRY(client.cuda.copy_out(&one, at(1) + piece_bytes - 4, 4));
    TRY(client.cuda.copy_out(&other, second_place + piece_bytes - 4, 4));
    *ok = one == other;
    return 0;
}

static CUresult unalias(void)
{
    TRY(cuMemUnmap(second_place, piece_bytes));
    return cuMemAddressFree(second_place, piece_bytes);
}

static CUresult export(void)
{
    int fd = -1;
    TRY(cuMemExportToShareableHandle(&fd, handles[3], 1, 0));
    return close(fd);
}

static CUresult properties(int *ok)
{
    struct allocation_prop made = device_memory(), prop;
    memset(&prop, 0xff, sizeof prop);
    TRY(cuMemGetAllocationPropertiesFromHandle(&prop, handles[1]));
    *ok = prop.kind == made.kind && prop.handle_types == made.handle_types && prop.location.kind == made.location.kind &&
          prop.location.id == made.location.id;
    return 0;
}

static CUresult replace(void)
{
    size_t last = pieces - 1;
    void *content = malloc(piece_bytes);
    if (content == NULL)
        return 2;
    TRY(client.cuda.copy_out(content, at(last), piece_bytes));
    TRY(cuMemUnmap(at(last), piece_bytes));
    TRY(cuMemRelease(handles[last]));
    TRY(create(last));
    TRY(give_access(at(last), piece_bytes, 3));
    TRY(client.cuda.copy_in(at(last), content, piece_bytes));
    free(content);
    return 0;
}

static CUresult end(size_t *missing)
{
    TRY(client.cuda.ctx_sync());
    TRY(cuMemUnmap(client.memory, pieces * piece_bytes));
    TRY(release());
    TRY(cuMemAddressFree(client.memory, pieces * piece_bytes));
    size_t free_now = free_bytes();
    *missing = free_now < free_before ? free_before - free_now : 0;
    return 0;
}

static CUresult verify(int *ok)
{
    uint64_t wrong = 0, checksum = 0;
    TRY(client_verify(&client, &wrong, &checksum));
    *ok = wrong == 0;
    return 0;
}

/* Executes a command. Returns 0 if the program must end. */
static int obey(char *command)
{
    int ok = 1;
    size_t missing = 0;
    CUresult result = -1;
    uint64_t start = now_us();
    if (strcmp(command, "quit") == 0)
        return 0;
    if (strcmp(command, "verify") == 0)
        result = verify(&ok);
    else if (strcmp(command, "touch") == 0)
        result = client_touch(&client);
    else if (strcmp(command, "streamsync") == 0)
        result = client.cuda.stream_sync(NULL);
    else if (strcmp(command, "swap") == 0)
        result = swap();
    else if (strcmp(command, "release") == 0)
        result = release();
    else if (strcmp(command, "retain") == 0)
        result = retain();
    else if (strcmp(command, "alias") == 0)
        result = alias(&ok);
    else if (strcmp(command, "unalias") == 0)
        result = unalias();
    else if (strcmp(command, "readonly") == 0)
        result = give_access(at(2), piece_bytes, 1);
    else if (strcmp(command, "writable") == 0)
        result = give_access(at(2), piece_bytes, 3);
    else if (strcmp(command, "export") == 0)
        result = export();
    else if (strcmp(command, "properties") == 0)
        result = properties(&ok);
    else if (strcmp(command, "replace") == 0)
        result = replace();
    else if (strcmp(command, "end") == 0)
        result = end(&missing);
    answer(command, result, now_us() - start, "\"ok\":%s,\"missing_bytes\":%zu", ok ? "true" : "false", missing);
    return 1;
}

int main(int argc, char **argv)
{
    size_t mib = 64;
    uint32_t seed = 1;
    piece_bytes = 4 << 20;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--mib") == 0)
            mib = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--piece-mib") == 0)
            piece_bytes = strtoul(argv[i + 1], NULL, 10) << 20;
        else if (strcmp(argv[i], "--handle-types") == 0)
            handle_types = (unsigned int)strtoul(argv[i + 1], NULL, 10);
    }
    if (cuda_load(&client.cuda) != 0)
        return 3;
#define F(name, parameters) *(void **)&name = cuda_function(#name);
    MORE_FUNCTIONS(F)
#undef F
    CUresult result = client_open(&client, 0);
    answer("open", result, 0, "\"pid\":%d", (int)getpid());
    if (result == 0)
        result = make(mib);
    if (result == 0)
        result = client_write(&client, seed);
    answer("fill", result, 0, "\"mib\":%zu", mib);
    if (result != 0)
        return 4;
    client_listen(obey);
    return 0;
}
