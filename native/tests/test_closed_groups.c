#include "protocol/closed_groups.h"

#include <stddef.h>

#include "protocol/endpoint.h"
#include "tests/check.h"

TEST(test_first_reason_stays)
{
    struct cl_closed_groups closed = {0};
    CHECK(cl_closed_groups_find(&closed, 5) == NULL);
    CHECK(cl_closed_groups_add(&closed, 5, CL_EPEERLOST, 3));
    CHECK(!cl_closed_groups_add(&closed, 5, 0, 3));
    CHECK_EQ(cl_closed_groups_find(&closed, 5)->reason, CL_EPEERLOST);
    CHECK_EQ(cl_closed_groups_find(&closed, 5)->culprit, 3);
    CHECK(cl_closed_groups_find(&closed, 6) == NULL);
}

TEST(test_memory_is_limited)
{
    struct cl_closed_groups closed = {0};
    for (uint32_t group = 0; group < CL_CLOSED_GROUPS_MAX + 10; group++)
        CHECK(cl_closed_groups_add(&closed, group, 0, 3));
    CHECK_EQ(closed.count, CL_CLOSED_GROUPS_MAX);
    CHECK(cl_closed_groups_find(&closed, 9) == NULL);
    CHECK(cl_closed_groups_find(&closed, 10) != NULL);
    CHECK(cl_closed_groups_find(&closed, CL_CLOSED_GROUPS_MAX + 9) != NULL);
}

TEST(test_reports_come_in_order)
{
    struct cl_closed_groups closed = {0};
    struct cl_closed_group report;
    CHECK(!cl_closed_groups_next_report(&closed, &report));
    for (uint32_t group = 0; group < CL_CLOSED_GROUPS_MAX + 20; group++) {
        CHECK(cl_closed_groups_add(&closed, group, CL_EMISMATCH, 4));
        if (group % 2 == 0)
            cl_closed_groups_report(&closed, group);
    }
    for (uint32_t group = 20; group < CL_CLOSED_GROUPS_MAX + 20; group += 2) {
        CHECK(cl_closed_groups_next_report(&closed, &report));
        CHECK_EQ(report.group, group);
        CHECK_EQ(report.culprit, 4);
    }
    CHECK(!cl_closed_groups_next_report(&closed, &report));
}
