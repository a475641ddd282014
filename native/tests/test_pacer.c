#include "congestion/pacer.h"

#include "tests/check.h"

enum { PACKET = 1500 };

/* Sends packets as fast as the pacer lets go, looking every step_us; returns the bytes sent. */
static uint64_t drain(struct cl_pacer *pacer, uint64_t from_us, uint64_t until_us, uint64_t step_us)
{
    uint64_t sent = 0;
    for (uint64_t now_us = from_us; now_us < until_us; now_us += step_us)
        while (cl_pacer_ready_us(pacer, false, now_us) <= now_us) {
            cl_pacer_sent(pacer, PACKET);
            sent += PACKET;
        }
    return sent;
}

/* The inequality of the header, and that no rate is wasted unless the sender sleeps longer than the burst. */
TEST(test_invariant)
{
    static const struct {
        uint64_t rate, step_us, burst;
    } CASES[] = {{125000, 10, 15000},
                 {125000, 5000, 15000},
                 {25000000, 1, 100000},
                 {25000000, 3000, 100000},
                 {12500000000u, 100, 50000000}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        struct cl_pacer pacer;
        uint64_t burst = CASES[i].burst, duration_us = 1000000;
        cl_pacer_init(&pacer, CASES[i].rate, burst, 500);
        uint64_t sent = drain(&pacer, 500, 500 + duration_us, CASES[i].step_us);
        CHECK(sent <= CASES[i].rate + burst + PACKET);
        CHECK(sent + CASES[i].rate / 50 >= CASES[i].rate);
    }
}

TEST(test_ready_gathers_a_quarter)
{
    struct cl_pacer pacer;
    cl_pacer_init(&pacer, 1000000, 40 * PACKET, 0); /* a byte per us */
    CHECK_EQ(cl_pacer_ready_us(&pacer, false, 0), 0);
    cl_pacer_sent(&pacer, 40 * PACKET);
    CHECK_EQ(cl_pacer_ready_us(&pacer, false, 0), 10 * PACKET + 1);
    CHECK_EQ(cl_pacer_ready_us(&pacer, false, 10 * PACKET + 1), 10 * PACKET + 1);
}

/* A sender that looks often sends no single packets meanwhile. Urgent ones may leave, and change nothing. */
TEST(test_nothing_leaves_while_a_batch_gathers)
{
    struct cl_pacer pacer;
    cl_pacer_init(&pacer, 1000000, 40 * PACKET, 0);
    CHECK_EQ(cl_pacer_batch(&pacer), 10 * PACKET);
    pacer.batches = true;
    cl_pacer_sent(&pacer, 40 * PACKET);
    for (uint64_t now_us = 0; now_us < 10 * PACKET; now_us += PACKET / 4) {
        CHECK_EQ(cl_pacer_ready_us(&pacer, true, now_us), now_us);
        uint64_t ready_us = cl_pacer_ready_us(&pacer, false, now_us);
        CHECK(ready_us >= 10 * PACKET && ready_us <= 10 * PACKET + 1);
    }
    CHECK_EQ(drain(&pacer, 10 * PACKET, 10 * PACKET + 1, 1), 10 * PACKET);
}

TEST(test_urgent_goes_on_debt)
{
    struct cl_pacer pacer;
    cl_pacer_init(&pacer, 1000000, 40 * PACKET, 0);
    cl_pacer_sent(&pacer, 40 * PACKET);
    uint32_t packets = 0;
    for (; cl_pacer_ready_us(&pacer, true, 0) == 0; packets++)
        cl_pacer_sent(&pacer, PACKET);
    CHECK_EQ(packets, 40);
    CHECK_EQ(cl_pacer_ready_us(&pacer, true, 0), 10 * PACKET + 1);
    CHECK_EQ(cl_pacer_ready_us(&pacer, false, 0), 50 * PACKET + 1); /* others pay it first */
}

TEST(test_no_rate_means_no_limit)
{
    struct cl_pacer pacer;
    cl_pacer_init(&pacer, 0, 0, 0);
    cl_pacer_sent(&pacer, 1 << 30);
    CHECK_EQ(cl_pacer_ready_us(&pacer, false, 7), 7);
}

TEST(test_smaller_burst_takes_tokens_away)
{
    struct cl_pacer pacer;
    cl_pacer_init(&pacer, 1000000, 100 * PACKET, 0);
    cl_pacer_set(&pacer, 1000000, 2 * PACKET, 0);
    CHECK_EQ(drain(&pacer, 0, 1, 1), 2 * PACKET);
}
