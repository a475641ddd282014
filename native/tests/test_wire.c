/* The wires: datagrams arrive whole and at their port, however the kernel batches them. */
#include "tests/check.h"
#include "tests/inbox.h"
#include "tests/mem_wire.h"
#include "wire/wire.h"

#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { DATAGRAM_BYTES = 1472, PATIENCE_MS = 5000 };

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

static const char *const LOCALHOST[] = {"127.0.0.1", "127.0.0.1"};

static struct cl_wire *open_wire(const struct cl_wire_type *type, uint32_t ports, double loss)
{
    mem_wire_lose(loss);
    struct cl_wire_config config = {.addresses = LOCALHOST, .address_count = ports, .datagram_bytes = DATAGRAM_BYTES};
    struct cl_wire *wire = NULL;
    CHECK_EQ(type->open(&config, &wire), CL_OK);
    return wire;
}

static void close_udp(struct cl_wire *const *wire)
{
    cl_wire_udp.close(*wire);
}

#define UDP_WIRE SCOPED(close_udp) struct cl_wire

static void close_mem(struct cl_wire *const *wire)
{
    mem_wire.close(*wire);
}

#define MEM_WIRE SCOPED(close_mem) struct cl_wire

static uint32_t number_of(const struct cl_wire_type *type, struct cl_wire *wire, uint32_t port)
{
    uint32_t number = 0;
    CHECK_EQ(type->port_number(wire, port, &number), CL_OK);
    return number;
}

/* Waits until `count` datagrams are in the inbox, or nothing comes any more. */
static void collect(const struct cl_wire_type *type, struct cl_wire *wire, uint32_t port, size_t count,
                    struct inbox *inbox)
{
    struct pollfd fd = {.fd = type->descriptor(wire, port), .events = POLLIN};
    while (inbox->count < count && poll(&fd, 1, PATIENCE_MS) == 1)
        type->receive(wire, port, keep, inbox);
}

/* Runs of equal, shorter and longer datagrams, to one port. */
static void send_and_check(const struct cl_wire_type *type, struct cl_wire *from, struct cl_wire *to,
                           struct inbox *inbox)
{
    struct cl_wire_datagram datagrams[MANY];
    int link = type->link(from, 0, LOCALHOST[0], number_of(type, to, 0));
    CHECK(link >= 0);
    for (size_t i = 0; i < MANY; i++)
        datagrams[i] = make(i, (uint32_t)link, i < 100 || i % 7 != 0 ? 1400 : (uint32_t)(i * 977 % 1464));
    CHECK_EQ(type->send(from, datagrams, MANY), MANY);
    collect(type, to, 0, MANY, inbox);
    check_inbox(inbox, datagrams, MANY);
}

static void set(int fd, int level, int option, int value)
{
    CHECK_EQ(setsockopt(fd, level, option, &value, sizeof value), 0);
}

/* How many messages the kernel makes of MANY equal datagrams on a link, read without the wire's help. */
static size_t count_on(int link, struct cl_wire *from, struct cl_wire *to)
{
    static uint8_t bytes[65536];
    struct cl_wire_datagram datagrams[MANY];
    struct pollfd fd = {.fd = cl_wire_udp.descriptor(to, 0), .events = POLLIN};
    for (size_t i = 0; i < MANY; i++)
        datagrams[i] = make(i, (uint32_t)link, 1000);
    CHECK_EQ(cl_wire_udp.send(from, datagrams, MANY), MANY);
    size_t messages = 0;
    for (ssize_t left = MANY * 1008; left > 0 && poll(&fd, 1, PATIENCE_MS) == 1; messages++)
        left -= recv(fd.fd, bytes, sizeof bytes, 0);
    return messages;
}

static size_t count_messages(struct cl_wire *from, struct cl_wire *to)
{
    return count_on(cl_wire_udp.link(from, 0, LOCALHOST[0], number_of(&cl_wire_udp, to, 0)), from, to);
}

static bool batches(void) /* whether this kernel segments and coalesces on loopback */
{
    int fd = socket(AF_INET, SOCK_DGRAM, 0), on = 1, off = 0;
    bool both = setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on) == 0 &&
                setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &off, sizeof off) == 0;
    close(fd);
    return both;
}

TEST(test_udp)
{
    UDP_WIRE *from = open_wire(&cl_wire_udp, 1, 0), *to = open_wire(&cl_wire_udp, 1, 0);
    struct inbox inbox = {0};
    send_and_check(&cl_wire_udp, from, to, &inbox);
    if (batches())
        CHECK(count_messages(from, to) <
              MANY / 3); /* otherwise the kernel did not segment, and the test shows nothing */
}

TEST(test_udp_without_coalescing)
{
    UDP_WIRE *from = open_wire(&cl_wire_udp, 1, 0), *to = open_wire(&cl_wire_udp, 1, 0);
    struct inbox inbox = {0};
    if (batches())
        set(cl_wire_udp.descriptor(to, 0), IPPROTO_UDP, UDP_GRO, 0);
    send_and_check(&cl_wire_udp, from, to, &inbox);
    CHECK_EQ(count_messages(from, to), MANY);
}

/* Segmentation needs checksums: without them the kernel refuses super-packets, as routes without the feature do. */
TEST(test_udp_without_segmentation)
{
    UDP_WIRE *from = open_wire(&cl_wire_udp, 1, 0), *to = open_wire(&cl_wire_udp, 1, 0);
    struct inbox inbox = {0};
    set(cl_wire_udp.descriptor(from, 0), SOL_SOCKET, SO_NO_CHECK, 1);
    send_and_check(&cl_wire_udp, from, to, &inbox);
    CHECK_EQ(count_messages(from, to), MANY);
}

/* A refusal is not for good, and concerns one link. */
TEST(test_udp_tries_segmentation_again)
{
    if (!batches())
        return;
    UDP_WIRE *from = open_wire(&cl_wire_udp, 1, 0), *to = open_wire(&cl_wire_udp, 1, 0);
    int fd = cl_wire_udp.descriptor(from, 0),
        link = cl_wire_udp.link(from, 0, LOCALHOST[0], number_of(&cl_wire_udp, to, 0));
    for (int refusal = 0; refusal < 2; refusal++) {
        set(fd, SOL_SOCKET, SO_NO_CHECK, 1);
        CHECK_EQ(count_on(link, from, to), MANY);
        set(fd, SOL_SOCKET, SO_NO_CHECK, 0);
        CHECK_EQ(count_on(link, from, to), MANY); /* not at once: each try costs a system call */
        CHECK(count_messages(from, to) < MANY / 3);
        int rounds = 0;
        while (rounds < 20 && count_on(link, from, to) > MANY / 2)
            rounds++;
        CHECK(rounds >= 3 && rounds < 20);
    }
}

TEST(test_udp_links)
{
    UDP_WIRE *from = open_wire(&cl_wire_udp, 2, 0), *to = open_wire(&cl_wire_udp, 2, 0);
    uint32_t numbers[2] = {number_of(&cl_wire_udp, to, 0), number_of(&cl_wire_udp, to, 1)};
    CHECK(numbers[0] != numbers[1]);
    for (uint32_t i = 0; i < 40; i++) /* more links than fit at first: they must keep their addresses */
        CHECK_EQ(cl_wire_udp.link(from, i % 2, LOCALHOST[0], numbers[i / 2 % 2]), i);
    struct cl_wire_datagram datagrams[MANY];
    size_t expected = 0;
    for (uint32_t i = 0; i < MANY; i++) {
        uint32_t link = i < 50 ? i % 40 : i / 10 % 40;
        datagrams[i] = make(i, link, 100);
        expected += link / 2 % 2 == 0;
    }
    CHECK_EQ(cl_wire_udp.send(from, datagrams, MANY), MANY);
    struct inbox inboxes[2] = {{0}, {0}};
    collect(&cl_wire_udp, to, 0, expected, &inboxes[0]);
    collect(&cl_wire_udp, to, 1, MANY - expected, &inboxes[1]);
    CHECK_EQ(inboxes[0].count, expected);
    CHECK_EQ(inboxes[1].count, MANY - expected);
}

TEST(test_udp_sizes)
{
    static uint8_t big[60000];
    UDP_WIRE *from = open_wire(&cl_wire_udp, 1, 0), *to = open_wire(&cl_wire_udp, 1, 0);
    int link = cl_wire_udp.link(from, 0, LOCALHOST[0], number_of(&cl_wire_udp, to, 0));
    struct cl_wire_datagram datagrams[] = {make(1, (uint32_t)link, 0),
                                           make(2, (uint32_t)link, 0),
                                           make(3, (uint32_t)link, 1),
                                           {(uint32_t)link, 8, 8000, big, big, 0}};
    CHECK_EQ(cl_wire_udp.send(from, datagrams, 4), 4);
    struct inbox inbox = {0};
    collect(&cl_wire_udp, to, 0, 4, &inbox);
    check_inbox(&inbox, datagrams, 4);
    struct cl_wire_datagram impossible = {(uint32_t)link, 8000, sizeof big, big, big, 0};
    struct cl_wire_datagram pair[] = {impossible, make(4, (uint32_t)link, 5)};
    CHECK_EQ(cl_wire_udp.send(from, pair, 2), 2); /* datagrams too large for a packet are lost, and delay no others */
    memset(&inbox, 0, sizeof inbox);
    collect(&cl_wire_udp, to, 0, 1, &inbox);
    check_inbox(&inbox, &pair[1], 1);
    CHECK(!cl_wire_udp.receive(to, 0, keep, &inbox));
    CHECK_EQ(inbox.count, 1);
}

TEST(test_udp_attackers)
{
    UDP_WIRE *wire = open_wire(&cl_wire_udp, 1, 0);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)number_of(&cl_wire_udp, wire, 0)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK_EQ(sendto(fd, "", 0, 0, (struct sockaddr *)&address, sizeof address), 0); /* empty: no endless loop */
    CHECK_EQ(sendto(fd, "x", 1, 0, (struct sockaddr *)&address, sizeof address), 1);
    struct inbox inbox = {0};
    collect(&cl_wire_udp, wire, 0, 1, &inbox);
    CHECK_EQ(inbox.lengths[inbox.count - 1], 1);
    close(fd);
}

TEST(test_udp_ipv6)
{
    const char *const address[] = {"::1"};
    struct cl_wire_config config = {.addresses = address, .address_count = 1, .datagram_bytes = DATAGRAM_BYTES};
    struct cl_wire *wire;
    if (cl_wire_udp.open(&config, &wire) != CL_OK) {
        printf("SKIPPED test_udp_ipv6: this machine has no ::1\n");
        return;
    }
    int link = cl_wire_udp.link(wire, 0, "::1", number_of(&cl_wire_udp, wire, 0));
    CHECK(link >= 0);
    struct cl_wire_datagram datagrams[] = {make(0, (uint32_t)link, 1000), make(1, (uint32_t)link, 1000)};
    CHECK_EQ(cl_wire_udp.send(wire, datagrams, 2), 2);
    struct inbox inbox = {0};
    collect(&cl_wire_udp, wire, 0, 2, &inbox);
    check_inbox(&inbox, datagrams, 2);
    cl_wire_udp.close(wire);
}

TEST(test_udp_takes_the_first_free_port_of_a_range)
{
    UDP_WIRE *taken = open_wire(&cl_wire_udp, 1, 0);
    uint32_t first = number_of(&cl_wire_udp, taken, 0), last = first < UINT16_MAX - 50 ? first + 50 : UINT16_MAX;
    struct cl_wire_config config = {.addresses = LOCALHOST,
                                    .address_count = 2,
                                    .datagram_bytes = DATAGRAM_BYTES,
                                    .port_first = first,
                                    .port_last = first};
    struct cl_wire *none;
    CHECK_EQ(cl_wire_udp.open(&config, &none), CL_ENOPORT);
    config.port_first = first < last ? first : first - 50;
    config.port_last = last;
    struct cl_wire *opened;
    CHECK_EQ(cl_wire_udp.open(&config, &opened), CL_OK);
    UDP_WIRE *wire = opened;
    uint32_t one = number_of(&cl_wire_udp, wire, 0), two = number_of(&cl_wire_udp, wire, 1);
    CHECK(config.port_first <= one && one < two && two <= last && one != first && two != first);
    config.port_first = last + 1;
    CHECK_EQ(cl_wire_udp.open(&config, &none), CL_EINVAL);
    config.port_last = 65536;
    CHECK_EQ(cl_wire_udp.open(&config, &none), CL_EINVAL);
}

TEST(test_udp_counts_packets_without_room)
{
    UDP_WIRE *from = open_wire(&cl_wire_udp, 1, 0), *to = open_wire(&cl_wire_udp, 1, 0);
    int small = 4096;
    CHECK_EQ(setsockopt(cl_wire_udp.descriptor(to, 0), SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
    int link = cl_wire_udp.link(from, 0, LOCALHOST[0], number_of(&cl_wire_udp, to, 0));
    for (uint32_t i = 0; i < MANY; i++) {
        struct cl_wire_datagram datagram = make((uint8_t)i, (uint32_t)link, 1000);
        CHECK_EQ(cl_wire_udp.send(from, &datagram, 1), 1);
    }
    static struct inbox inbox;
    inbox.count = 0;
    collect(&cl_wire_udp, to, 0, 1, &inbox);
    CHECK(inbox.count < MANY);
    size_t lost = MANY - inbox.count;
    struct cl_wire_datagram last = make(1, (uint32_t)link, 1000);
    CHECK_EQ(cl_wire_udp.send(from, &last, 1), 1); /* tells of those before it */
    collect(&cl_wire_udp, to, 0, inbox.count + 1, &inbox);
    CHECK_EQ(cl_wire_udp.overflows(to), lost);
}

TEST(test_udp_errors)
{
    const char *const nonsense[] = {"127.0.0.1", "not an address"}, *const foreign[] = {"192.0.2.1"};
    struct cl_wire *wire;
    CHECK_EQ(cl_wire_udp.open(&(struct cl_wire_config){.addresses = nonsense, .address_count = 2}, &wire), CL_EINVAL);
    CHECK_EQ(cl_wire_udp.open(&(struct cl_wire_config){.addresses = foreign, .address_count = 1}, &wire), CL_ESYSTEM);
    wire = open_wire(&cl_wire_udp, 1, 0);
    CHECK_EQ(cl_wire_udp.link(wire, 1, "127.0.0.1", 1), CL_EINVAL);
    CHECK_EQ(cl_wire_udp.link(wire, 0, "127.0.0.1", 0), CL_EINVAL);
    CHECK_EQ(cl_wire_udp.link(wire, 0, "127.0.0.1", 65536), CL_EINVAL);
    CHECK_EQ(cl_wire_udp.link(wire, 0, "localhost", 1), CL_EINVAL);
    CHECK_EQ(cl_wire_udp.link(wire, 0, "::1", 1), CL_EINVAL); /* this socket cannot send there */
    cl_wire_udp.close(wire);
}

TEST(test_mem)
{
    struct cl_wire *from = open_wire(&mem_wire, 1, 0), *to = open_wire(&mem_wire, 1, 0);
    struct inbox inbox = {0};
    send_and_check(&mem_wire, from, to, &inbox);
    struct pollfd fd = {.fd = mem_wire.descriptor(to, 0), .events = POLLIN};
    CHECK_EQ(poll(&fd, 1, 0), 0); /* no event is left that would keep a thread awake */
    CHECK_EQ(mem_wire.link(from, 0, "", 100000), CL_EINVAL);
    mem_wire.close(to);
    struct cl_wire_datagram late = make(0, 0, 10);
    CHECK_EQ(mem_wire.send(from, &late, 1), 1); /* nobody there any more */
    mem_wire.close(from);
}

TEST(test_mem_loss)
{
    MEM_WIRE *from = open_wire(&mem_wire, 1, 0.25), *to = open_wire(&mem_wire, 1, 0);
    int link = mem_wire.link(from, 0, "", number_of(&mem_wire, to, 0));
    struct cl_wire_datagram datagrams[MANY];
    for (size_t i = 0; i < MANY; i++)
        datagrams[i] = make(i, (uint32_t)link, 10);
    CHECK_EQ(mem_wire.send(from, datagrams, MANY), MANY);
    struct inbox inbox = {0};
    while (mem_wire.receive(to, 0, keep, &inbox)) {
    }
    CHECK(inbox.count > MANY / 2 && inbox.count < MANY); /* the seed decides which: the same ones in every run */
    /* letters still inside are freed with their wire: the sanitizer sees to it */
}

/* A plain socket that sees the marks. Each datagram's head says which one it was sent with. */
static void marks_arrive(bool dscp)
{
    enum { COUNT = 48 };
    struct cl_wire_config config = {
        .addresses = LOCALHOST, .address_count = 1, .datagram_bytes = DATAGRAM_BYTES, .dscp = dscp};
    UDP_WIRE *wire = NULL;
    CHECK_EQ(cl_wire_udp.open(&config, &wire), CL_OK);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_DGRAM, 0), on = 1;
    CHECK_EQ(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_EQ(setsockopt(fd, IPPROTO_IP, IP_RECVTOS, &on, sizeof on), 0);
    CHECK_EQ(getsockname(fd, (struct sockaddr *)&address, &length), 0);
    int link = cl_wire_udp.link(wire, 0, LOCALHOST[0], ntohs(address.sin_port));
    struct cl_wire_datagram datagrams[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        datagrams[i] = make(i / 6 % 2 ? 0xB8 : 0x22, (uint32_t)link, 1000); /* of equal size, in runs of six */
        datagrams[i].traffic_class = datagrams[i].head[0];
    }
    for (size_t sent = 0; sent < COUNT;)
        sent += cl_wire_udp.send(wire, datagrams + sent, COUNT - sent);
    for (size_t i = 0; i < COUNT; i++) {
        uint8_t bytes[DATAGRAM_BYTES];
        union {
            struct cmsghdr header;
            uint8_t bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec piece = {bytes, sizeof bytes};
        struct msghdr message = {
            .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        CHECK_EQ(poll(&ready, 1, PATIENCE_MS), 1);
        CHECK_EQ(recvmsg(fd, &message, MSG_DONTWAIT), 1008);
        struct cmsghdr *first = CMSG_FIRSTHDR(&message);
        CHECK(first != NULL && first->cmsg_type == IP_TOS);
        CHECK_EQ(first ? *CMSG_DATA(first) : 0, dscp ? bytes[0] : 0);
    }
    close(fd);
}

TEST(test_udp_marks)
{
    marks_arrive(true);
    marks_arrive(false);
}

/* The sender does a switch's work: some packets leave marked (CE), among others of the same size. */
static void congestion_is_seen(const char *const *addresses)
{
    enum { COUNT = 48 };
    struct cl_wire_config config = {
        .addresses = addresses, .address_count = 1, .datagram_bytes = DATAGRAM_BYTES, .dscp = true};
    UDP_WIRE *from = NULL, *to = NULL;
    if (cl_wire_udp.open(&config, &from) != CL_OK)
        return; /* no IPv6 here: test_udp_ipv6 says so */
    CHECK_EQ(cl_wire_udp.open(&config, &to), CL_OK);
    int link = cl_wire_udp.link(from, 0, addresses[0], number_of(&cl_wire_udp, to, 0));
    struct cl_wire_datagram datagrams[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        datagrams[i] = make(i / 6 % 2 ? 0xBB : 0xBA, (uint32_t)link, 1000);
        datagrams[i].traffic_class = datagrams[i].head[0];
    }
    for (size_t sent = 0; sent < COUNT;)
        sent += cl_wire_udp.send(from, datagrams + sent, COUNT - sent);
    static struct inbox inbox;
    inbox.count = 0;
    collect(&cl_wire_udp, to, 0, COUNT, &inbox);
    CHECK_EQ(inbox.count, COUNT);
    for (size_t i = 0; i < inbox.count; i++)
        CHECK_EQ(inbox.congested[i], inbox.first[i] == 0xBB);
}

TEST(test_udp_congestion)
{
    static const char *const SIX[] = {"::1"};
    congestion_is_seen(LOCALHOST);
    congestion_is_seen(SIX);
}

/* ---- when packets came ---- */

static int64_t wall_clock_step_us; /* somebody has set the clock */

/* The program's own clock_gettime: the C library's, but for the step. */
int clock_gettime(clockid_t clock, struct timespec *now)
{
    long status = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) {
        int64_t ns = now->tv_sec * 1000000000 + now->tv_nsec + wall_clock_step_us * 1000;
        *now = (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    }
    return (int)status;
}

static uint64_t monotonic_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

/* Sends datagrams and reads them after a while, in which the wall clock may be set. None has come earlier than it was
 * sent, or later. Returns for how many of a hundred the time is known. */
static size_t percent_timed(struct cl_wire *from, struct cl_wire *to, uint32_t link, int64_t step_us)
{
    enum { COUNT = 150, WAIT_US = 3000, SLACK_US = 50 };
    static struct inbox inbox;
    struct cl_wire_datagram datagrams[COUNT];
    size_t timed = 0;
    inbox.count = 0;
    for (size_t i = 0; i < COUNT; i++)
        datagrams[i] = make(i, link, i % 2 ? 1000 : 900); /* longer ones follow: they do not leave as one */
    uint64_t before_us = monotonic_us();
    CHECK_EQ(cl_wire_udp.send(from, datagrams, COUNT), COUNT);
    uint64_t sent_us = monotonic_us();
    usleep(WAIT_US);
    wall_clock_step_us += step_us;
    collect(&cl_wire_udp, to, 0, COUNT, &inbox);
    CHECK_EQ(inbox.count, COUNT);
    for (size_t i = 0; i < inbox.count; i++) {
        uint64_t came_us = inbox.received_us[i];
        timed += came_us != 0;
        CHECK(came_us == 0 || (came_us + SLACK_US >= before_us && came_us <= sent_us + SLACK_US));
    }
    return timed * 100 / COUNT;
}

TEST(test_udp_arrival_times_survive_a_step_of_the_clock)
{
    static const int64_t STEPS_US[] = {500000, -500000, 5000, -5000};
    for (size_t i = 0; i < sizeof STEPS_US / sizeof *STEPS_US; i++) {
        UDP_WIRE *from = open_wire(&cl_wire_udp, 1, 0), *to = open_wire(&cl_wire_udp, 1, 0);
        uint32_t link = (uint32_t)cl_wire_udp.link(from, 0, LOCALHOST[0], number_of(&cl_wire_udp, to, 0));
        CHECK_EQ(percent_timed(from, to, link, 0), 100);
        percent_timed(from, to, link, STEPS_US[i]);
        percent_timed(from, to, link, -STEPS_US[i]);     /* stamps made before the step are of another time */
        CHECK_EQ(percent_timed(from, to, link, 0), 100); /* the socket was empty: now all are of one time again */
    }
}

TEST(test_find)
{
    CHECK(cl_wire_find("udp") == &cl_wire_udp);
    CHECK(cl_wire_find("ofi") == &cl_wire_ofi);
    CHECK(cl_wire_find("pigeon") == NULL);
}
