/* An endpoint that knows 8,000 peers, as a process of 1,000 hosts of 8 ranks: its memory, and what it sends idle. */
#include <malloc.h>

#include "protocol/endpoint.h"
#include "protocol/peer.h"
#include "tests/check.h"

enum {
    PEERS = 7992, /* those of other hosts */
    PEER_BYTES_MAX = 8000,
    BATCH = 64,
    MINUTE_US = 60000000,
};

/* Bytes of the heap; 0 under ASan, which has an allocator of its own. */
static size_t heap_bytes(void)
{
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static struct cl_endpoint *endpoint_of(uint16_t peers)
{
    struct cl_endpoint_config config = {
        .job = 7, .epoch = 1, .datagram_bytes = 1472, .unexpected_limit_bytes = 1 << 20};
    struct cl_endpoint *endpoint = NULL;
    CHECK_EQ(cl_endpoint_create(&config, &endpoint), CL_OK);
    for (uint16_t peer = 1; peer <= peers; peer++)
        CHECK_EQ(cl_endpoint_add_peer(endpoint, peer, 1, NULL), CL_OK);
    return endpoint;
}

TEST(test_8000_peers_take_little_memory)
{
    size_t before = heap_bytes();
    struct cl_endpoint *endpoint = endpoint_of(PEERS);
    CHECK(heap_bytes() - before < (size_t)PEERS * PEER_BYTES_MAX);
    cl_endpoint_destroy(endpoint);
}

/* Datagrams that leave in a minute from start_us on, in which nobody answers and nothing waits. */
static uint64_t sent_in_a_minute(struct cl_endpoint *endpoint, uint64_t start_us)
{
    struct cl_datagram batch[BATCH];
    uint64_t sent = 0;
    for (uint64_t now_us = start_us; now_us < start_us + MINUTE_US; now_us += MINUTE_US / 600) {
        if (cl_endpoint_next_timeout(endpoint) <= now_us)
            cl_endpoint_timeout(endpoint, now_us);
        for (size_t count; (count = cl_endpoint_send(endpoint, now_us, batch, BATCH)) > 0;)
            sent += count;
    }
    return sent;
}

/* At the start each is asked a few times at most whether it is there yet. */
TEST(test_peers_that_nothing_waits_for_cost_no_packets)
{
    struct cl_endpoint *endpoint = endpoint_of(PEERS);
    CHECK(sent_in_a_minute(endpoint, MINUTE_US) <= PEERS * (CL_PEER_GREETINGS + 1));
    CHECK_EQ(sent_in_a_minute(endpoint, 2 * (uint64_t)MINUTE_US), 0);
    cl_endpoint_destroy(endpoint);
}
