/* Bells: who can ring them. */
#include "os/bell.h"

#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "commlayer.h"
#include "tests/check.h"

enum { FLOOD = 2000 };

static bool rings(const struct cl_bell *bell)
{
    struct pollfd fd = {.fd = bell->fd, .events = POLLIN};
    return poll(&fd, 1, 0) == 1;
}

/* Sends what any user of the host may send. */
static void flood(const struct cl_bell *bell, const void *bytes, size_t length)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, bell->name, CL_BELL_BYTES - 1);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    for (int i = 0; i < FLOOD; i++)
        sendto(fd, bytes, length, MSG_NOSIGNAL, (const struct sockaddr *)&address,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + CL_BELL_BYTES));
    close(fd);
}

static void open_two(struct cl_bell bells[2])
{
    CHECK_EQ(cl_bell_open(&bells[0]), CL_OK);
    CHECK_EQ(cl_bell_open(&bells[1]), CL_OK);
    CHECK(bells[0].key != bells[1].key);
}

static void close_two(struct cl_bell bells[2])
{
    cl_bell_close(&bells[0]);
    cl_bell_close(&bells[1]);
}

/* Nobody without the key wakes the owner, or takes the room of those who have it. */
TEST(test_strangers_cannot_ring)
{
    struct cl_bell bells[2];
    open_two(bells);
    uint8_t whole[sizeof bells[0].key + 1] = {0};
    for (size_t length = 0; length <= sizeof whole; length++)
        flood(&bells[0], whole, length);
    memcpy(whole, &bells[0].key, sizeof bells[0].key);
    whole[0] ^= 1;
    flood(&bells[0], whole, sizeof whole);
    whole[0] ^= 1;
    whole[7] ^= 1;
    flood(&bells[0], whole, sizeof whole);
    whole[7] ^= 1;
    flood(&bells[0], whole, sizeof whole - 1);
    CHECK(!rings(&bells[0]));
    cl_bell_ring(&bells[1], bells[0].name, bells[1].key, true);
    CHECK(!rings(&bells[0]));
    cl_bell_ring(&bells[1], bells[0].name, bells[0].key, false);
    CHECK(rings(&bells[0]));
    CHECK(!cl_bell_drain(&bells[0]));
    CHECK(!rings(&bells[0]));
    cl_bell_ring(&bells[1], bells[0].name, bells[0].key, true);
    CHECK(cl_bell_drain(&bells[0]));
    CHECK(!rings(&bells[0]));
    close_two(bells);
}

/* On a kernel without the filter strangers wake the owner, but neither keep it nor make requests. */
TEST(test_without_the_filter)
{
    struct cl_bell bells[2];
    open_two(bells);
    int none = 0;
    CHECK_EQ(setsockopt(bells[0].fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none), 0);
    uint8_t whole[sizeof bells[0].key + 1];
    memset(whole, 0xff, sizeof whole);
    struct cl_bell one = bells[0];
    one.room = 3;
    flood(&bells[0], whole, sizeof whole);
    uint32_t drains = 0;
    for (; rings(&bells[0]); drains++)
        cl_bell_drain(&one);
    CHECK(drains * one.room >= bells[0].room); /* each takes a bounded number */
    one.room = FLOOD;
    flood(&bells[0], whole, sizeof whole);
    CHECK(!cl_bell_drain(&one));
    close_two(bells);
}
