#include "protocol/table.h"

#include "tests/check.h"

TEST(test_names)
{
    SCOPED(cl_table_free) struct cl_table table = {0};
    struct cl_message_id id = {1, 2, 3};
    CHECK(cl_table_find_send(&table, 4, &id) == NULL);
    struct cl_send *send = cl_table_add_send(&table, 4, &id);
    CHECK(cl_table_find_send(&table, 4, &id) == send);
    CHECK(cl_table_find_receive(&table, 4, &id) == NULL);
    CHECK(cl_table_find_send(&table, 5, &id) == NULL);
    static const struct cl_message_id OTHERS[] = {{0, 2, 3}, {1, 3, 3}, {1, 2, 4}, {2, 1, 3}};
    for (int i = 0; i < 4; i++)
        CHECK(cl_table_find_send(&table, 4, &OTHERS[i]) == NULL);
    uint32_t generation = send->message.generation;
    cl_table_remove(&table, &send->message);
    CHECK(cl_table_find_send(&table, 4, &id) == NULL);
    CHECK(send->message.generation != generation);
    cl_table_recycle(&table, &send->message);
    CHECK(cl_table_add_send(&table, 4, &id) == send); /* reused */
}

/* A name tells the side: a send and a receive by one name are two messages, each of its own size. */
TEST(test_a_send_and_a_receive_share_a_name)
{
    SCOPED(cl_table_free) struct cl_table table = {0};
    struct cl_message_id id = {1, 2, 3};
    struct cl_send *send = cl_table_add_send(&table, 4, &id);
    struct cl_receive *receive = cl_table_add_receive(&table, 4, &id);
    CHECK(cl_table_find_send(&table, 4, &id) == send && cl_table_find_receive(&table, 4, &id) == receive);
    CHECK(cl_message_as_send(&send->message) == send && cl_message_as_receive(&send->message) == NULL);
    CHECK(cl_message_as_receive(&receive->message) == receive && cl_message_as_send(&receive->message) == NULL);
    cl_table_remove(&table, &send->message);
    cl_table_recycle(&table, &send->message);
    id.index = 7;
    CHECK(cl_table_add_receive(&table, 4, &id)->message.side == CL_MESSAGE_RECEIVE);
    CHECK(cl_table_add_send(&table, 4, &id) == send);
}

/* A send that is used again keeps memory, and nothing else. */
TEST(test_a_send_is_reused)
{
    SCOPED(cl_table_free) struct cl_table table = {0};
    struct cl_message_id id = {1, 2, 3};
    struct cl_send *send = cl_table_add_send(&table, 4, &id);
    CHECK(cl_message_begin(&send->message, 1000, 1));
    CHECK(cl_send_give_back(send, 5) && cl_send_stop(send));
    CHECK(cl_ranges_add(&send->stop_told, 0, 8));
    const uint64_t *arrived = send->message.arrived, *counted = send->counted;
    cl_table_remove(&table, &send->message);
    cl_table_recycle(&table, &send->message);
    CHECK(cl_table_add_send(&table, 4, &id) == send);
    CHECK(send->message.arrived == arrived && send->counted == counted);
    CHECK(!send->partial.stopped && !send->lost.count && !send->stop_told.count && !send->next_packet);
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
        CHECK(cl_table_add_receive(&table, (uint16_t)(i % 5), &id) != NULL);
    }
    cl_table_each(&table, count_and_remove_odd, &table);
    CHECK_EQ(table.names.count, 2500);
    for (uint32_t i = 0; i < 5000; i++) {
        struct cl_message_id id = {7, i / 100, i};
        struct cl_receive *receive = cl_table_find_receive(&table, (uint16_t)(i % 5), &id);
        CHECK_EQ(receive != NULL, i % 2 == 0);
        CHECK(receive == NULL || receive->message.id.index == i);
    }
}
