/* A CUDA program that overwrites every page that it shares with other processes, as a hostile
 * container can do with the preload library's page of counters. It does so after it has
 * registered, and then continues to make calls. It prints "ready" before it overwrites the pages,
 * and "scribbled" afterwards. */
#include "client.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(void)
{
    static struct client client;
    char line[512];
    int pages = 0;
    if (cuda_load(&client.cuda) != 0 || client_open(&client, 0) != 0 || client_fill(&client, 16, 1) != 0)
        return 1;
    answer("ready", 0, 0, "\"pid\":%d", (int)getpid());
    if (fgets(line, sizeof line, stdin) == NULL)
        return 1;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        unsigned long from, to;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3 && strstr(line, "memfd:affinode-page") != NULL &&
            strcmp(rights, "rw-s") == 0) {
            memset((void *)from, 0xff, to - from);
            pages++;
        }
    }
    answer("scribbled", 0, 0, "\"pages\":%d", pages);
    for (;;) {
        client_touch(&client);
        sleep_ms(10);
    }
}
