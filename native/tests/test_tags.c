#include "protocol/tags.h"
#include "tests/check.h"

#include <stdlib.h>

TEST(test_counts)
{
    SCOPED(cl_tags_free) struct cl_tags tags = {0};
    CHECK_EQ(cl_tags_messages(&tags, 0), 0);
    CHECK(cl_tags_add(&tags, 5, 1));
    CHECK(cl_tags_add(&tags, 5, 3));
    CHECK(cl_tags_add(&tags, UINT32_MAX, 2));
    CHECK(cl_tags_add(&tags, 0, 1));
    CHECK_EQ(cl_tags_messages(&tags, 5), 4);
    CHECK_EQ(cl_tags_messages(&tags, 4), 0);
    CHECK_EQ(cl_tags_messages(&tags, 6), 0);
    CHECK_EQ(cl_tags_messages(&tags, UINT32_MAX), 2);
    CHECK_EQ(cl_tags_messages(&tags, 0), 1);
    CHECK(cl_tags_add(&tags, 5, UINT32_MAX)); /* counts wrap */
    CHECK_EQ(cl_tags_messages(&tags, 5), 3);
}

/* tag = step, with several messages to a step, for ever: no more memory than at the start */
TEST(test_rising_tags_cost_nothing)
{
    SCOPED(cl_tags_free) struct cl_tags tags = {0};
    for (uint32_t step = 0; step < 100000; step++)
        for (int message = 0; message < 3; message++) {
            CHECK(cl_tags_add(&tags, step, 1));
            CHECK(tags.count <= 2);
        }
    CHECK_EQ(cl_tags_messages(&tags, 777), 3);
    CHECK_EQ(cl_tags_messages(&tags, 100000), 0);
}

/* Tags in any order, against a plain array; in the end all counts are the same again, and the runs one. */
TEST(test_any_order)
{
    enum { TAGS = 40, ROUNDS = 3000 };
    SCOPED(cl_tags_free) struct cl_tags tags = {0};
    uint32_t expected[TAGS] = {0}, most = 0;
    srand(1);
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t tag = (uint32_t)rand() % TAGS;
        CHECK(cl_tags_add(&tags, tag, 1));
        expected[tag]++;
        for (uint32_t each = 0; each < TAGS; each++)
            CHECK_EQ(cl_tags_messages(&tags, each), expected[each]);
        for (uint32_t run = 1; run < tags.count; run++) {
            const struct cl_tag_run *left = &tags.runs[run - 1], *right = &tags.runs[run];
            CHECK(left->first <= left->last && left->last < right->first);
            CHECK(left->messages != right->messages || left->last + 1 < right->first);
        }
    }
    for (uint32_t tag = 0; tag < TAGS; tag++)
        most = expected[tag] > most ? expected[tag] : most;
    for (uint32_t tag = 0; tag < TAGS; tag++)
        CHECK(cl_tags_add(&tags, tag, most - expected[tag]));
    CHECK_EQ(tags.count, 1);
}
