#include "protocol/timers.h"

#include <stddef.h>

#include "tests/check.h"

enum { COUNT = 200 };

TEST(test_order)
{
    SCOPED(cl_timers_free) struct cl_timers timers = {0};
    struct cl_timer timer[COUNT] = {{0}};
    CHECK_EQ(cl_timers_first_us(&timers), UINT64_MAX);
    CHECK(cl_timers_reserve(&timers, COUNT));
    for (uint64_t i = 0; i < COUNT; i++)
        cl_timers_arm(&timers, &timer[i], 1000 + i * 7919 % COUNT); /* a permutation */
    CHECK_EQ(cl_timers_first_us(&timers), 1000);
    CHECK(cl_timers_pop(&timers, 999) == NULL);
    for (uint64_t i = 0; i < COUNT; i++) {
        struct cl_timer *first = cl_timers_pop(&timers, 5000);
        CHECK_EQ(first->deadline_us, 1000 + i);
        CHECK_EQ(first->slot, 0);
    }
    CHECK(cl_timers_pop(&timers, 5000) == NULL);
}

TEST(test_only_earlier_counts)
{
    SCOPED(cl_timers_free) struct cl_timers timers = {0};
    struct cl_timer a = {0}, b = {0};
    cl_timers_reserve(&timers, 2);
    cl_timers_arm(&timers, &a, 100);
    cl_timers_arm(&timers, &b, 200);
    cl_timers_arm(&timers, &a, 300);
    CHECK_EQ(cl_timers_first_us(&timers), 100);
    cl_timers_arm(&timers, &b, 50);
    CHECK_EQ(cl_timers_first_us(&timers), 50);
    cl_timers_arm(&timers, &b, UINT64_MAX);
    CHECK(cl_timers_pop(&timers, 1000) == &b);
    CHECK(cl_timers_pop(&timers, 1000) == &a);
    CHECK(cl_timers_pop(&timers, 1000) == NULL);
}
