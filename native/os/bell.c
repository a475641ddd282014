#include "os/bell.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "commlayer.h"

enum {
    DRAINED_MOST = 64 /* datagrams of a turn */,
    RING_BYTES = sizeof(uint64_t) + 1 /* the key; whether it is a request */
};

static const socklen_t ADDRESS_BYTES = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + CL_BELL_BYTES);

static struct sockaddr_un address_of(const char name[CL_BELL_BYTES])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, name, CL_BELL_BYTES - 1); /* leading NUL: abstract, vanishes with its socket */
    return address;
}

/* How many datagrams a queue takes; where the kernel does not say, one that is not empty may be full. */
static uint32_t room_of_queues(void)
{
    uint32_t most = 0;
    FILE *file = fopen("/proc/sys/net/unix/max_dgram_qlen", "re");
    if (file != NULL && fscanf(file, "%u", &most) != 1)
        most = 0;
    if (file != NULL)
        fclose(file);
    return most < DRAINED_MOST ? most + 1 : DRAINED_MOST;
}

/* Has the kernel drop what does not begin with the key. */
static void attach_filter(const struct cl_bell *bell)
{
    uint32_t halves[2];
    memcpy(halves, &bell->key, sizeof halves);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RING_BYTES, 0, 5),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(halves[0]), 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, sizeof halves[0]),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(halves[1]), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, RING_BYTES),
        BPF_STMT(BPF_RET | BPF_K, 0),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    setsockopt(bell->fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

int cl_bell_open(struct cl_bell *bell)
{
    static _Atomic uint32_t number;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *bell =
        (struct cl_bell){.fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), .room = room_of_queues()};
    snprintf(bell->name, CL_BELL_BYTES, "cl-%x-%x-%lx", (unsigned)getpid(), atomic_fetch_add(&number, 1),
             (unsigned long)now.tv_nsec);
    struct sockaddr_un address = address_of(bell->name);
    bool keyed = getrandom(&bell->key, sizeof bell->key, 0) == sizeof bell->key;
    if (bell->fd >= 0)
        attach_filter(bell);
    if (keyed && bell->fd >= 0 && bind(bell->fd, (const struct sockaddr *)&address, ADDRESS_BYTES) == 0)
        return CL_OK;
    cl_bell_close(bell);
    return CL_ESYSTEM;
}

void cl_bell_close(struct cl_bell *bell)
{
    if (bell->fd >= 0)
        close(bell->fd);
    bell->fd = -1;
}

void cl_bell_ring(const struct cl_bell *own, const char name[CL_BELL_BYTES], uint64_t key, bool request)
{
    struct sockaddr_un address = address_of(name);
    uint8_t ring[RING_BYTES] = {[sizeof key] = request};
    memcpy(ring, &key, sizeof key);
    /* A full queue means that the bell is ringing already. */
    sendto(own->fd, ring, sizeof ring, MSG_DONTWAIT | MSG_NOSIGNAL, (const struct sockaddr *)&address, ADDRESS_BYTES);
}

bool cl_bell_drain(const struct cl_bell *bell)
{
    bool requested = false;
    uint8_t ring[RING_BYTES];
    uint32_t taken = 0;
    ssize_t length;
    while (taken < bell->room && (length = recv(bell->fd, ring, sizeof ring, MSG_DONTWAIT)) >= 0) {
        taken++;
        requested |= length == sizeof ring && memcmp(ring, &bell->key, sizeof bell->key) == 0 && ring[sizeof bell->key];
    }
    return requested || taken == bell->room;
}
