#include "congestion/peak.h"

#include "tests/check.h"

enum { BYTES = 1500 };

/* Packets for so long, one each gap_us, from a packet at now_us on. Returns when the last one passed. */
static uint64_t pass(struct cl_peak *peak, uint64_t gap_us, uint64_t duration_us, uint64_t now_us)
{
    for (uint64_t end_us = now_us + duration_us; now_us + gap_us <= end_us;)
        cl_peak_see(peak, BYTES, now_us += gap_us);
    return now_us;
}

TEST(test_unknown_before_enough_windows)
{
    struct cl_peak peak = {0};
    CHECK_EQ(cl_peak_rate(&peak), 0);
    uint64_t now_us = pass(&peak, 100, CL_PEAK_PART * CL_PEAK_WINDOW_US, 1000);
    CHECK_EQ(cl_peak_rate(&peak), 0);
    pass(&peak, 100, 200, now_us);
    CHECK_EQ(cl_peak_rate(&peak), 15000000);
}

/* What comes after a pause is no measurement with it, however short each stretch is. */
TEST(test_pauses_are_not_counted)
{
    struct cl_peak peak = {0};
    uint64_t now_us = 1000;
    for (int i = 0; i < 50; i++)
        now_us = pass(&peak, 100, CL_PEAK_WINDOW_US / 2, now_us) + CL_PEAK_PAUSE_US + 1;
    CHECK_EQ(cl_peak_rate(&peak), 0);
    for (int i = 0; i < 50; i++)
        now_us = pass(&peak, 100, 2 * CL_PEAK_WINDOW_US, now_us) + 10 * CL_PEAK_PAUSE_US;
    CHECK_EQ(cl_peak_rate(&peak), 15000000);
}

/* A collective that waits for another host's link still has fast moments here. */
TEST(test_slow_times_do_not_lower_it)
{
    struct cl_peak peak = {0};
    uint64_t now_us = 1000;
    for (int i = 0; i < 20; i++) {
        now_us = pass(&peak, 100, 2 * CL_PEAK_WINDOW_US, now_us);
        now_us = pass(&peak, 400, 10 * CL_PEAK_WINDOW_US, now_us);
        CHECK(cl_peak_rate(&peak) > 14500000); /* a window may have begun before */
    }
}

/* What is left of a link beside the traffic of others varies; a few lucky moments are not its rate. */
TEST(test_lucky_moments_do_not_raise_it)
{
    struct cl_peak peak = {0};
    uint64_t now_us = 1000;
    for (int i = 0; i < 20; i++) {
        now_us = pass(&peak, 100, CL_PEAK_WINDOW_US, now_us);
        now_us = pass(&peak, 200, 19 * CL_PEAK_WINDOW_US, now_us);
    }
    CHECK(cl_peak_rate(&peak) < 8000000);
}

/* The peak is an average: the burst of a host that slept, or of a queue that drains, is a small part of the window. */
TEST(test_bursts_count_little)
{
    struct cl_peak peak = {0};
    uint64_t now_us = 1000;
    for (int i = 0; i < 100; i++) {
        now_us = pass(&peak, 200, 8000, now_us);
        for (int j = 0; j < 20; j++) /* of the last 2 ms, at once */
            cl_peak_see(&peak, BYTES, now_us + 2000);
        now_us += 2000;
    }
    CHECK(cl_peak_rate(&peak) > 8500000);
    CHECK(cl_peak_rate(&peak) < 10500000);
}

TEST(test_forgets_a_link_that_became_slower)
{
    struct cl_peak peak = {0};
    uint64_t now_us = pass(&peak, 100, 1000000, 1000);
    CHECK_EQ(cl_peak_rate(&peak), 15000000);
    now_us = pass(&peak, 200, 4000000, now_us);
    CHECK_EQ(cl_peak_rate(&peak), 7500000);
}

/* The kernel's times of packets from several sockets are not in order. */
TEST(test_times_that_go_back)
{
    struct cl_peak peak = {0};
    for (uint64_t i = 0; i < 5000; i++)
        cl_peak_see(&peak, BYTES, 1000 + 100 * i - (i % 3) * 90);
    CHECK(cl_peak_rate(&peak) > 14500000);
    CHECK(cl_peak_rate(&peak) < 15500000);
}
