#include "os/bell.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "commlayer.h"

enum { DRAINED_MOST = 64 /* of a turn */ };

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
    if (bell->fd >= 0 && bind(bell->fd, (const struct sockaddr *)&address, ADDRESS_BYTES) == 0)
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

void cl_bell_ring(const struct cl_bell *own, const char name[CL_BELL_BYTES], bool request)
{
    struct sockaddr_un address = address_of(name);
    uint8_t word = request;
    /* A full queue means that the bell is ringing already. */
    sendto(own->fd, &word, sizeof word, MSG_DONTWAIT | MSG_NOSIGNAL, (const struct sockaddr *)&address, ADDRESS_BYTES);
}

bool cl_bell_drain(const struct cl_bell *bell)
{
    bool requested = false;
    uint8_t word;
    uint32_t taken = 0;
    while (taken < bell->room && recv(bell->fd, &word, sizeof word, MSG_DONTWAIT) >= 0) {
        taken++;
        requested |= word != 0;
    }
    return requested || taken == bell->room;
}
