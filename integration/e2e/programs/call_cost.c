/* The cost of a call of the driver, for a few that it answers at once.
 *
 * Method: rounds of many calls in one loop between two readings of the clock; a line of
 * JSON per function: the median over rounds, in nanoseconds per call. Run it with and
 * without the preload library: the difference is the library's. */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ROUNDS 31
#define CALLS 100000

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

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

int main(void)
{
    static struct client client;
    CUstream stream;
    CUevent event;
    if (cuda_load(&client.cuda) != 0 || client_open(&client, 0) != 0 || client.cuda.stream_create(&stream, 0) != 0 ||
        client.cuda.event_create(&event, 0) != 0 || client.cuda.event_record(event, stream) != 0 ||
        client.cuda.ctx_sync() != 0)
        return 1;
    MEASURE("cuStreamQuery", client.cuda.stream_query(stream));
    MEASURE("cuEventQuery", client.cuda.event_query(event));
    return 0;
}
