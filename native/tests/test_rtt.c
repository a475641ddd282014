#include "protocol/rtt.h"

#include "tests/check.h"

enum { SECOND_US = 1000000 };

TEST(test_smoothing)
{
    struct cl_rtt rtt;
    cl_rtt_init(&rtt);
    CHECK_EQ(rtt.smoothed_us, CL_RTT_INITIAL_US);
    cl_rtt_update(&rtt, 1000, 1800, 0, 0);
    CHECK_EQ(rtt.smoothed_us, 800);
    CHECK_EQ(rtt.variation_us, 400);
    for (uint64_t i = 1; i < 100; i++)
        cl_rtt_update(&rtt, i * 1000, i * 1000 + 2000, 0, 0);
    CHECK(rtt.smoothed_us > 1900 && rtt.smoothed_us <= 2000);
    CHECK(rtt.variation_us < 100);
    cl_rtt_update(&rtt, 200000, 210000, 0, 0);
    CHECK(rtt.variation_us > 1000); /* surprises upward count in full */
}

TEST(test_minimum_forgets)
{
    struct cl_minimum minimum = {0};
    CHECK_EQ(cl_minimum_update(&minimum, 50, 5 * SECOND_US), 50);
    CHECK_EQ(cl_minimum_update(&minimum, 90, 6 * SECOND_US), 50);
    CHECK_EQ(cl_minimum_update(&minimum, 90, 25 * SECOND_US), 50); /* 20 to 30 s */
    CHECK_EQ(cl_minimum_update(&minimum, 80, 31 * SECOND_US), 80);
    CHECK_EQ(cl_minimum_update(&minimum, 70, (uint64_t)500 * SECOND_US), 70); /* after a long pause */
    CHECK_EQ(cl_minimum_update(&minimum, -10, (uint64_t)500 * SECOND_US), -10);
    CHECK_EQ(cl_minimum_update(&minimum, 60, (uint64_t)2001 * SECOND_US), -10); /* a pause proves nothing */
    CHECK_EQ(cl_minimum_update(&minimum, 60, (uint64_t)2015 * SECOND_US), -10);
    CHECK_EQ(cl_minimum_update(&minimum, 60, (uint64_t)2025 * SECOND_US), 60);
}

/* queue_us for a packet that waits there_us on its way and back_us on the acknowledgement's, between hosts whose clocks
 * differ by offset_us. */
static uint32_t queue(struct cl_rtt *rtt, uint64_t at_us, uint32_t there_us, uint32_t back_us, uint32_t host_us,
                      uint32_t offset_us)
{
    uint32_t arrival = (uint32_t)at_us + 100 + there_us + offset_us;
    cl_rtt_update(rtt, at_us, at_us + 200 + there_us + host_us + back_us, arrival, host_us);
    return rtt->queue_us;
}

TEST(test_queue_ignores_hosts_way_back_and_clocks)
{
    static const uint32_t OFFSETS[] = {0, 12345, 0x7FFFFFF0, 0x80000000, 0xFFFFFFFF};
    for (int i = 0; i < 5; i++) {
        struct cl_rtt rtt;
        cl_rtt_init(&rtt);
        CHECK_EQ(queue(&rtt, SECOND_US, 0, 0, 0, OFFSETS[i]), 0);
        CHECK_EQ(cl_rtt_base_us(&rtt), 200);
        CHECK_EQ(queue(&rtt, 2 * SECOND_US, 1500, 0, 0, OFFSETS[i]), 1500);
        CHECK_EQ(queue(&rtt, 3 * SECOND_US, 1500, 4000, 0, OFFSETS[i]), 1500);
        CHECK_EQ(queue(&rtt, 4 * SECOND_US, 700, 0, 3000, OFFSETS[i]), 700);
        CHECK_EQ(rtt.latest_us, 3900);
    }
}

/* A peer whose clock runs 500 ppm fast: the one-way delay seems to grow, the round trip tells better. */
TEST(test_queue_ignores_drift)
{
    struct cl_rtt rtt;
    cl_rtt_init(&rtt);
    for (uint32_t s = 1; s < 20; s++)
        CHECK_EQ(queue(&rtt, s * SECOND_US, 0, 0, 0, s * 500), 0);
}

/* Both the sender's clock and the difference pass 2^32 us (71 minutes). */
TEST(test_clock_wraps)
{
    struct cl_rtt rtt;
    cl_rtt_init(&rtt);
    uint64_t near_wrap_us = 0xFFFFFFFFu - 3 * (uint64_t)SECOND_US;
    for (uint32_t s = 0; s < 6; s++)
        CHECK_EQ(queue(&rtt, near_wrap_us + s * (uint64_t)SECOND_US, s ? 300 : 0, 0, 0, 77), s ? 300 : 0);
}
