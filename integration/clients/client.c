#include "client.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Kernels for a real GPU, in any launch configuration. The simulated GPU recognises them by their names. */
static const char PTX[] =
    ".version 6.4\n"
    ".target sm_70\n"
    ".address_size 64\n"
#define INDEX                                                                                                         \
    "  ld.param.u64 %rd1, [p0];\n"                                                                                    \
    "  cvta.to.global.u64 %rd1, %rd1;\n"                                                                              \
    "  ld.param.u64 %rd2, [p1];\n"                                                                                    \
    "  ld.param.u32 %r1, [p2];\n"                                                                                     \
    "  mov.u32 %r2, %ctaid.x;\n"                                                                                      \
    "  mov.u32 %r3, %ntid.x;\n"                                                                                       \
    "  mov.u32 %r4, %tid.x;\n"                                                                                        \
    "  mov.u32 %r5, %nctaid.x;\n"                                                                                     \
    "  mul.wide.u32 %rd3, %r2, %r3;\n"                                                                                \
    "  cvt.u64.u32 %rd4, %r4;\n"                                                                                      \
    "  add.u64 %rd3, %rd3, %rd4;\n"                                                                                   \
    "  mul.wide.u32 %rd5, %r5, %r3;\n"                                                                                \
    "LOOP:\n"                                                                                                         \
    "  setp.ge.u64 %p1, %rd3, %rd2;\n"                                                                                \
    "  @%p1 bra DONE;\n"                                                                                              \
    "  shl.b64 %rd6, %rd3, 2;\n"                                                                                      \
    "  add.u64 %rd6, %rd1, %rd6;\n"
#define NEXT                                                                                                          \
    "  add.u64 %rd3, %rd3, %rd5;\n"                                                                                   \
    "  bra LOOP;\n"                                                                                                   \
    "DONE:\n"                                                                                                         \
    "  ret;\n"                                                                                                        \
    "}\n"
#define REGISTERS "{\n  .reg .pred %p<2>;\n  .reg .b32 %r<8>;\n  .reg .b64 %rd<10>;\n"
/* Computes pattern() of the seed in r1 and the index in rd3, and stores it in r6. */
#define PATTERN                                                                                                       \
    "  add.u64 %rd7, %rd3, 1;\n"                                                                                      \
    "  mul.lo.u64 %rd7, %rd7, 0x9e3779b97f4a7c15;\n"                                                                  \
    "  cvt.u64.u32 %rd8, %r1;\n"                                                                                      \
    "  add.u64 %rd7, %rd7, %rd8;\n"                                                                                   \
    "  shr.u64 %rd8, %rd7, 30;\n"                                                                                     \
    "  xor.b64 %rd7, %rd7, %rd8;\n"                                                                                   \
    "  mul.lo.u64 %rd7, %rd7, 0xbf58476d1ce4e5b9;\n"                                                                  \
    "  shr.u64 %rd8, %rd7, 27;\n"                                                                                     \
    "  xor.b64 %rd7, %rd7, %rd8;\n"                                                                                   \
    "  shr.u64 %rd7, %rd7, 16;\n"                                                                                     \
    "  cvt.u32.u64 %r6, %rd7;\n"
    ".visible .entry fill_u32(.param .u64 p0, .param .u64 p1, .param .u32 p2)\n"
    REGISTERS INDEX
    "  st.global.u32 [%rd6], %r1;\n"
    NEXT
    ".visible .entry add_u32(.param .u64 p0, .param .u64 p1, .param .u32 p2)\n"
    REGISTERS INDEX
    "  ld.global.u32 %r6, [%rd6];\n"
    "  add.u32 %r6, %r6, %r1;\n"
    "  st.global.u32 [%rd6], %r6;\n"
    NEXT
    ".visible .entry spin_ms(.param .u32 p0)\n"
    REGISTERS
    "  ld.param.u32 %r1, [p0];\n"
    "  mul.wide.u32 %rd1, %r1, 1000000;\n"
    "  mov.u64 %rd2, %globaltimer;\n"
    "  add.u64 %rd1, %rd1, %rd2;\n"
    "LOOP:\n"
    "  mov.u64 %rd2, %globaltimer;\n"
    "  setp.lt.u64 %p1, %rd2, %rd1;\n"
    "  @%p1 bra LOOP;\n"
    "  ret;\n"
    "}\n"
    ".visible .entry pattern_u32(.param .u64 p0, .param .u64 p1, .param .u32 p2)\n"
    REGISTERS INDEX PATTERN
    "  st.global.u32 [%rd6], %r6;\n"
    NEXT
    ".visible .entry check_u32(.param .u64 p0, .param .u64 p1, .param .u32 p2, .param .u32 p3, .param .u32 p4,\n"
    "  .param .u64 p5)\n"
    REGISTERS INDEX PATTERN
    "  ld.param.u32 %r7, [p3];\n"
    "  mul.lo.u32 %r6, %r6, %r7;\n"
    "  ld.param.u32 %r7, [p4];\n"
    "  add.u32 %r6, %r6, %r7;\n"
    "  ld.global.u32 %r7, [%rd6];\n"
    "  setp.eq.u32 %p1, %r6, %r7;\n"
    "  @%p1 bra RIGHT;\n"
    "  ld.param.u64 %rd9, [p5];\n"
    "  cvta.to.global.u64 %rd9, %rd9;\n"
    "  red.global.add.u64 [%rd9], 1;\n"
    "RIGHT:\n"
    NEXT;

#define CHUNK_WORDS (1u << 20)

static uint32_t pattern(uint32_t seed, uint64_t index)
{
    uint64_t x = (index + 1) * 0x9e3779b97f4a7c15u + seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    return (uint32_t)((x ^ (x >> 27)) >> 16);
}

CUresult client_open(struct client *client, int ordinal)
{
    struct cuda *cuda = &client->cuda;
    TRY(cuda->init(0));
    TRY(cuda->device_get(&client->device, ordinal));
    TRY(cuda->primary_retain(&client->context, client->device));
    TRY(cuda->ctx_set(client->context));
    TRY(cuda->module_load(&client->module, PTX));
    TRY(cuda->module_function(&client->fill, client->module, "fill_u32"));
    TRY(cuda->module_function(&client->add, client->module, "add_u32"));
    TRY(cuda->module_function(&client->pattern, client->module, "pattern_u32"));
    TRY(cuda->module_function(&client->check, client->module, "check_u32"));
    return cuda->module_function(&client->spin, client->module, "spin_ms");
}

CUresult client_fill(struct client *client, size_t mib, uint32_t seed)
{
    client->words = mib << 18;
    TRY(client->cuda.mem_alloc(&client->memory, client->words * 4));
    return client_write(client, seed);
}

CUresult client_write(struct client *client, uint32_t seed)
{
    uint32_t *chunk = malloc(CHUNK_WORDS * sizeof *chunk);
    if (chunk == NULL)
        return 2;
    client->seed = seed;
    client->touches = 0;
    CUresult result = 0;
    for (size_t at = 0; result == 0 && at < client->words; at += CHUNK_WORDS) {
        size_t count = client->words - at < CHUNK_WORDS ? client->words - at : CHUNK_WORDS;
        for (size_t i = 0; i < count; i++)
            chunk[i] = pattern(seed, at + i);
        result = client->cuda.copy_in(client->memory + at * 4, chunk, count * 4);
    }
    free(chunk);
    return result;
}

CUresult client_pattern(struct client *client, CUdeviceptr at, size_t words, uint32_t seed)
{
    uint64_t address = at, count = words;
    void *parameters[] = {&address, &count, &seed};
    return client->cuda.launch(client->pattern, 128, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
}

CUresult client_check(struct client *client, CUdeviceptr at, size_t words, struct content content, uint64_t *wrong)
{
    /* The kernel counts wrong words in the memory's last two words, so it needs no further memory. The host compares
     * these two words. */
    uint64_t address = at, count = words - 2, counter = at + count * 4, counted = 0;
    uint32_t last[2];
    void *parameters[] = {&address, &count, &content.seed, &content.scale, &content.add, &counter};
    TRY(client->cuda.copy_out(last, counter, sizeof last));
    for (int i = 0; i < 2; i++)
        *wrong += last[i] != pattern(content.seed, count + i) * content.scale + content.add;
    TRY(client->cuda.copy_in(counter, &counted, sizeof counted));
    TRY(client->cuda.launch(client->check, 128, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL));
    TRY(client->cuda.copy_out(&counted, counter, sizeof counted));
    *wrong += counted;
    return client->cuda.copy_in(counter, last, sizeof last);
}

CUresult client_touch(struct client *client)
{
    uint64_t address = client->memory, count = client->words;
    uint32_t increment = 1;
    void *parameters[] = {&address, &count, &increment};
    CUresult result = client->cuda.launch(client->add, 128, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
    if (result == 0)
        client->touches++;
    return result;
}

CUresult client_spin(struct client *client, unsigned ms)
{
    void *parameters[] = {&ms};
    return client->cuda.launch(client->spin, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
}

CUresult client_verify(struct client *client, uint64_t *wrong, uint64_t *checksum)
{
    uint32_t *chunk = malloc(CHUNK_WORDS * sizeof *chunk);
    if (chunk == NULL)
        return 2;
    *wrong = 0;
    *checksum = 0xcbf29ce484222325u;
    CUresult result = 0;
    for (size_t at = 0; result == 0 && at < client->words; at += CHUNK_WORDS) {
        size_t count = client->words - at < CHUNK_WORDS ? client->words - at : CHUNK_WORDS;
        result = client->cuda.copy_out(chunk, client->memory + at * 4, count * 4);
        for (size_t i = 0; result == 0 && i < count; i++) {
            *wrong += chunk[i] != pattern(client->seed, at + i) + client->touches;
            *checksum = (*checksum ^ chunk[i]) * 0x100000001b3u;
        }
    }
    free(chunk);
    return result;
}

void client_listen(int (*obey)(char *command))
{
    static char line[512];
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\r\n")] = 0;
        if (!obey(line))
            break;
    }
}

uint64_t now_us(void)
{
    return now_ns() / 1000;
}

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void sleep_ms(unsigned ms)
{
    struct timespec left = {ms / 1000, (ms % 1000) * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

void answer(const char *command, CUresult result, uint64_t elapsed_us, const char *more, ...)
{
    char line[1024], rest[768];
    va_list arguments;
    va_start(arguments, more);
    vsnprintf(rest, sizeof rest, more, arguments);
    va_end(arguments);
    int length = snprintf(line, sizeof line, "{\"command\":\"%s\",\"result\":%d,\"elapsed_us\":%llu,\"at_us\":%llu%s%s}\n",
                          command, result, (unsigned long long)elapsed_us, (unsigned long long)now_us(),
                          rest[0] ? "," : "", rest);
    /* A line is written with one call, so that lines of threads and forked children are not mixed. */
    for (int at = 0; at < length;) {
        ssize_t written = write(STDOUT_FILENO, line + at, length - at);
        if (written < 0 && errno != EINTR)
            return;
        at += written > 0 ? written : 0;
    }
}
