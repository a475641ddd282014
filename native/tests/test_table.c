#include "protocol/table.h"

#include "tests/check.h"

TEST(test_names)
{
    SCOPED(cl_table_free) struct cl_table table = {0};
    struct cl_message_id id = {1, 2, 3};
    CHECK(!cl_table_find(&table, CL_MESSAGE_SEND, 4, &id));
    struct cl_message *message = cl_table_add(&table, CL_MESSAGE_SEND, 4, &id);
    CHECK(cl_table_find(&table, CL_MESSAGE_SEND, 4, &id) == message);
    CHECK(!cl_table_find(&table, CL_MESSAGE_RECEIVE, 4, &id));
    CHECK(!cl_table_find(&table, CL_MESSAGE_SEND, 5, &id));
    static const struct cl_message_id OTHERS[] = {{0, 2, 3}, {1, 3, 3}, {1, 2, 4}, {2, 1, 3}};
    for (int i = 0; i < 4; i++)
        CHECK(!cl_table_find(&table, CL_MESSAGE_SEND, 4, &OTHERS[i]));
    uint32_t generation = message->generation;
    cl_table_remove(&table, message);
    CHECK(!cl_table_find(&table, CL_MESSAGE_SEND, 4, &id));
    CHECK(message->generation != generation);
    cl_table_recycle(&table, message);
    CHECK(cl_table_add(&table, CL_MESSAGE_SEND, 4, &id) == message); /* reused */
}

static void count_and_remove_odd(struct cl_message *message, void *argument)
{
    struct cl_table *table = argument;
    if (message->id.index % 2) {
        cl_table_remove(table, message);
        cl_table_recycle(table, message);
    }
}

TEST(test_thousands)
{
    SCOPED(cl_table_free) struct cl_table table = {0};
    for (uint32_t i = 0; i < 5000; i++) {
        struct cl_message_id id = {7, i / 100, i};
        CHECK(cl_table_add(&table, CL_MESSAGE_RECEIVE, (uint16_t)(i % 5), &id) != NULL);
    }
    cl_table_each(&table, count_and_remove_odd, &table);
    CHECK_EQ(table.count, 2500);
    for (uint32_t i = 0; i < 5000; i++) {
        struct cl_message_id id = {7, i / 100, i};
        struct cl_message *message = cl_table_find(&table, CL_MESSAGE_RECEIVE, (uint16_t)(i % 5), &id);
        CHECK_EQ(message != NULL, i % 2 == 0);
        CHECK(!message || message->id.index == i);
    }
}
