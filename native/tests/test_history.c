#include "core/history.h"

#include "tests/check.h"

static void test_exact_ids(void)
{
    struct cl_history history = {0};
    struct cl_message_id id = {1, 10, 3}, other_group = {2, 10, 3}, other_index = {1, 10, 4},
                         other_sequence = {1, 11, 3};
    CHECK(!cl_history_contains(&history, &id));
    CHECK(cl_history_add(&history, &id));
    CHECK(cl_history_contains(&history, &id));
    CHECK(!cl_history_contains(&history, &other_group));
    CHECK(!cl_history_contains(&history, &other_index));
    CHECK(!cl_history_contains(&history, &other_sequence));
    CHECK(cl_history_add(&history, &other_group));
    CHECK(cl_history_contains(&history, &other_group));
    cl_history_drop_group(&history, 1);
    CHECK(!cl_history_contains(&history, &id));
    CHECK(cl_history_contains(&history, &other_group));
    cl_history_free(&history);
}

static void test_whole_sequence(void)
{
    struct cl_history history = {0};
    struct cl_message_id first = {1, 5, 0}, any = {1, 5, 123456}, next = {1, 6, 0};
    CHECK(cl_history_add_sequence(&history, 1, 5));
    CHECK(cl_history_contains(&history, &first));
    CHECK(cl_history_contains(&history, &any));
    CHECK(!cl_history_contains(&history, &next));
    cl_history_free(&history);
}

/* A group that lives for long: memory stays bounded, the recent past is exact, the distant past counts as finished. */
static void test_bounded(void)
{
    struct cl_history history = {0};
    for (uint32_t sequence = 0; sequence < 50000; sequence++)
        for (uint32_t index = 3; index-- > 0;) { /* out of order */
            struct cl_message_id id = {1, sequence, index};
            cl_history_add(&history, &id);
        }
    CHECK(history.groups[0].finished.count <= CL_HISTORY_RANGES);
    struct cl_message_id old = {1, 7, 2}, recent = {1, 48000, 2}, never = {1, 48000, 3}, future = {1, 50000, 0};
    CHECK(cl_history_contains(&history, &old));
    CHECK(cl_history_contains(&history, &recent));
    CHECK(!cl_history_contains(&history, &never));
    CHECK(!cl_history_contains(&history, &future));
    cl_history_free(&history);
}

int main(void)
{
    RUN(test_exact_ids);
    RUN(test_whole_sequence);
    RUN(test_bounded);
    return CHECK_REPORT();
}
