#include "congestion/active_set.h"

#include "tests/check.h"

enum { IDLE_US = 1000 };

TEST(test_counts_who_was_seen_lately)
{
    struct cl_active_set active_set = {0};
    struct cl_active_set_member members[3] = {0};
    for (uint64_t i = 0; i < 3; i++)
        cl_active_set_see(&active_set, &members[i], i * 100);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 200), 3);
    cl_active_set_see(&active_set, &members[0], 300); /* again: it is the last one to go */
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 300), 3);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 1100), 3);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 1101), 2);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 1300), 1);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 1301), 0);
    cl_active_set_see(&active_set, &members[1], 1400);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 1400), 1);
}

TEST(test_leave)
{
    struct cl_active_set active_set = {0};
    struct cl_active_set_member members[3] = {0};
    cl_active_set_leave(&active_set, &members[0]); /* was never there */
    for (uint64_t i = 0; i < 3; i++)
        cl_active_set_see(&active_set, &members[i], 5);
    cl_active_set_leave(&active_set, &members[1]);
    cl_active_set_leave(&active_set, &members[1]);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 5), 2);
    cl_active_set_leave(&active_set, &members[2]);
    cl_active_set_leave(&active_set, &members[0]);
    CHECK_EQ(cl_active_set_count(&active_set, IDLE_US, 5), 0);
    CHECK(active_set.first == NULL && active_set.last == NULL);
}
