/* Many threads that use the GPU at the same time.
 *
 *   threads [--threads N] [--mib M] [--rounds R] [--period-ms P]
 *
 * Each of N threads (default 8) fills M MiB (default 4) by its own seed. Then it runs R rounds (default 10; 0: without
 * end). In each round it sleeps P ms (default 0), adds 1 to every word, synchronises, verifies, and prints a line of
 * JSON. Exit status 0 if every word was correct in every round. */
#include "client.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct client shared;
static unsigned thread_count = 8, mib = 4, rounds = 10, period_ms;

static void *work(void *argument)
{
    struct client client = shared;
    uintptr_t number = (uintptr_t)argument;
    uint64_t start = now_us(), wrong = 0, checksum = 0;
    CUresult result = client.cuda.ctx_set(client.context);
    if (result == 0)
        result = client_fill(&client, mib, (uint32_t)number + 1);
    answer("fill", result, now_us() - start, "\"thread\":%d", (int)number);
    for (unsigned round = 0; result == 0 && wrong == 0 && (rounds == 0 || round < rounds); round++) {
        sleep_ms(period_ms);
        start = now_us();
        result = client_touch(&client);
        if (result == 0)
            result = client.cuda.ctx_sync();
        if (result == 0)
            result = client_verify(&client, &wrong, &checksum);
        answer("round", result, now_us() - start, "\"thread\":%d,\"round\":%u,\"ok\":%s", (int)number, round,
               result == 0 && wrong == 0 ? "true" : "false");
    }
    return result == 0 && wrong == 0 ? NULL : &shared;
}

int main(int argc, char **argv)
{
    pthread_t threads[256];
    int failed = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        unsigned value = (unsigned)strtoul(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--threads") == 0)
            thread_count = value < 256 ? value : 256;
        else if (strcmp(argv[i], "--mib") == 0)
            mib = value;
        else if (strcmp(argv[i], "--rounds") == 0)
            rounds = value;
        else if (strcmp(argv[i], "--period-ms") == 0)
            period_ms = value;
        else {
            fprintf(stderr, "threads: unknown option %s; see the head of threads.c\n", argv[i]);
            return 2;
        }
    }
    if (cuda_load(&shared.cuda) != 0)
        return 3;
    CUresult result = client_open(&shared, 0);
    answer("open", result, 0, "\"threads\":%u", thread_count);
    if (result != 0)
        return 4;
    for (uintptr_t i = 0; i < thread_count; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)i) != 0)
            return 3;
    for (unsigned i = 0; i < thread_count; i++) {
        void *outcome;
        pthread_join(threads[i], &outcome);
        failed |= outcome != NULL;
    }
    answer("done", 0, 0, "\"ok\":%s", failed ? "false" : "true");
    return failed;
}
