#include "congestion/scavenger.h"

#include "tests/check.h"

enum { BYTES = 1500, ROUND_PACKETS = 8 };

static struct cl_scavenger scavenger;
static uint64_t number;

/* So many round trips in which packets meet a queue of this length. */
static void run(uint32_t rounds, uint32_t queue_us)
{
    for (uint32_t i = 0; i < rounds * ROUND_PACKETS; i++) {
        struct cl_scavenger_sample sample = {.bytes = BYTES,
                                             .largest = number,
                                             .next = number + ROUND_PACKETS,
                                             .limited = true,
                                             .timed = true,
                                             .queue_us = queue_us,
                                             .packet_us = 12};
        number++;
        cl_scavenger_on_acked(&scavenger, &sample);
    }
}

static void begin(void)
{
    number = 0;
    cl_scavenger_init(&scavenger, BYTES);
}

TEST(test_grows_alone)
{
    begin();
    uint64_t window = cl_scavenger_window(&scavenger);
    run(10, 0);
    CHECK(cl_scavenger_window(&scavenger) >= window + 10 * ROUND_PACKETS * BYTES);
    run(1, 300); /* the end of slow start */
    window = cl_scavenger_window(&scavenger);
    run(10, 300);
    CHECK(cl_scavenger_window(&scavenger) > window + 10 * BYTES);
    CHECK(cl_scavenger_window(&scavenger) < window + 10 * ROUND_PACKETS * BYTES);
}

/* Down to one packet beside a queue; then slowly, until it is sure that nobody else is there. */
TEST(test_yields_and_returns)
{
    begin();
    run(20, 0);
    run(50, 5000);
    CHECK_EQ(cl_scavenger_window(&scavenger), BYTES);
    run(CL_SCAVENGER_CALM_ROUNDS / 2, 0); /* the queue drains at times */
    CHECK(cl_scavenger_window(&scavenger) <= 6 * BYTES);
    run(20, 5000);
    CHECK_EQ(cl_scavenger_window(&scavenger), BYTES);
    run(CL_SCAVENGER_CALM_ROUNDS + 20, 0);
    CHECK(cl_scavenger_window(&scavenger) > 60 * BYTES);
}

/* A buffer of 0.2 ms overflows before the target is reached: from then on half of that is a queue. */
TEST(test_shallow_buffer)
{
    begin();
    run(20, 200);
    run(1, 300); /* the end of slow start */
    uint64_t window = cl_scavenger_window(&scavenger);
    cl_scavenger_on_lost(&scavenger);
    run(1, 200);
    CHECK(cl_scavenger_window(&scavenger) <= window / 2);
    run(40, 100);
    CHECK_EQ(cl_scavenger_window(&scavenger), BYTES);
}

TEST(test_slow_links_have_some_queue)
{
    begin();
    scavenger.packet_us = 1000;
    run(1, 0);
    for (int i = 0; i < 100; i++) {
        struct cl_scavenger_sample sample = {.bytes = BYTES,
                                             .largest = number,
                                             .next = number + 1,
                                             .limited = true,
                                             .timed = true,
                                             .queue_us = 3000,
                                             .packet_us = 1000};
        number++;
        cl_scavenger_on_acked(&scavenger, &sample);
    }
    CHECK(cl_scavenger_window(&scavenger) > 100 * BYTES);
}

TEST(test_silent_peer)
{
    begin();
    run(20, 0);
    uint64_t window = cl_scavenger_window(&scavenger);
    cl_scavenger_on_pto(&scavenger, 2); /* it may be asleep */
    CHECK_EQ(cl_scavenger_window(&scavenger), window);
    cl_scavenger_on_pto(&scavenger, 3);
    CHECK_EQ(cl_scavenger_window(&scavenger), window / 2);
}
