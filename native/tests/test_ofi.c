/* The ofi wire: real packets through the real libfabric, over its `udp` provider. */
#include "tests/inbox.h"
#include "wire/wire.h"

#include <poll.h>
#include <string.h>

enum { DATAGRAM_BYTES = 1400, ROUNDS = 50, PATIENCE_MS = 5000 };

static const char *const LOCALHOST[] = {"127.0.0.1", "127.0.0.1"};

static int open_at(const char *const *addresses, uint32_t count, const char *provider, struct cl_wire **wire)
{
    struct cl_wire_config config = {
        .addresses = addresses, .address_count = count, .datagram_bytes = DATAGRAM_BYTES, .provider = provider};
    return cl_wire_ofi.open(&config, wire);
}

static struct cl_wire *open_wire(uint32_t ports)
{
    struct cl_wire *wire = NULL;
    CHECK_EQ(open_at(LOCALHOST, ports, "udp", &wire), CL_OK);
    return wire;
}

static void close_ofi(struct cl_wire *const *wire)
{
    cl_wire_ofi.close(*wire);
}

#define OFI_WIRE SCOPED(close_ofi) struct cl_wire

static int link_to(struct cl_wire *from, uint32_t port, struct cl_wire *to, uint32_t remote)
{
    char address[CL_ADDRESS_BYTES];
    CHECK_EQ(cl_wire_ofi.address(to, remote, address, sizeof address), CL_OK);
    return cl_wire_ofi.link(from, port, address, 0);
}

static bool sleeps(struct cl_wire *wire, uint32_t port, int patience_ms)
{
    struct pollfd fd = {.fd = cl_wire_ofi.descriptor(wire, port), .events = POLLIN};
    return poll(&fd, 1, patience_ms) == 0;
}

/* Waits until `count` datagrams are in the inbox, or nothing comes any more; sleeps like the engine. */
static void collect(struct cl_wire *wire, uint32_t port, size_t count, struct inbox *inbox)
{
    while (inbox->count < count && !sleeps(wire, port, PATIENCE_MS))
        while (cl_wire_ofi.receive(wire, port, keep, inbox)) {
        }
    for (size_t i = 0; i < inbox->count; i++)
        CHECK(!inbox->congested[i] && inbox->received_us[i] == 0); /* libfabric does not say */
}

/* More datagrams than there are slots, so that each is used again. The caller's memory may change at once. */
TEST(test_rounds)
{
    OFI_WIRE *from = open_wire(1), *to = open_wire(1);
    int link = link_to(from, 0, to, 0);
    CHECK(link >= 0);
    for (size_t round = 0; round < ROUNDS; round++) {
        struct cl_wire_datagram datagrams[MANY];
        struct inbox inbox = {0};
        for (size_t i = 0; i < MANY; i++)
            datagrams[i] = make(i, (uint32_t)link, i % 3 != 0 ? 1392 : (uint32_t)((i * 977 + round) % 1392));
        for (size_t sent = 0; sent < MANY; sent += 50) {
            CHECK_EQ(cl_wire_ofi.send(from, datagrams + sent, 50), 50);
            collect(to, 0, sent + 50, &inbox);
        }
        check_inbox(&inbox, datagrams, MANY);
    }
}

TEST(test_change_after_send)
{
    OFI_WIRE *wire = open_wire(1);
    struct cl_wire_datagram datagram = make(7, (uint32_t)link_to(wire, 0, wire, 0), 100), same = datagram;
    CHECK_EQ(cl_wire_ofi.send(wire, &datagram, 1), 1);
    memset(payloads[7], 0, sizeof payloads[7]);
    struct inbox inbox = {0};
    collect(wire, 0, 1, &inbox);
    check_inbox(&inbox, &same, 1);
}

/* Both directions over two ports: each datagram comes to the port its link names. */
TEST(test_links)
{
    OFI_WIRE *from = open_wire(2), *to = open_wire(2);
    int links[] = {link_to(from, 0, to, 1), link_to(from, 1, to, 0), link_to(to, 0, from, 0)};
    CHECK(links[0] == 0 && links[1] == 1 && links[2] == 0);
    struct cl_wire_datagram out[] = {make(1, 0, 10), make(2, 1, 20), make(3, 0, 30)};
    CHECK_EQ(cl_wire_ofi.send(from, out, 3), 3);
    struct inbox inboxes[2] = {{0}};
    collect(to, 1, 2, &inboxes[1]);
    collect(to, 0, 1, &inboxes[0]);
    check_inbox(&inboxes[0], &out[1], 1);
    check_inbox(&inboxes[1], (struct cl_wire_datagram[]){out[0], out[2]}, 2);
    struct cl_wire_datagram back = make(4, 0, 40);
    struct inbox inbox = {0};
    CHECK_EQ(cl_wire_ofi.send(to, &back, 1), 1);
    collect(from, 0, 1, &inbox);
    check_inbox(&inbox, &back, 1);
}

TEST(test_sleep)
{
    OFI_WIRE *from = open_wire(1), *to = open_wire(1);
    struct inbox inbox = {0};
    CHECK(sleeps(to, 0, 20)); /* nothing there: nothing keeps a thread awake */
    struct cl_wire_datagram datagram = make(1, (uint32_t)link_to(from, 0, to, 0), 10);
    CHECK_EQ(cl_wire_ofi.send(from, &datagram, 1), 1);
    CHECK(!sleeps(to, 0, PATIENCE_MS));
    CHECK(!sleeps(to, 0, PATIENCE_MS)); /* and still, as the datagram was not taken */
    collect(to, 0, 1, &inbox);
    CHECK_EQ(inbox.count, 1);
    CHECK(sleeps(to, 0, 20) || sleeps(to, 0, 20)); /* an old signal may be left, once */
}

TEST(test_sizes)
{
    OFI_WIRE *wire = open_wire(1);
    uint32_t limit = cl_wire_ofi.datagram_limit(wire), link = (uint32_t)link_to(wire, 0, wire, 0);
    CHECK(limit >= DATAGRAM_BYTES && limit <= 9216);
    static uint8_t big[10000];
    struct cl_wire_datagram datagrams[] = {
        {link, 8, limit - 7, big, big, 0}, make(1, link, 0), {link, 8, limit - 8, big, big, 0}, make(2, link, 1)};
    CHECK_EQ(cl_wire_ofi.send(wire, datagrams, 4),
             4); /* datagrams too large for a packet are lost, and delay no others */
    struct inbox inbox = {0};
    collect(wire, 0, 3, &inbox);
    check_inbox(&inbox, &datagrams[1], 3);
}

/* A receiver that does not look loses the datagrams beyond its buffers; the sender is delayed, and then goes on. */
TEST(test_flood)
{
    OFI_WIRE *from = open_wire(1), *to = open_wire(1);
    uint32_t link = (uint32_t)link_to(from, 0, to, 0);
    struct cl_wire_datagram datagrams[MANY];
    for (size_t i = 0; i < MANY; i++)
        datagrams[i] = make(i, link, 1300);
    for (size_t round = 0; round < ROUNDS; round++) {
        size_t sent = 0;
        while (sent < MANY) {
            sent += cl_wire_ofi.send(from, datagrams + sent, MANY - sent);
            CHECK(sent == MANY || !sleeps(from, 0, PATIENCE_MS)); /* a full wire wakes its sender */
        }
    }
    struct inbox inbox = {0};
    while (!sleeps(to, 0, 100)) {
        while (cl_wire_ofi.receive(to, 0, keep, &inbox)) {
        }
    }
    CHECK(inbox.count > 0);
    memset(&inbox, 0, sizeof inbox);
    CHECK_EQ(cl_wire_ofi.send(from, datagrams, 20), 20);
    collect(to, 0, 20, &inbox);
    check_inbox(&inbox, datagrams, 20);
}

TEST(test_errors)
{
    const char *const nonsense[] = {"127.0.0.1", "not an address"}, *const foreign[] = {"192.0.2.1"};
    OFI_WIRE *wire = NULL;
    CHECK_EQ(open_at(LOCALHOST, 1, "pigeon", &wire), CL_ENODEVICE);
    CHECK_EQ(open_at(nonsense, 2, "udp", &wire), CL_ENODEVICE);
    CHECK_EQ(open_at(foreign, 1, "udp", &wire), CL_ENODEVICE);
    wire = open_wire(1);
    char address[CL_ADDRESS_BYTES];
    CHECK_EQ(cl_wire_ofi.address(wire, 0, address, 8), CL_ESYSTEM);
    CHECK_EQ(cl_wire_ofi.address(wire, 0, address, sizeof address), CL_OK);
    CHECK_EQ(cl_wire_ofi.link(wire, 1, address, 0), CL_EINVAL);
    CHECK_EQ(cl_wire_ofi.link(wire, 0, "127.0.0.1", 1), CL_EINVAL);
    address[3] = 'x';
    CHECK_EQ(cl_wire_ofi.link(wire, 0, address, 0), CL_EINVAL);
}

int main(void)
{
    struct cl_wire *wire;
    if (open_at(LOCALHOST, 1, "udp", &wire) == CL_ENOLIBFABRIC) {
        printf("SKIPPED: built without libfabric's headers, or libfabric.so.1 is not installed\n");
        return 0;
    }
    cl_wire_ofi.close(wire);
    return check_run();
}
