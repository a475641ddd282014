#include "protocol/reordering.h"

#include "tests/check.h"

static struct cl_reordering reordering;

static void count_rounds(uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        cl_reordering_count_round(&reordering);
}

TEST(test_limits_grow_as_far_as_needed)
{
    reordering = (struct cl_reordering){0};
    CHECK_EQ(cl_reordering_threshold(&reordering), 3);
    CHECK_EQ(cl_reordering_wait_us(&reordering, 800), 901);
    cl_reordering_disprove(&reordering, 2); /* it came late by the time */
    CHECK_EQ(cl_reordering_threshold(&reordering), 3);
    CHECK_EQ(cl_reordering_wait_us(&reordering, 800), 1001);
    cl_reordering_disprove(&reordering, 20);
    cl_reordering_disprove(&reordering, 10);
    CHECK_EQ(cl_reordering_threshold(&reordering), 20);
    CHECK_EQ(cl_reordering_wait_us(&reordering, 800), 1601);
    cl_reordering_disprove(&reordering, UINT64_MAX);
    CHECK_EQ(cl_reordering_threshold(&reordering), CL_REORDERING_THRESHOLD_MAX);
    CHECK_EQ(cl_reordering_wait_us(&reordering, 800), 1601);
}

/* A network that reordered for a while, and then only loses. */
TEST(test_limits_shrink_again)
{
    reordering = (struct cl_reordering){0};
    for (uint32_t i = 0; i < 3; i++)
        cl_reordering_disprove(&reordering, 103);
    count_rounds(CL_REORDERING_PERSIST - 1);
    CHECK_EQ(cl_reordering_threshold(&reordering), 103); /* not at once */
    count_rounds(1);
    CHECK_EQ(cl_reordering_threshold(&reordering), 53);
    CHECK_EQ(cl_reordering_wait_us(&reordering, 800), 1201);
    count_rounds(10 * CL_REORDERING_PERSIST);
    CHECK_EQ(cl_reordering_threshold(&reordering), 3);
    CHECK_EQ(cl_reordering_wait_us(&reordering, 800), 901);
}

TEST(test_limits_stay_while_the_network_reorders)
{
    reordering = (struct cl_reordering){0};
    cl_reordering_disprove(&reordering, 100);
    for (uint32_t i = 0; i < 4; i++) {
        count_rounds(CL_REORDERING_PERSIST - 1);
        cl_reordering_disprove(&reordering, 50);
    }
    CHECK_EQ(cl_reordering_threshold(&reordering), 100);
}
