#include "protocol/sent.h"

#include <stddef.h>

#include "protocol/packet.h"
#include "tests/check.h"

static void push(struct cl_sent *sent, uint8_t kind, uint16_t bytes, uint64_t sent_us)
{
    struct cl_sent_packet packet = {.kind = kind, .bytes = bytes, .sent_us = sent_us};
    CHECK(cl_sent_push(sent, &packet));
}

TEST(test_counts)
{
    SCOPED(cl_sent_free) struct cl_sent sent = {0};
    push(&sent, CL_PACKET_DATA, 1000, 10);
    push(&sent, CL_PACKET_PING, 40, 20);
    push(&sent, CL_PACKET_DATA, 500, 30);
    CHECK_EQ(sent.bytes, 1540);
    CHECK_EQ(sent.packets, 3);
    CHECK_EQ(sent.pings, 1);
    CHECK_EQ(sent.last_sent_us, 30);
    cl_sent_remove(&sent, 1);
    CHECK_EQ(sent.pings, 0);
    CHECK_EQ(sent.low, 0);
    cl_sent_remove(&sent, 0);
    CHECK_EQ(sent.low, 2); /* past the numbers removed before */
    CHECK(cl_sent_find(&sent, 0) == NULL);
    CHECK(cl_sent_find(&sent, 3) == NULL);
    CHECK_EQ(cl_sent_find(&sent, 2)->bytes, 500);
    cl_sent_remove(&sent, 2);
    CHECK_EQ(sent.bytes, 0);
    CHECK_EQ(sent.packets, 0);
}

TEST(test_pings_do_not_move_the_timer)
{
    SCOPED(cl_sent_free) struct cl_sent sent = {0};
    push(&sent, CL_PACKET_DATA, 1000, 10);
    push(&sent, CL_PACKET_PING, 40, 20);
    CHECK_EQ(sent.last_sent_us, 10);
}

/* The ring grows while the oldest packet stays, and is reused afterwards. */
TEST(test_ring_grows_and_wraps)
{
    SCOPED(cl_sent_free) struct cl_sent sent = {0};
    for (uint64_t i = 0; i < 1000; i++)
        push(&sent, CL_PACKET_DATA, 100, i);
    CHECK_EQ(sent.capacity, 1024);
    for (uint64_t i = 0; i < 1000; i++)
        CHECK_EQ(cl_sent_find(&sent, i)->sent_us, i);
    for (uint64_t i = 1000; i < 10000; i++) {
        cl_sent_remove(&sent, i - 1000);
        push(&sent, CL_PACKET_DATA, 100, i);
    }
    CHECK_EQ(sent.capacity, 1024);
    CHECK_EQ(sent.low, 9000);
    CHECK_EQ(cl_sent_find(&sent, 9500)->sent_us, 9500);
}

TEST(test_numbers_go_on)
{
    SCOPED(cl_sent_free) struct cl_sent sent = {0};
    push(&sent, CL_PACKET_DATA, 100, 1);
    push(&sent, CL_PACKET_DATA, 100, 2);
    cl_sent_free(&sent);
    CHECK_EQ(sent.packets, 0);
    push(&sent, CL_PACKET_DATA, 100, 3);
    CHECK_EQ(cl_sent_find(&sent, 2)->sent_us, 3);
    CHECK(cl_sent_find(&sent, 1) == NULL);
}
