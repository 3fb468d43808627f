/* Measures the cost of driver calls, for a few functions that return immediately.
 *
 * In each round, one loop makes many calls between two readings of the clock. Prints a line of
 * JSON per function: the median over rounds, in nanoseconds per call. Run this program with and
 * without the preload library. The difference is the library's cost.
 *
 *   call_cost loop SECONDS   a typical program's loop, for SECONDS: steps of 20 launches, 20
 *                            queries and a synchronisation; the median of the steps */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 31
#define CALLS 100000

static int compare(const void *a, const void *b)
{
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

static void report(const char *call, double *rounds)
{
    qsort(rounds, ROUNDS, sizeof *rounds, compare);
    printf("{\"call\":\"%s\",\"ns_median\":%.3f,\"ns_min\":%.3f,\"ns_max\":%.3f}\n", call, rounds[ROUNDS / 2], rounds[0],
           rounds[ROUNDS - 1]);
}

#define MEASURE(name, expression)                                                                                     \
    do {                                                                                                              \
        double rounds[ROUNDS];                                                                                        \
        for (int round = -1; round < ROUNDS; round++) {                                                               \
            double start = now_ns();                                                                                  \
            for (int call = 0; call < CALLS; call++)                                                                  \
                expression;                                                                                           \
            if (round >= 0)                                                                                           \
                rounds[round] = (now_ns() - start) / CALLS;                                                           \
        }                                                                                                             \
        report(name, rounds);                                                                                         \
    } while (0)

#define STEPS 1000000

static int loop(struct client *client, double seconds)
{
    double *steps = malloc(STEPS * sizeof *steps), end = now_ns() + seconds * 1e9;
    size_t count = 0;
    if (!steps || client_fill(client, 1, 1) != 0)
        return 1;
    while (count < STEPS && now_ns() < end) {
        double start = now_ns();
        for (int call = 0; call < 20; call++)
            if (client_touch(client) != 0 || client->cuda.stream_query(NULL) == 1)
                return 1;
        if (client->cuda.stream_sync(NULL) != 0)
            return 1;
        steps[count++] = now_ns() - start;
    }
    qsort(steps, count, sizeof *steps, compare);
    printf("{\"call\":\"loop\",\"ns_median\":%.3f,\"ns_min\":%.3f,\"ns_max\":%.3f}\n", steps[count / 2], steps[0],
           steps[count - 1]);
    return 0;
}

int main(int argc, char **argv)
{
    static struct client client;
    CUstream stream;
    CUevent event;
    if (cuda_load(&client.cuda) != 0 || client_open(&client, 0) != 0 || client.cuda.stream_create(&stream, 0) != 0 ||
        client.cuda.event_create(&event, 0) != 0 || client.cuda.event_record(event, stream) != 0 ||
        client.cuda.ctx_sync() != 0)
        return 1;
    if (argc == 3 && strcmp(argv[1], "loop") == 0)
        return loop(&client, atof(argv[2]));
    MEASURE("cuStreamQuery", client.cuda.stream_query(stream));
    MEASURE("cuEventQuery", client.cuda.event_query(event));
    return 0;
}
