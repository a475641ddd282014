#include "protocol/ranges.h"

#include <stdlib.h>
#include <string.h>

#include "tests/check.h"

TEST(test_adding_merges)
{
    SCOPED(cl_ranges_free) struct cl_ranges ranges = {0};
    CHECK(cl_ranges_add(&ranges, 10, 12));
    CHECK(cl_ranges_add(&ranges, 14, 16));
    CHECK(cl_ranges_add(&ranges, 1, 3));
    CHECK_EQ(ranges.count, 3);
    CHECK(cl_ranges_add(&ranges, 12, 14)); /* touches both neighbours */
    CHECK_EQ(ranges.count, 2);
    CHECK_EQ(ranges.list[1].start, 10);
    CHECK_EQ(ranges.list[1].end, 16);
    CHECK(cl_ranges_add(&ranges, 0, 100));
    CHECK_EQ(ranges.count, 1);
    CHECK_EQ(ranges.list[0].end, 100);
    CHECK(cl_ranges_add(&ranges, 5, 5)); /* nothing */
    CHECK_EQ(ranges.count, 1);
}

TEST(test_pop_is_ascending)
{
    SCOPED(cl_ranges_free) struct cl_ranges ranges = {0};
    uint64_t value;
    cl_ranges_add(&ranges, 7, 8);
    cl_ranges_add(&ranges, 3, 5);
    CHECK(cl_ranges_pop(&ranges, &value) && value == 3);
    CHECK(cl_ranges_pop(&ranges, &value) && value == 4);
    CHECK(cl_ranges_pop(&ranges, &value) && value == 7);
    CHECK(!cl_ranges_pop(&ranges, &value));
}

TEST(test_drop_below)
{
    SCOPED(cl_ranges_free) struct cl_ranges ranges = {0};
    cl_ranges_add(&ranges, 1, 3);
    cl_ranges_add(&ranges, 5, 9);
    cl_ranges_drop_below(&ranges, 7);
    CHECK_EQ(ranges.count, 1);
    CHECK_EQ(ranges.list[0].start, 7);
    cl_ranges_drop_below(&ranges, 9);
    CHECK_EQ(ranges.count, 0);
}

/* The ranges equal a plain array of flags, over random operations. */
TEST(test_against_model)
{
    enum { SPACE = 300 };
    unsigned random = 12345;
    for (int run = 0; run < 50; run++) {
        SCOPED(cl_ranges_free) struct cl_ranges ranges = {0};
        unsigned char model[SPACE] = {0};
        for (int step = 0; step < 100; step++) {
            random = random * 1103515245u + 12345u;
            unsigned start = (random >> 8) % SPACE, length = (random >> 20) % 12;
            unsigned end = start + length < SPACE ? start + length : SPACE;
            if (step % 17 == 16) {
                cl_ranges_drop_below(&ranges, start / 8);
                memset(model, 0, start / 8);
            } else {
                cl_ranges_add(&ranges, start, end);
                memset(model + start, 1, end - start);
            }
        }
        for (unsigned i = 0; i < SPACE; i++)
            CHECK_EQ(cl_ranges_contains(&ranges, i), model[i]);
        for (unsigned i = 0; i + 1 < ranges.count; i++) /* sorted, disjoint, not adjacent */
            CHECK(ranges.list[i].end < ranges.list[i + 1].start);
    }
}
