#include "tests/network.h"

enum { BATCH = 4096, BYTES = 1472 };

static uint64_t now_us = 1000;

static struct cl_endpoint *make(uint16_t self, uint16_t other)
{
    struct cl_endpoint_config config = {
        .auth = CL_AUTH_OFF,
        .job = 5,
        .self = self,
        .datagram_bytes = BYTES,
        .peer_timeout_us = 10000000,
        .unexpected_limit_bytes = 1 << 20,
    };
    struct cl_endpoint *endpoint = NULL;
    CHECK_EQ(cl_endpoint_create(&config, &endpoint), CL_OK);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, other, 1, NULL), CL_OK);
    return endpoint;
}

enum lose { NOTHING, TWO_BEFORE_THE_LAST, EVERYTHING };

/* Delivers the packets that one endpoint has to send now, except lost ones; returns how many there were. */
static size_t hand_over(struct cl_endpoint *endpoint, struct cl_endpoint *other, enum lose lose)
{
    static struct cl_datagram batch[BATCH];
    size_t count = cl_endpoint_send(endpoint, now_us, batch, BATCH);
    for (size_t i = 0; i < count; i++) {
        uint8_t bytes[BYTES];
        uint32_t length = sim_driver_flatten(bytes, &batch[i]);
        if (lose == NOTHING || (lose == TWO_BEFORE_THE_LAST && (i + 3 < count || i + 1 == count)))
            cl_endpoint_receive(other, bytes, length, false, now_us, now_us);
    }
    return count;
}

/* The loss timer makes room in a full window: lost packets are sent again at once. They used to wait for an
 * acknowledgement, which does not come when the rest of the window is lost, too. */
TEST(test_what_the_loss_timer_finds_lost_is_sent)
{
    static uint8_t data[16 << 20], target[16 << 20];
    struct cl_endpoint *sender = make(1, 2), *receiver = make(2, 1);
    for (int i = 0; i < 3; i++, now_us += 50) { /* pings, and their answers */
        hand_over(sender, receiver, NOTHING);
        hand_over(receiver, sender, NOTHING);
    }
    struct cl_message_id id = {1, 1, 0};
    struct cl_sink sink = {.target = target};
    CHECK_EQ(cl_endpoint_post_receive(receiver, 1, id, sink, sizeof target, &RELIABLE, now_us, data), CL_OK);
    CHECK_EQ(cl_endpoint_post_send(sender, 2, id, data, sizeof data, &RELIABLE, now_us, data), CL_OK);
    for (int i = 0; i < 4; i++, now_us += 100) { /* the interface learns that it is fast: the window is the limit */
        hand_over(sender, receiver, NOTHING);
        hand_over(receiver, sender, NOTHING);
    }
    CHECK(hand_over(sender, receiver, TWO_BEFORE_THE_LAST) > 3);
    now_us += 100;
    hand_over(receiver, sender, NOTHING);
    CHECK(hand_over(sender, receiver, EVERYTHING) > 3); /* the window is full again */
    CHECK_EQ(hand_over(sender, receiver, EVERYTHING), 0);
    size_t sent = 0;
    for (uint64_t end_us = now_us + 1000; cl_endpoint_next_timeout(sender) < end_us;) { /* probes come later */
        now_us = cl_endpoint_next_timeout(sender);
        cl_endpoint_timeout(sender, now_us);
        sent += hand_over(sender, receiver, EVERYTHING);
    }
    CHECK_EQ(cl_endpoint_stats(sender)->packets_lost, 2);
    CHECK_EQ(sent, 2);
    cl_endpoint_destroy(sender);
    cl_endpoint_destroy(receiver);
}
