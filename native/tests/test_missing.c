#include "plan/missing.h"

#include "tests/check.h"

TEST(test_what_goes_where)
{
    SCOPED(cl_missing_free) struct cl_missing missing = {0};
    struct cl_range ranges[] = {{0, 10}, {40, 50}};
    struct cl_step send = {.kind = CL_SEND, .source = CL_INPUT, .source_offset = 100};
    struct cl_step other = {.kind = CL_SEND, .source = CL_OUTPUT, .source_offset = 100};
    struct cl_step copy = {.kind = CL_RECV_COPY, .target = CL_OUTPUT, .target_offset = 1000};
    CHECK(cl_missing_add(&missing, &send, ranges, 2));
    CHECK(cl_missing_add(&missing, &other, ranges, 2));
    CHECK(cl_missing_add(&missing, &copy, ranges, 1));
    CHECK_EQ(missing.uncounted.count, 2);
    CHECK_EQ(missing.uncounted.list[0].start, 100);
    CHECK_EQ(missing.uncounted.list[1].end, 150);
    CHECK_EQ(missing.stale.count, 1);
    CHECK_EQ(missing.stale.list[0].start, 1000);
    CHECK_EQ(missing.absent_count, 0);
}

TEST(test_encoded_ranges_are_those_of_the_values)
{
    SCOPED(cl_missing_free) struct cl_missing missing = {0};
    uint16_t int8 = (CL_CODEC_INT8 + 1) << 8; /* 64 values in 66 bytes */
    struct cl_range ranges[] = {{0, 66}, {3 * 66, 5 * 66}};
    struct cl_step send = {.kind = CL_SEND, .flags = int8, .source = CL_SCRATCH, .source_offset = 7, .length = 1100};
    send.target_offset = 4096;
    struct cl_step reduce = {.kind = CL_RECV_REDUCE, .flags = int8, .target = CL_OUTPUT, .length = 1100};
    CHECK(cl_missing_add(&missing, &send, ranges, 2));
    CHECK(cl_missing_add(&missing, &reduce, ranges, 2));
    CHECK_EQ(missing.uncounted.list[0].start, 4096);
    CHECK_EQ(missing.uncounted.list[0].end, 4096 + 256);
    CHECK_EQ(missing.uncounted.list[1].start, 4096 + 768);
    CHECK_EQ(missing.uncounted.list[1].end, 4096 + 1100); /* the last block is not full */
    CHECK_EQ(missing.absent[1].end, 1100);
}

TEST(test_parts)
{
    SCOPED(cl_missing_free) struct cl_missing missing = {0};
    struct cl_step reduce = {.kind = CL_RECV_REDUCE, .target = CL_OUTPUT, .target_offset = 100};
    struct cl_range a[] = {{10, 30}, {60, 70}}, b[] = {{20, 40}}, c[] = {{20, 30}, {95, 200}};
    CHECK(cl_missing_add(&missing, &reduce, a, 2));
    CHECK(cl_missing_add(&missing, &reduce, b, 1));
    CHECK(cl_missing_add(&missing, &reduce, c, 2));
    static const struct {
        uint64_t end;
        uint32_t absent;
    } PARTS[] = {{110, 0}, {120, 1}, {130, 3}, {140, 1}, {160, 0}, {170, 1}, {195, 0}, {200, 1}};
    uint64_t at = 100;
    for (size_t i = 0; i < sizeof PARTS / sizeof *PARTS; i++) {
        CHECK_EQ(cl_missing_next(&missing, &at, 200), PARTS[i].absent);
        CHECK_EQ(at, PARTS[i].end);
    }
    at = 125;
    CHECK_EQ(cl_missing_next(&missing, &at, 128), 3);
    CHECK_EQ(at, 128);
}
