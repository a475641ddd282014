#include "congestion/loss_trial.h"

#include <stddef.h>

#include "tests/check.h"

static const struct cl_loss_trial FRESH = {.least = CL_LOSS_TRIAL_LOSS, .enough = CL_LOSS_TRIAL_PACKETS};

/* The lost packets are lost one by one. */
static enum cl_loss_trial_verdict judge(struct cl_loss_trial *trial, uint32_t acked, uint32_t lost)
{
    cl_loss_trial_count(trial, acked, 0);
    for (uint32_t i = 0; i < lost; i++)
        cl_loss_trial_count(trial, 0, 1);
    return cl_loss_trial_judge(trial, false);
}

TEST(test_what_is_tolerated)
{
    static const struct {
        uint32_t acked, lost;
        bool full;
    } CASES[] = {{1000, 0, false}, {990, 10, false}, {975, 25, false}, {960, 40, true}, {30, 3, false},
                 {27, 3, false},   {20, 8, true},    {900, 100, true}, {0, 4, true},    {0, 3, false}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        struct cl_loss_trial trial = FRESH;
        CHECK_EQ(judge(&trial, CASES[i].acked, CASES[i].lost), CASES[i].full ? CL_LOSS_TRIAL_FULL : CL_LOSS_TRIAL_NONE);
    }
}

/* A share of 6 %: lost one by one, that is more than chance does; in bursts of 8 it may be chance for a while. */
TEST(test_a_few_bursts_are_chance)
{
    enum { BURST = 8, BETWEEN = 125 };
    struct cl_loss_trial trial = FRESH;
    CHECK_EQ(judge(&trial, 3 * BETWEEN, 3 * BURST), CL_LOSS_TRIAL_FULL);
    trial = FRESH;
    int bursts = 0;
    do {
        cl_loss_trial_count(&trial, BETWEEN, BURST);
        bursts++;
    } while (cl_loss_trial_judge(&trial, false) == CL_LOSS_TRIAL_NONE && bursts < 100);
    CHECK(bursts > 3 && bursts < 12);
}

/* A window of a few packets never loses four of them in a round. */
TEST(test_small_windows_add_up)
{
    struct cl_loss_trial trial = FRESH;
    int rounds = 1;
    while (judge(&trial, 3, 1) == CL_LOSS_TRIAL_NONE && rounds < 100)
        rounds++;
    CHECK(rounds < 10);
}

/* A fifth of the packets is lost at any rate. */
TEST(test_a_lossy_link_is_found_out)
{
    struct cl_loss_trial trial = FRESH;
    CHECK_EQ(judge(&trial, 80, 20), CL_LOSS_TRIAL_FULL);
    CHECK_EQ(judge(&trial, 8, 2), CL_LOSS_TRIAL_NONE); /* too few to tell */
    CHECK_EQ(judge(&trial, 72, 18), CL_LOSS_TRIAL_LOSSY);
    for (int i = 0; i < 100; i++)
        CHECK_EQ(judge(&trial, 80, 20), CL_LOSS_TRIAL_NONE);
    int more = 0;
    while (judge(&trial, 60, 40) == CL_LOSS_TRIAL_NONE && more < 100)
        more++;
    CHECK(more < 5);
}

/* A full buffer that others fill as well: fewer packets are lost after each cut, but never few. */
TEST(test_a_full_buffer_stays_one)
{
    struct cl_loss_trial trial = FRESH;
    double sent = 4, link = 1;
    int cuts = 0;
    for (; sent > link * 1.05 && cuts < 20; cuts++) {
        uint32_t lost = (uint32_t)(200 * (1 - link / sent));
        enum cl_loss_trial_verdict verdict = judge(&trial, 200 - lost, lost);
        CHECK(verdict != CL_LOSS_TRIAL_LOSSY);
        if (verdict != CL_LOSS_TRIAL_FULL)
            break;
        sent *= 1 - CL_LOSS_TRIAL_CUT;
    }
    CHECK(sent < 1.1);
}

/* So much loss is never put down to the link: a cut would tell too little. */
TEST(test_half_of_all_packets)
{
    struct cl_loss_trial trial = FRESH;
    for (int i = 0; i < 50; i++)
        CHECK_EQ(judge(&trial, 100, 100), CL_LOSS_TRIAL_FULL);
}

TEST(test_a_queue_is_no_mystery)
{
    struct cl_loss_trial trial = FRESH;
    for (int i = 0; i < 10; i++) {
        cl_loss_trial_count(&trial, 80, 20);
        CHECK_EQ(cl_loss_trial_judge(&trial, true), CL_LOSS_TRIAL_FULL);
    }
}

TEST(test_tolerance_is_forgotten)
{
    struct cl_loss_trial trial = FRESH;
    judge(&trial, 80, 20);
    CHECK_EQ(judge(&trial, 80, 20), CL_LOSS_TRIAL_LOSSY);
    for (int i = 0; i < 200; i++)
        CHECK_EQ(judge(&trial, 300, 0), CL_LOSS_TRIAL_NONE);
    cl_loss_trial_skip(&trial);
    CHECK_EQ(judge(&trial, 80, 20), CL_LOSS_TRIAL_FULL);
}
