#include "protocol/announcements.h"

#include <stddef.h>

#include "tests/check.h"

TEST(test_tags_are_wanted_until_they_are_not)
{
    struct cl_announcements announcements = {0};
    CHECK(!cl_announcements_wants(&announcements, 1, 7));
    for (uint32_t tag = 0; tag < 100; tag++)
        CHECK(cl_announcements_want(&announcements, 1, tag));
    CHECK(cl_announcements_wants(&announcements, 1, 7));
    CHECK(!cl_announcements_wants(&announcements, 2, 7));
    CHECK(cl_announcements_unwant(&announcements, 1, 7));
    CHECK(!cl_announcements_unwant(&announcements, 1, 7));
    CHECK(!cl_announcements_wants(&announcements, 1, 7));
    CHECK(cl_announcements_wants(&announcements, 1, 99));
    cl_announcements_free(&announcements);
    CHECK(!cl_announcements_wants(&announcements, 1, 99));
}

TEST(test_messages_are_in_order_of_arrival)
{
    struct cl_announcements announcements = {0};
    struct cl_receive receives[3] = {0};
    for (int i = 0; i < 3; i++)
        cl_announcements_add(&announcements, &receives[i]);
    CHECK(receives[1].announced);
    cl_announcements_remove(&announcements, &receives[1]);
    CHECK(!receives[1].announced);
    CHECK(announcements.messages.first == &receives[0].message && receives[0].message.next == &receives[2].message);
    cl_announcements_remove(&announcements, &receives[0]);
    CHECK(announcements.messages.first == &receives[2].message && announcements.messages.last == &receives[2].message);
    cl_announcements_remove(&announcements, &receives[2]);
    CHECK(announcements.messages.first == NULL && announcements.messages.last == NULL);
}
