/* With the argument `files`, tries to change each of the files that the further arguments name, and prints each change that
 * succeeds, then "done". Otherwise lies to the controller about the VRAM that it has and needs, under a VRAM limit. The
 * arguments are then the size of the counters in bytes, the offsets in them of the pending bytes and of the epoch of the last recall, a Hello message in hex,
 * and further messages in hex. Each of several processes registers with counters of its own. It sends the messages without
 * end, writes arbitrary values into both words of the counters, and never keeps a recall. Every second process reads no
 * reply. The program prints "ready" when each reading process got three replies, and never ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define SOCKET "/.affinode/run/agent.sock"
#define PROCESSES 4
#define FRAME_BYTES 128
#define REPLIES 3

static unsigned char frames[64][FRAME_BYTES];
static size_t frame_count, page_bytes, pending_at, epoch_at;

static int dial(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    usleep(10000);
    return -1;
}

static void say_hello(int fd, int page)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {frames[0], FRAME_BYTES};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space,
                            .msg_controllen = sizeof control.space};
    control.header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof page)};
    memcpy(CMSG_DATA(&control.header), &page, sizeof page);
    sendmsg(fd, &header, MSG_NOSIGNAL);
}

/* Values that a count of bytes must not be trusted with. */
static uint64_t any(unsigned *seed)
{
    const uint64_t values[] = {0, 1, UINT64_MAX, UINT64_MAX - 1, 1ull << 63, 1ull << 50, 1ull << 30};
    unsigned at = rand_r(seed) % 8;
    return at < 7 ? values[at] : (uint64_t)rand_r(seed) << 32 | (uint64_t)rand_r(seed);
}

/* Reads what has arrived, and returns the number of whole frames so far. */
static size_t drain(int fd, size_t *bytes)
{
    char told[4096];
    ssize_t got;
    while ((got = recv(fd, told, sizeof told, MSG_DONTWAIT)) > 0)
        *bytes += (size_t)got;
    return *bytes / FRAME_BYTES;
}

static void lie(unsigned seed, int reads, int ready)
{
    int page = memfd_create("affinode-page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(page, (off_t)page_bytes) != 0 || fcntl(page, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        exit(3);
    unsigned char *bytes = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
    memcpy(bytes, "AFNPAGE\0", 8);
    memcpy(bytes + 8, frames[0] + 8, 4);
    uint32_t slots = (uint32_t)((page_bytes - 4096) / 64);
    memcpy(bytes + 12, &slots, 4);
    for (size_t got = 0;;) {
        int fd = dial();
        if (fd < 0)
            continue;
        say_hello(fd, page);
        for (;;) {
            uint64_t pending = any(&seed), epoch = any(&seed);
            memcpy(bytes + pending_at, &pending, sizeof pending);
            memcpy(bytes + epoch_at, &epoch, sizeof epoch);
            unsigned char *frame = frames[1 + rand_r(&seed) % (frame_count - 1)];
            if (send(fd, frame, FRAME_BYTES, MSG_NOSIGNAL) != FRAME_BYTES)
                break;
            if (reads && drain(fd, &got) >= REPLIES && ready >= 0) {
                if (write(ready, "r", 1) != 1)
                    exit(4);
                ready = -1;
            }
        }
        close(fd);
    }
}

static void report(const char *path, const char *change, int failed)
{
    if (!failed)
        printf("%s: %s\n", path, change);
}

static void change(const char *path)
{
    char beside[512], folder[512];
    snprintf(beside, sizeof beside, "%s.new", path);
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    int fd = open(path, O_WRONLY | O_NONBLOCK);
    report(path, "opened for writing", fd < 0);
    report(path, "emptied", truncate(path, 0));
    report(path, "mode changed", chmod(path, 0666));
    report(path, "owner changed", chown(path, 1, 1));
    report(path, "renamed", rename(path, beside));
    report(path, "removed", unlink(path));
    report(path, "created beside it", open(beside, O_WRONLY | O_CREAT, 0600) < 0);
    report(path, "linked", symlink("/etc/passwd", beside));
    report(folder, "remounted for writing", mount(NULL, folder, NULL, MS_REMOUNT | MS_BIND, NULL));
    report(folder, "covered by another mount", mount("none", folder, "tmpfs", 0, NULL));
    report(folder, "unmounted", umount2(folder, MNT_DETACH));
}

int main(int count, char **arguments)
{
    int ready[2];
    if (count > 1 && strcmp(arguments[1], "files") == 0) {
        for (int at = 2; at < count; at++)
            change(arguments[at]);
        puts("done");
        return 0;
    }
    if (count < 6 || count > 68 || pipe(ready) != 0)
        return 2;
    page_bytes = strtoul(arguments[1], NULL, 10);
    pending_at = strtoul(arguments[2], NULL, 10);
    epoch_at = strtoul(arguments[3], NULL, 10);
    for (int at = 4; at < count; at++, frame_count++)
        for (size_t byte = 0; byte < FRAME_BYTES; byte++)
            if (sscanf(arguments[at] + 2 * byte, "%2hhx", &frames[frame_count][byte]) != 1)
                return 2;
    for (unsigned number = 0; number < PROCESSES; number++)
        if (fork() == 0)
            lie(number, number % 2 == 0, ready[1]);
    char got;
    for (int number = 0; number < PROCESSES / 2; number++)
        if (read(ready[0], &got, 1) != 1)
            return 3;
    puts("ready");
    fflush(stdout);
    for (;;)
        pause();
}
