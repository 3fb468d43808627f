/* Looks up the driver and forks. The child is the worker: fork_then_use [options of worker.c]
 *
 * Servers with worker processes do the same. The parent makes one call that needs no GPU, waits for the child, and ends
 * with the child's exit status. */
#include "client.h"

#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int worker_main(int argc, char **argv);

int main(int argc, char **argv)
{
    struct cuda cuda;
    int version = 0, status = 0;
    if (cuda_load(&cuda) != 0 || cuda.driver_version(&version) != 0)
        return 3;
    answer("parent", 0, 0, "\"pid\":%d,\"driver_version\":%d", (int)getpid(), version);
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        return 3;
    }
    if (child == 0)
        return worker_main(argc, argv);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
