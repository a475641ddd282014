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
    struct cl_message messages[3] = {0};
    for (int i = 0; i < 3; i++)
        cl_announcements_add(&announcements, &messages[i]);
    CHECK(messages[1].announced);
    cl_announcements_remove(&announcements, &messages[1]);
    CHECK(!messages[1].announced);
    CHECK(announcements.messages.first == &messages[0] && messages[0].next == &messages[2]);
    cl_announcements_remove(&announcements, &messages[0]);
    CHECK(announcements.messages.first == &messages[2] && announcements.messages.last == &messages[2]);
    cl_announcements_remove(&announcements, &messages[2]);
    CHECK(announcements.messages.first == NULL && announcements.messages.last == NULL);
}
