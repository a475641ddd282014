#include "congestion/cc.h"

#include "tests/check.h"

enum { BYTES = 1472 };

static struct cl_cc cc;
static uint64_t number;

static void start(void)
{
    cl_cc_init(&cc, BYTES);
    number = 0;
}

/* One round trip: everything in the window is acknowledged, after queue_us in queues; `lost` of the packets are lost,
 * and `marked` of the others are marked. */
static void marked_round_trip(uint32_t queue_us, uint32_t lost, uint64_t marked, bool limited)
{
    uint64_t packets = cc.window / BYTES, next = number + 2 * packets;
    for (uint64_t i = 0; i < packets; i++) {
        number++;
        if (i < lost) {
            cl_cc_on_lost(&cc, 1);
            continue;
        }
        struct cl_cc_sample sample = {.bytes = BYTES,
                                      .packets = 1,
                                      .marked = i < lost + marked,
                                      .largest = number,
                                      .next = next,
                                      .limited = limited,
                                      .timed = true,
                                      .queue_us = queue_us,
                                      .packet_us = 60};
        cl_cc_on_acked(&cc, &sample);
    }
}

static void round_trip(uint32_t queue_us, uint32_t lost, bool limited)
{
    marked_round_trip(queue_us, lost, 0, limited);
}

static uint64_t window(void)
{
    return cc.window / BYTES;
}

TEST(test_slow_start_doubles_until_a_queue_appears)
{
    start();
    CHECK_EQ(window(), 32);
    round_trip(0, 0, true);
    CHECK_EQ(window(), 64);
    round_trip(100, 0, true);
    CHECK_EQ(window(), 128);
    round_trip(3500, 0, true);
    uint64_t before = window();
    round_trip(3500, 0, true);
    CHECK(window() > before && window() <= before + 3);
}

TEST(test_converges_to_the_target)
{
    start();
    /* a link with room for 40 packets in flight; each further packet waits 100 us */
    for (int i = 0; i < 300; i++)
        round_trip(window() > 40 ? (uint32_t)(window() - 40) * 100 : 0, 0, true);
    for (int i = 0; i < 50; i++) {
        round_trip(window() > 40 ? (uint32_t)(window() - 40) * 100 : 0, 0, true);
        CHECK(window() > 60 && window() < 90); /* 80 is where the target is */
    }
}

TEST(test_decreases_once_per_round)
{
    start();
    round_trip(10000, 0, true);
    CHECK(window() >= 16);
}

TEST(test_random_loss_does_not_matter)
{
    start();
    round_trip(0, 0, true);
    round_trip(0, 0, true);
    uint64_t before = window();
    for (int i = 0; i < 20; i++)
        round_trip(3900, 4, true); /* 3 % */
    CHECK(window() >= before);
}

/* The same where a queue always stands, shorter than half of the usual target but longer than half of the target to
 * which a trial goes down: the losses go on, so the trial ends and undoes its cut. */
TEST(test_random_loss_beside_a_queue_does_not_matter)
{
    start();
    for (int i = 0; i < 20; i++)
        round_trip(1500, 0, true);
    uint64_t before = window();
    for (int i = 0; i < 60; i++)
        round_trip(1500, (uint32_t)window() / 20 + 1, true);
    CHECK(window() >= before);
    CHECK_EQ(cc.target_us, 4000);
}

TEST(test_overflow_shrinks_window_and_target)
{
    start();
    round_trip(0, 0, true);
    uint64_t before = window();
    for (int i = 0; i < 3; i++) /* a quarter overflows, until the window is smaller */
        round_trip(1500, window() < before ? 0 : (uint32_t)(window() / 4), true);
    CHECK(window() < before);
    CHECK(cc.target_us < 1500);
    for (int i = 0; i < 500; i++)
        round_trip(0, 0, false);
    CHECK_EQ(cc.target_us, 4000); /* forgiven after a while */
}

TEST(test_idle_sender_does_not_grow)
{
    start();
    for (int i = 0; i < 10; i++)
        round_trip(0, 0, false);
    CHECK_EQ(window(), 32);
}

TEST(test_timeouts)
{
    start();
    cl_cc_on_pto(&cc, 1);
    cl_cc_on_pto(&cc, 2);
    CHECK_EQ(window(), 32);
    for (uint32_t i = 3; i < 20; i++)
        cl_cc_on_pto(&cc, i);
    CHECK_EQ(window(), 8);
}

/* The window of a contest is that of one flow beside others, which are gone at its end. */
TEST(test_the_window_doubles_after_a_contest)
{
    start();
    round_trip(3500, 0, true); /* no slow start any more */
    cl_cc_resume(&cc, 50 * BYTES);
    CHECK_EQ(window(), 50);
    round_trip(0, 0, true);
    CHECK_EQ(window(), 100);
    round_trip(3500, 0, true);
    uint64_t before = window();
    round_trip(1000, 0, true);
    CHECK(window() > before && window() < before + 10);
    cl_cc_resume(&cc, 50 * BYTES);
    marked_round_trip(0, 0, 1, true); /* a mark has ended it: nothing doubles */
    CHECK(window() < 55);
}

/* Far below the target delay: marks alone show that a switch's queue is long. Few marks cost little, and the window
 * comes to rest soon after they begin; all marked, it halves. */
TEST(test_marks)
{
    start();
    round_trip(0, 0, true);
    round_trip(0, 0, true);
    CHECK_EQ(window(), 128);
    marked_round_trip(10, 0, 1000, true);
    CHECK(window() >= 64 && window() <= 65); /* slow start is over, too */
    for (int i = 0; i < 300; i++)
        marked_round_trip(10, 0, window() > 40 ? window() - 40 : 0, true); /* packets beyond 40 */
    for (int i = 0; i < 50; i++) {
        uint64_t before = window();
        marked_round_trip(10, 0, window() > 40 ? window() - 40 : 0, true);
        CHECK(window() > 40 && window() < 80);
        CHECK(4 * window() > 3 * before);
    }
    for (int i = 0; i < 100; i++)
        marked_round_trip(10, 0, 1000, true);
    CHECK_EQ(window(), 2);
}
