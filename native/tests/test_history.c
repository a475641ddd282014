#include "protocol/history.h"

#include "tests/check.h"

TEST(test_exact_ids)
{
    SCOPED(cl_history_free) struct cl_history history = {0};
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
}

TEST(test_whole_sequence)
{
    SCOPED(cl_history_free) struct cl_history history = {0};
    struct cl_message_id first = {1, 5, 0}, any = {1, 5, 123456}, next = {1, 6, 0};
    CHECK(cl_history_add_sequence(&history, 1, 5));
    CHECK(cl_history_contains(&history, &first));
    CHECK(cl_history_contains(&history, &any));
    CHECK(!cl_history_contains(&history, &next));
}

/* Operations that end as a whole, in any order, cost one range. */
TEST(test_whole_sequences_merge)
{
    SCOPED(cl_history_free) struct cl_history history = {0};
    for (uint32_t sequence = 0; sequence < 10000; sequence++)
        CHECK(cl_history_add_sequence(&history, 1, sequence ^ 1));
    CHECK_EQ(history.groups[0].finished.count, 1);
    struct cl_message_id last = {1, 9999, UINT32_MAX}, next = {1, 10000, 0};
    CHECK(cl_history_contains(&history, &last));
    CHECK(!cl_history_contains(&history, &next));
}

/* A group that lives for long: memory stays limited, the recent past is exact, the distant past counts as finished. */
TEST(test_memory_is_limited)
{
    SCOPED(cl_history_free) struct cl_history history = {0};
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
}

/* Thousands of operations overtake one, of which nothing is finished yet. */
TEST(test_an_old_operation_in_flight)
{
    SCOPED(cl_signatures_free) struct cl_signatures in_flight = {0};
    SCOPED(cl_history_free) struct cl_history history = {.in_flight = &in_flight};
    struct cl_message_id waiting = {1, 10, 0}, before = {1, 9, 0};
    CHECK(cl_signatures_add(&in_flight, 1, waiting.sequence, 0));
    CHECK(cl_signatures_add(&in_flight, 2, 0, 0)); /* of another group */
    for (uint32_t sequence = 0; sequence < 5 * CL_HISTORY_RANGES; sequence++) {
        struct cl_message_id id = {1, sequence, 0};
        if (sequence != waiting.sequence)
            cl_history_add(&history, &id);
    }
    CHECK(!cl_history_contains(&history, &waiting));
    CHECK(cl_history_contains(&history, &before));
    CHECK(history.groups[0].finished.count <= CL_HISTORY_RANGES); /* the operations that overtook it share ranges */
    cl_signatures_remove(&in_flight, 1, waiting.sequence);
    for (uint32_t sequence = 5 * CL_HISTORY_RANGES; sequence < 6 * CL_HISTORY_RANGES; sequence++) {
        struct cl_message_id id = {1, sequence, 0};
        cl_history_add(&history, &id);
    }
    CHECK(cl_history_contains(&history, &waiting)); /* long ago */
    CHECK(history.groups[0].finished.count <= CL_HISTORY_RANGES);
}

/* Tags come in any order, their receives are posted in order: the posted receives are known exactly, however many tags
 * there are. */
TEST(test_point_to_point)
{
    SCOPED(cl_history_free) struct cl_history history = {0};
    const uint32_t group = 1 | CL_GROUP_P2P;
    for (uint32_t tag = 0; tag < 3 * CL_HISTORY_RANGES; tag++) {
        struct cl_message_id id = {group, 2 * tag, 0}; /* with gaps */
        CHECK_EQ(cl_history_next_index(&history, group, id.sequence), 0);
        CHECK(cl_history_add_posted(&history, &id));
        CHECK(cl_history_add(&history, &id)); /* finishing it changes nothing */
        CHECK_EQ(cl_history_next_index(&history, group, id.sequence), 1);
    }
    struct cl_message_id first = {group, 0, 0}, second = {group, 0, 1}, unused = {group, 1, 0}, operation = {1, 0, 0};
    CHECK(cl_history_contains(&history, &first));
    CHECK(!cl_history_contains(&history, &second));
    CHECK(!cl_history_contains(&history, &unused));
    CHECK(!cl_history_contains(&history, &operation));
    cl_history_drop_group(&history, group);
    CHECK(!cl_history_contains(&history, &first));
}
