#include "congestion/batches.h"

#include "tests/check.h"

enum { ROUND_US = 1000, PACKETS = 100 /* per round */ };

static uint32_t round_trip_us; /* of the interface */

/* Rounds in which `lost` of PACKETS are lost one by one, until batches are wanted or not; at most so many. */
static int rounds_until(struct cl_batches *batches, bool wanted, uint32_t lost, uint64_t *now_us, int most)
{
    int rounds = 0;
    for (; rounds < most && cl_batches_wanted(batches, *now_us) != wanted; rounds++) {
        *now_us += ROUND_US;
        cl_batches_count(batches, PACKETS - lost, 0);
        for (uint32_t i = 0; i < lost; i++)
            cl_batches_count(batches, 0, 1);
        cl_batches_judge(batches, round_trip_us, *now_us);
    }
    return rounds;
}

/* Batches in a trial, which begins as `lost` of PACKETS are lost. */
static struct cl_batches begin_trial(uint32_t lost, uint64_t *now_us)
{
    struct cl_batches batches;
    *now_us = 1000000;
    cl_batches_init(&batches);
    CHECK(rounds_until(&batches, false, lost, now_us, 1000) < 10);
    return batches;
}

TEST(test_few_losses_are_no_reason)
{
    struct cl_batches batches;
    uint64_t now_us = 1000000;
    cl_batches_init(&batches);
    CHECK(cl_batches_wanted(&batches, now_us));
    CHECK_EQ(rounds_until(&batches, false, 0, &now_us, 1000), 1000);
    CHECK_EQ(rounds_until(&batches, false, 1, &now_us, 1000), 1000);
    CHECK(rounds_until(&batches, false, 4, &now_us, 1000) < 10);
}

/* A whole batch may be lost now and then, where a queue of the host itself overflows. It is no reason, however long no
 * packet was lost before, and however few packets were counted before. */
TEST(test_a_lost_batch_is_no_reason)
{
    for (int before = 0; before < 200; before++) {
        struct cl_batches batches;
        uint64_t now_us = 1000000;
        cl_batches_init(&batches);
        CHECK_EQ(rounds_until(&batches, false, 0, &now_us, before), before);
        cl_batches_count(&batches, 0, 64); /* two at once */
        cl_batches_judge(&batches, round_trip_us, now_us += ROUND_US);
        cl_batches_count(&batches, 0, 32);
        CHECK_EQ(rounds_until(&batches, false, 0, &now_us, 100), 100);
    }
}

/* Several bursts within a short time are no reason either, if few packets are lost in a longer time. */
TEST(test_losses_now_and_then_are_no_reason)
{
    struct cl_batches batches;
    uint64_t now_us = 1000000;
    cl_batches_init(&batches);
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(rounds_until(&batches, false, 0, &now_us, 60), 60);
        for (int burst = 0; burst < 7; burst++) {
            cl_batches_count(&batches, 0, 7);
            CHECK_EQ(rounds_until(&batches, false, 0, &now_us, 1), 1);
        }
    }
}

/* The buffer is too short for a batch. Over a long way, packets that left before the trial are found to be lost for a
 * whole round trip. */
TEST(test_losses_that_stop_without_batches)
{
    for (round_trip_us = 0; round_trip_us <= 200000; round_trip_us += 100000) {
        uint64_t now_us;
        struct cl_batches batches = begin_trial(4, &now_us);
        uint64_t start_us = now_us;
        for (uint32_t i = 0; i < 15 + round_trip_us / ROUND_US; i++)
            CHECK_EQ(rounds_until(&batches, true, 50, &now_us, 1), 1);
        CHECK(rounds_until(&batches, true, 0, &now_us, 100000) > 500);
        CHECK(now_us > start_us + 1000000 && now_us < start_us + 1100000 + 2 * round_trip_us);
        CHECK(rounds_until(&batches, false, 4, &now_us, 1000) < 10); /* and again */
    }
    round_trip_us = 0;
}

/* The link loses packets, whatever the sender does. */
TEST(test_losses_that_go_on_without_batches)
{
    uint64_t now_us;
    struct cl_batches batches = begin_trial(4, &now_us);
    uint64_t start_us = now_us;
    CHECK(rounds_until(&batches, true, 4, &now_us, 1000) < 110);
    CHECK(now_us > start_us + 80000); /* enough packets to tell */
    CHECK_EQ(rounds_until(&batches, false, 4, &now_us, 1000), 1000);
}

/* Others fill the buffer, too: without batches fewer packets are lost, but still too many. */
TEST(test_losses_that_nearly_stop)
{
    uint64_t now_us;
    struct cl_batches batches = begin_trial(10, &now_us);
    uint64_t start_us = now_us;
    rounds_until(&batches, true, 4, &now_us, 100000);
    CHECK(now_us > start_us + 1000000 && now_us < start_us + 1100000);
}

TEST(test_a_trial_without_enough_packets_ends)
{
    uint64_t now_us;
    struct cl_batches batches = begin_trial(4, &now_us);
    CHECK(!cl_batches_wanted(&batches, now_us + 10000000));
    cl_batches_judge(&batches, round_trip_us, now_us + 10000000);
    CHECK(cl_batches_wanted(&batches, now_us + 10000000));
}

TEST(test_packets_of_other_trials_do_not_count)
{
    struct cl_batches batches;
    uint64_t now_us = 1000000;
    cl_batches_init(&batches);
    for (int i = 0; i < 100; i++) {
        cl_batches_count(&batches, 0, 3);
        cl_batches_forget(&batches);
    }
    CHECK_EQ(rounds_until(&batches, false, 0, &now_us, 100), 100);
    rounds_until(&batches, false, 4, &now_us, 1000);
    CHECK(!cl_batches_wanted(&batches, now_us));
    cl_batches_forget(&batches);
    CHECK(cl_batches_wanted(&batches, now_us));
}
