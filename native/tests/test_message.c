#include "protocol/message.h"

#include "tests/check.h"

enum { PAYLOAD = 100 };

TEST(test_cut)
{
    static const struct {
        uint32_t length, packets;
    } CASES[] = {{0, 1}, {1, 1}, {100, 1}, {101, 2}, {6400, 64}, {6401, 65}, {UINT32_MAX, 42949673}};
    SCOPED(cl_message_free) struct cl_message message = {0};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        CHECK(cl_message_begin(&message, CASES[i].length, PAYLOAD));
        CHECK_EQ(message.packet_count, CASES[i].packets);
        CHECK(!cl_message_complete(&message));
        CHECK(!cl_message_has_arrived(&message, message.packet_count - 1));
    }
}

TEST(test_lost_go_first)
{
    SCOPED(cl_message_free) struct cl_message message = {0};
    uint32_t packet;
    cl_message_begin(&message, 5 * PAYLOAD, PAYLOAD);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(cl_message_take(&message, &packet) && packet == i);
    CHECK(cl_message_give_back(&message, 2));
    CHECK(cl_message_give_back(&message, 0));
    CHECK(cl_message_take(&message, &packet) && packet == 0);
    CHECK(cl_message_take(&message, &packet) && packet == 2);
    CHECK(cl_message_take(&message, &packet) && packet == 3);
    CHECK(cl_message_take(&message, &packet) && packet == 4);
    CHECK(!cl_message_take(&message, &packet));
    CHECK(!cl_message_sendable(&message));
}

TEST(test_done_packets_are_not_sent_again)
{
    SCOPED(cl_message_free) struct cl_message message = {0};
    uint32_t packet;
    cl_message_begin(&message, 2 * PAYLOAD, PAYLOAD);
    cl_message_take(&message, &packet);
    cl_message_take(&message, &packet);
    CHECK(cl_message_give_back(&message, 0));
    CHECK(cl_message_arrive(&message, 0)); /* late acknowledgement */
    CHECK(!cl_message_sendable(&message)); /* whether anything is left decides whether a PROBE leaves */
    CHECK(!cl_message_arrive(&message, 0));
    CHECK(!cl_message_take(&message, &packet));
    CHECK(cl_message_arrive(&message, 1));
    CHECK(cl_message_give_back(&message, 1));
    CHECK(!cl_message_sendable(&message));
    CHECK(cl_message_complete(&message));
}

/* Whatever the order in which lost packets arrive after all: something is left to send until the last has arrived. */
TEST(test_lost_packets_arrive_in_any_order)
{
    static const uint32_t ORDERS[][4] = {{1, 2, 4, 5}, {5, 4, 2, 1}, {2, 5, 1, 4}, {4, 1, 5, 2}};
    for (size_t i = 0; i < sizeof ORDERS / sizeof *ORDERS; i++)
        for (uint32_t taken = 0; taken < 4; taken++) { /* before the taken-th arrival one of them is sent again */
            SCOPED(cl_message_free) struct cl_message message = {0};
            uint32_t packet, again = UINT32_MAX;
            cl_message_begin(&message, 6 * PAYLOAD, PAYLOAD);
            for (uint32_t j = 0; j < 6; j++)
                cl_message_take(&message, &packet);
            for (uint32_t j = 0; j < 4; j++)
                CHECK(cl_message_give_back(&message, ORDERS[i][j]));
            for (uint32_t j = 0; j < 4; j++) {
                if (j == taken) {
                    CHECK(cl_message_take(&message, &again));
                    CHECK(!cl_message_has_arrived(&message, again));
                }
                uint32_t left = 0;
                for (uint32_t k = j; k < 4; k++)
                    left += ORDERS[i][k] != again;
                CHECK_EQ(cl_message_sendable(&message), left > 0);
                CHECK(cl_message_arrive(&message, ORDERS[i][j]));
            }
            CHECK(!cl_message_sendable(&message));
        }
}

TEST(test_struct_is_reused)
{
    SCOPED(cl_message_free) struct cl_message message = {0};
    cl_message_begin(&message, 1000 * PAYLOAD, PAYLOAD);
    for (uint32_t i = 0; i < 1000; i++)
        CHECK(cl_message_arrive(&message, i));
    cl_message_begin(&message, 3 * PAYLOAD, PAYLOAD);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(cl_message_arrive(&message, i));
    CHECK(cl_message_complete(&message));
}

/* After a STOP, nothing is left to send, and only packets that a STOP reported as counted are there. */
TEST(test_stop)
{
    SCOPED(cl_message_free) struct cl_message message = {0};
    CHECK(cl_message_begin(&message, 100 * PAYLOAD, PAYLOAD));
    for (uint32_t i = 0; i < 100; i++)
        CHECK(cl_message_arrive(&message, i));
    CHECK(cl_message_stop(&message));
    CHECK(!cl_message_sendable(&message));
    for (uint32_t i = 0; i < 64; i++)
        message.counted[0] |= (uint64_t)(i != 10) << i;
    SCOPED(cl_ranges_free) struct cl_ranges missing = {0};
    CHECK(cl_message_missing(&message, &missing));
    CHECK_EQ(missing.count, 2);
    CHECK(missing.list[0].start == 10 * PAYLOAD && missing.list[0].end == 11 * PAYLOAD);
    CHECK(missing.list[1].start == 64 * PAYLOAD && missing.list[1].end == 100 * PAYLOAD);
}
