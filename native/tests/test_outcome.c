/* Outcomes of sent packets when there is no memory: the message ends with CL_ENOMEM, so that nobody waits for a packet
 * that is never sent again. The ranges and the list of sent packets in this program have an allocator that can fail. */
#include <stdlib.h>

static int left = -1; /* allocations that succeed before all others fail; -1: none fails */

static int is_refused(void)
{
    return left >= 0 && left-- == 0 ? (left = 0, 1) : 0;
}

static void *scarce_realloc(void *old, size_t size)
{
    return is_refused() ? NULL : realloc(old, size);
}

static void *scarce_calloc(size_t count, size_t size)
{
    return is_refused() ? NULL : calloc(count, size);
}

#define realloc scarce_realloc
#define calloc scarce_calloc
#include "protocol/ranges.c" /* instead of those in the archive */
#include "protocol/sent.c"
#undef realloc
#undef calloc

#include "protocol/packet.h"
#include "tests/transfer.h"

enum { LENGTH = 20000, LAST_BYTES = LENGTH % (NETWORK_DATAGRAM_BYTES - CL_PACKET_HEAD_BYTES) };

/* The number of ranges of refused packets in an acknowledgement; -1: another datagram. */
static int refused_ranges(const struct cl_datagram *datagram)
{
    struct cl_packet packet;
    bool acknowledges = cl_packet_decode(&packet, datagram->head, datagram->head_length + datagram->payload_length) &&
                        packet.kind == CL_PACKET_ACK;
    return acknowledges ? (int)(packet.offset >> 16) : -1;
}

/* Once host 1 acknowledges after the last packet, which alone arrives, no allocation succeeds. */
static bool loses_others(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    bool *is_sent = network->argument;
    *is_sent |= datagram->message != NULL && datagram->payload_length == LAST_BYTES;
    if (from == 1 && *is_sent && refused_ranges(datagram) >= 0)
        left = 0;
    return from == 0 && datagram->message != NULL && datagram->payload_length != LAST_BYTES;
}

/* Once host 1 has refused a packet, no allocation succeeds. */
static bool loses_nothing(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)network;
    if (from == 1 && refused_ranges(datagram) > 0)
        left = 0;
    return false;
}

/* Sends a message, with as many allocations as `succeed` until then. room: of host 1, for
 * packets without a receive. */
static void check_message(bool (*drops)(struct network *, uint32_t, const struct cl_datagram *), size_t room,
                          int succeed)
{
    SCOPED_NETWORK *network = network_new(2, 1, 1000, 150, room, 1);
    SCOPED_TRANSFER *transfer = transfer_new(0, 1, 0, LENGTH);
    bool is_sent = false;
    network->drops = drops;
    network->argument = &is_sent;
    left = succeed;
    post_send(network, transfer, 1, 0);
    network_run_until(network, network_now_us(network) + SECOND_US);
    left = -1;
    CHECK_EQ(network->hosts[0].failed, 1);
    CHECK_EQ(network->hosts[0].last_status, CL_ENOMEM);
}

TEST(test_lost_packets)
{
    check_message(loses_others, ROOM, -1);
}

TEST(test_refused_packets)
{
    check_message(loses_nothing, 0, -1);
}

TEST(test_no_room_among_the_sent_packets)
{
    check_message(loses_nothing, ROOM, 0);
}
