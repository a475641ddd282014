#include "protocol/closed_groups.h"

#include <stddef.h>

#include "protocol/endpoint.h"
#include "tests/check.h"

static void test_first_reason_stays(void)
{
    struct cl_closed_groups retired = {0};
    CHECK(!cl_closed_groups_find(&retired, 5));
    CHECK(cl_closed_groups_add(&retired, 5, CL_EPEERLOST, 3));
    CHECK(!cl_closed_groups_add(&retired, 5, 0, 3));
    CHECK_EQ(cl_closed_groups_find(&retired, 5)->reason, CL_EPEERLOST);
    CHECK_EQ(cl_closed_groups_find(&retired, 5)->blame, 3);
    CHECK(!cl_closed_groups_find(&retired, 6));
    cl_closed_groups_free(&retired);
}

static void test_bounded(void)
{
    struct cl_closed_groups retired = {0};
    for (uint32_t group = 0; group < CL_CLOSED_GROUPS_MAX + 10; group++)
        CHECK(cl_closed_groups_add(&retired, group, 0, 3));
    CHECK_EQ(retired.count, CL_CLOSED_GROUPS_MAX);
    CHECK(!cl_closed_groups_find(&retired, 9));
    CHECK(cl_closed_groups_find(&retired, 10) != NULL);
    CHECK(cl_closed_groups_find(&retired, CL_CLOSED_GROUPS_MAX + 9) != NULL);
    cl_closed_groups_free(&retired);
}

int main(void)
{
    RUN(test_first_reason_stays);
    RUN(test_bounded);
    return CHECK_REPORT();
}
