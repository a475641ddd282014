#include "plan/deadline.h"

#include "tests/check.h"

TEST(test_too_few_runs_tell_nothing)
{
    struct cl_deadline deadline = {0};
    for (int i = 0; i < CL_DEADLINE_RUNS_LEAST - 1; i++) {
        cl_deadline_add(&deadline, 100);
        CHECK_EQ(cl_deadline_us(&deadline), 0);
    }
    cl_deadline_add(&deadline, 100);
    CHECK_EQ(cl_deadline_us(&deadline), 121);
}

TEST(test_rare_stragglers_do_not_count)
{
    struct cl_deadline deadline = {0};
    for (int i = 0; i < CL_DEADLINE_RUNS; i++)
        cl_deadline_add(&deadline, i % 32 == 7 ? 5000000000 : 1000 + (uint64_t)i % 2); /* 3 % of the runs */
    CHECK_EQ(cl_deadline_us(&deadline), 1202);
}

TEST(test_it_follows)
{
    struct cl_deadline deadline = {0};
    for (int i = 0; i < 100; i++)
        cl_deadline_add(&deadline, 1000);
    for (int round = 0; round < 40; round++) /* the network is three times slower; each run ends at its deadline */
        for (int i = 0; i < 8; i++) {
            uint64_t deadline_us = cl_deadline_us(&deadline);
            cl_deadline_add(&deadline, deadline_us < 3000 ? deadline_us : 3000);
        }
    CHECK(cl_deadline_us(&deadline) >= 3000);
    for (int i = 0; i < CL_DEADLINE_RUNS; i++)
        cl_deadline_add(&deadline, 500);
    CHECK_EQ(cl_deadline_us(&deadline), 601);
}
