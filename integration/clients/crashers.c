/* Makes one of the five calls that end an application while its context is checkpointed, unless Affinode's gate holds
 * the call.
 *
 *   crashers ctx-sync|stream-sync|stream-query|event-query|event-sync [MIB]
 *
 * It fills MIB (default 64) of memory and prints a line. For each line on stdin, it makes the call and verifies its
 * memory. It ends when stdin ends. */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct client client;
    CUstream stream;
    CUevent event;
    char line[64];
    memset(&client, 0, sizeof client);
    const char *names[] = {"ctx-sync", "stream-sync", "stream-query", "event-query", "event-sync"};
    int call = 0;
    while (call < 5 && (argc < 2 || strcmp(argv[1], names[call]) != 0))
        call++;
    if (call == 5) {
        fprintf(stderr, "usage: crashers ctx-sync|stream-sync|stream-query|event-query|event-sync [MIB]\n");
        return 2;
    }
    if (cuda_load(&client.cuda) != 0)
        return 3;
    CUresult result = client_open(&client, 0);
    if (result == 0)
        result = client_fill(&client, argc > 2 ? strtoul(argv[2], NULL, 10) : 64, 1);
    if (result == 0)
        result = client.cuda.stream_create(&stream, 0);
    if (result == 0)
        result = client.cuda.event_create(&event, 0);
    if (result == 0)
        result = client.cuda.event_record(event, stream);
    if (result == 0)
        result = client.cuda.ctx_sync();
    answer("ready", result, 0, "\"pid\":%d", (int)getpid());
    if (result != 0)
        return 4;
    while (fgets(line, sizeof line, stdin) != NULL) {
        uint64_t wrong = 0, checksum = 0, start = now_us();
        switch (call) {
        case 0: result = client.cuda.ctx_sync(); break;
        case 1: result = client.cuda.stream_sync(stream); break;
        case 2: result = client.cuda.stream_query(stream); break;
        case 3: result = client.cuda.event_query(event); break;
        default: result = client.cuda.event_sync(event); break;
        }
        uint64_t elapsed = now_us() - start;
        CUresult verified = client_verify(&client, &wrong, &checksum);
        answer(names[call], result, elapsed, "\"ok\":%s,\"wrong\":%llu", verified == 0 && wrong == 0 ? "true" : "false",
               (unsigned long long)wrong);
    }
    return 0;
}
