/* Makes all attacks that a hostile container can make on its agent socket, at the same time: valid registrations with
 * faked counters, endless messages whose replies are not read, meaningless bytes, wrong descriptors, and more
 * connections than the controller accepts. The arguments are a Hello message in hex, any other message in hex, and the
 * size of the counters in bytes. The program prints "ready" and never ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define SOCKET "/.affinode/run/agent.sock"
#define TALKERS 16
/* Number of threads that only hold connections. They connect before all other threads. The controller accepts 512
 * connections at once and then 50 a second, from a backlog of thousands. The connections that the thread `noise` opens
 * and closes fill this backlog for more than a minute. */
#define HOLDERS 12
#define HELD_BY_EACH 75

static unsigned char hello[4096], message[4096];
static size_t hello_bytes, message_bytes, page_bytes;
static atomic_int holding;

static size_t from_hex(const char *text, unsigned char *to)
{
    size_t count = 0;
    unsigned byte;
    while (count < 4096 && sscanf(text + 2 * count, "%2x", &byte) == 1)
        to[count++] = (unsigned char)byte;
    return count;
}

static int dial(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        usleep(10000);
        return -1;
    }
    return fd;
}

static void say_hello(int fd, int page)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {hello, hello_bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space,
                            .msg_controllen = sizeof control.space};
    control.header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof page)};
    memcpy(CMSG_DATA(&control.header), &page, sizeof page);
    sendmsg(fd, &header, MSG_NOSIGNAL);
}

/* Registers with a page of counters that begins like the library's own page and then contains random values. */
static void *talk(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    int page = memfd_create("affinode-page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(page, (off_t)page_bytes) != 0 || fcntl(page, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return NULL;
    unsigned char *bytes = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
    /* Magic word, version and number of slots, as in the library's own page of counters. */
    memcpy(bytes, "AFNPAGE\0", 8);
    memcpy(bytes + 8, hello + 8, 4);
    uint32_t slots = (uint32_t)((page_bytes - 4096) / 64);
    memcpy(bytes + 12, &slots, 4);
    for (;;) {
        int fd = dial();
        if (fd < 0)
            continue;
        say_hello(fd, seed % 4 == 3 ? fd : page);
        while (send(fd, message, message_bytes, MSG_NOSIGNAL) == (ssize_t)message_bytes)
            for (int word = 0; word < 64; word++)
                *(uint32_t *)(bytes + 128 + rand_r(&seed) % (page_bytes - 136) / 4 * 4) = (uint32_t)rand_r(&seed);
        close(fd);
    }
}

static void *noise(void *argument)
{
    unsigned char rubbish[64 * 1024];
    memset(rubbish, 0xab, sizeof rubbish);
    for (;;) {
        int fd = dial();
        if (fd < 0)
            continue;
        send(fd, rubbish, sizeof rubbish, MSG_NOSIGNAL);
        close(fd);
    }
    return argument;
}

/* Holds as many connections as possible and sends nothing. Opens a new connection only when a held one is closed. */
static void *hold(void *argument)
{
    int held[HELD_BY_EACH];
    char told[256];
    for (size_t next = 0; next < HELD_BY_EACH; next++)
        held[next] = dial();
    atomic_fetch_add(&holding, 1);
    for (size_t next = 0;; next = (next + 1) % HELD_BY_EACH) {
        while (recv(held[next], told, sizeof told, 0) > 0)
            continue;
        close(held[next]);
        held[next] = dial();
    }
    return argument;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    hello_bytes = from_hex(arguments[1], hello);
    message_bytes = from_hex(arguments[2], message);
    page_bytes = strtoul(arguments[3], NULL, 10);
    pthread_t thread;
    for (int number = 0; number < HOLDERS; number++)
        pthread_create(&thread, NULL, hold, NULL);
    while (atomic_load(&holding) < HOLDERS)
        usleep(1000);
    for (uintptr_t number = 0; number < TALKERS; number++)
        pthread_create(&thread, NULL, talk, (void *)number);
    pthread_create(&thread, NULL, noise, NULL);
    puts("ready");
    fflush(stdout);
    for (;;)
        pause();
}
