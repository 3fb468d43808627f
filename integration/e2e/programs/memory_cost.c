/* Measures the cost of memory for a container's program. Prints a line of JSON per figure.
 *
 *   N MiB     time of one cuMemAlloc and cuMemFree of N MiB, in microseconds, the median of many pairs: with nothing
 *             else allocated, and "beside others", while 500 allocations of 2 MiB exist
 *
 * "memory_cost copy" measures copies from pinned host memory to the device, and back:
 *
 *   in, out   bytes per second, the median of several copies
 *
 * "memory_cost large N" measures a copy of N MiB of host memory to the device:
 *
 *   large     bytes per second, the median of several copies
 *
 * "memory_cost many N" measures N pairs of a cuMemAlloc and a cuMemFree of 2 MiB, in microseconds:
 *
 *   median, mean   of one pair
 *
 * Run this program with and without the preload library. The difference is the library's cost. */
#include "client.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAIRS 101
#define COPY_BYTES ((size_t)1 << 30)
#define COPIES 5
#define MORE 500

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int pairs(struct cuda *cuda, size_t mib, int more)
{
    uint64_t took_ns[PAIRS];
    for (int i = -3; i < PAIRS; i++) {
        CUdeviceptr address;
        uint64_t start = now_ns();
        if (cuda->mem_alloc(&address, mib << 20) != 0 || cuda->mem_free(address) != 0)
            return 1;
        if (i >= 0)
            took_ns[i] = now_ns() - start;
    }
    qsort(took_ns, PAIRS, sizeof took_ns[0], compare);
    printf("{\"what\":\"%zu MiB%s\",\"value\":%.1f}\n", mib, more == 0 ? "" : " beside others",
           (double)took_ns[PAIRS / 2] / 1e3);
    return 0;
}

static int many(struct cuda *cuda, size_t count)
{
    uint64_t *took_ns = malloc(count * sizeof *took_ns), sum_ns = 0;
    if (!took_ns || count == 0)
        return 1;
    for (size_t i = 0; i < count; i++) {
        CUdeviceptr address;
        uint64_t start = now_ns();
        if (cuda->mem_alloc(&address, 2 << 20) != 0 || cuda->mem_free(address) != 0)
            return 1;
        took_ns[i] = now_ns() - start;
        sum_ns += took_ns[i];
    }
    qsort(took_ns, count, sizeof took_ns[0], compare);
    printf("{\"what\":\"median\",\"value\":%.3f}\n{\"what\":\"mean\",\"value\":%.3f}\n",
           (double)took_ns[count / 2] / 1e3, (double)sum_ns / 1e3 / (double)count);
    free(took_ns);
    return 0;
}

static int copies(struct cuda *cuda)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CUresult (*host_alloc)(void **, size_t) = (CUresult(*)(void **, size_t))dlsym(library, "cuMemAllocHost_v2");
    uint64_t took[2][COPIES];
    void *host = NULL;
    CUdeviceptr device;
    if (host_alloc == NULL || host_alloc(&host, COPY_BYTES) != 0 || cuda->mem_alloc(&device, COPY_BYTES) != 0)
        return 1;
    for (int i = -1; i < COPIES; i++)
        for (int out = 0; out < 2; out++) {
            uint64_t start = now_us();
            if ((out ? cuda->copy_out(host, device, COPY_BYTES) : cuda->copy_in(device, host, COPY_BYTES)) != 0)
                return 1;
            if (i >= 0)
                took[out][i] = now_us() - start;
        }
    for (int out = 0; out < 2; out++) {
        qsort(took[out], COPIES, sizeof took[out][0], compare);
        printf("{\"what\":\"%s\",\"value\":%.0f}\n", out ? "out" : "in",
               (double)COPY_BYTES * 1e6 / (double)(took[out][COPIES / 2] + 1));
    }
    return 0;
}

/* Measures copies of `mib` MiB of host memory to the device. The memory is on huge pages, if they are available. */
static int large(struct cuda *cuda, size_t mib)
{
    enum { PIECE = 128 << 20 };
    CUresult (*pin)(void *, size_t, unsigned) = cuda_function("cuMemHostRegister_v2");
    CUresult (*copy_in)(CUdeviceptr, const void *, size_t, CUstream) = cuda_function("cuMemcpyHtoDAsync_v2");
    size_t bytes = mib << 20;
    uint64_t took[COPIES];
    CUdeviceptr device;
    char *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes % PIECE != 0 || host == MAP_FAILED)
        return 1;
    madvise(host, bytes, MADV_HUGEPAGE);
    for (size_t done = 0; done < bytes; done += 4096)
        host[done] = 1;
    for (size_t done = 0; done < bytes; done += PIECE)
        if (pin(host + done, PIECE, 0) != 0)
            return 1;
    if (cuda->mem_alloc(&device, bytes) != 0)
        return 1;
    for (int i = -1; i < COPIES; i++) {
        uint64_t start = now_us();
        for (size_t done = 0; done < bytes; done += PIECE)
            if (copy_in(device + done, host + done, PIECE, NULL) != 0)
                return 1;
        if (cuda->ctx_sync() != 0)
            return 1;
        if (i >= 0)
            took[i] = now_us() - start;
    }
    qsort(took, COPIES, sizeof took[0], compare);
    printf("{\"what\":\"large\",\"value\":%.0f}\n", (double)bytes * 1e6 / (double)(took[COPIES / 2] + 1));
    return 0;
}

int main(int argc, char **argv)
{
    static struct client client;
    static const size_t sizes[] = {2, 16, 128, 1024};
    if (cuda_load(&client.cuda) != 0 || client_open(&client, 0) != 0)
        return 1;
    if (argc == 3 && strcmp(argv[1], "large") == 0)
        return large(&client.cuda, strtoull(argv[2], NULL, 10)) == 0 ? 0 : 4;
    if (argc == 3 && strcmp(argv[1], "many") == 0)
        return many(&client.cuda, strtoull(argv[2], NULL, 10)) == 0 ? 0 : 5;
    if (argc == 2 && strcmp(argv[1], "copy") == 0)
        return copies(&client.cuda) == 0 ? 0 : 3;
    for (int more = 0; more <= MORE; more += MORE) {
        for (int i = 0; i < more; i++) {
            CUdeviceptr stays;
            if (client.cuda.mem_alloc(&stays, 2 << 20) != 0)
                return 2;
        }
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            if (pairs(&client.cuda, sizes[i], more) != 0)
                return 2;
    }
    return 0;
}
