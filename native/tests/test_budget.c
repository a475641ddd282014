#include "protocol/budget.h"

#include "commlayer.h"
#include "tests/check.h"

enum { GIVEN = 1 << 20 };

static struct cl_budget budget_of(uint64_t bytes)
{
    struct cl_budget budget;
    cl_budget_init(&budget, bytes);
    return budget;
}

TEST(test_a_given_budget_stays)
{
    struct cl_budget budget = budget_of(GIVEN);
    CHECK_EQ(cl_budget_share(&budget), GIVEN);
    cl_budget_measure(&budget, 1.25e9, 2000);
    CHECK_EQ(cl_budget_share(&budget), GIVEN);
}

TEST(test_a_derived_budget_is_what_the_link_carries_in_one_and_a_half_rounds)
{
    struct cl_budget budget = budget_of(CL_CREDIT_DERIVED);
    uint64_t start = cl_budget_share(&budget);
    CHECK(start > 0);
    cl_budget_measure(&budget, 0, 2000); /* the capacity is not known yet */
    CHECK_EQ(cl_budget_share(&budget), start);
    cl_budget_measure(&budget, 1.25e9, 2000);
    CHECK_EQ(cl_budget_share(&budget), 3750000);
    for (int i = 0; i < 1000; i++) /* one of two peers is far away */
        cl_budget_measure(&budget, 1.25e9, i % 2 ? 1000 : 3000);
    CHECK(cl_budget_share(&budget) > 3700000 && cl_budget_share(&budget) < 3800000);
    cl_budget_measure(&budget, 1.25e9, 1e15); /* nonsense has limits, and does not last */
    CHECK_EQ(cl_budget_share(&budget), 1 << 30);
    for (int i = 0; i < 5000; i++)
        cl_budget_measure(&budget, 100, 1);
    CHECK_EQ(cl_budget_share(&budget), 1 << 15);
}

TEST(test_processes_of_a_host_share)
{
    struct cl_budget budget = budget_of(GIVEN);
    cl_budget_heard(&budget); /* there are no others */
    CHECK_EQ(cl_budget_share(&budget), GIVEN);
    for (int interface = 0; interface < 2; interface++) { /* told twice, counted once */
        cl_budget_hear(&budget, 2, GIVEN / 4);
        cl_budget_hear(&budget, 0, GIVEN / 8);
        cl_budget_hear(&budget, 1, 0);
    }
    CHECK_EQ(cl_budget_share(&budget), GIVEN); /* not all have been heard */
    cl_budget_heard(&budget);
    CHECK_EQ(cl_budget_share(&budget), GIVEN - GIVEN / 4 - GIVEN / 8);
    cl_budget_hear(&budget, 0, GIVEN);
    cl_budget_hear(&budget, 2, UINT64_MAX); /* another process wrote it */
    cl_budget_hear(&budget, CL_NEIGHBOURS_MAX, GIVEN);
    cl_budget_heard(&budget);
    CHECK_EQ(cl_budget_share(&budget), GIVEN / 3); /* they leave nothing, but an equal part is always this process's */
    cl_budget_heard(&budget);                      /* they are gone */
    CHECK_EQ(cl_budget_share(&budget), GIVEN);
}
