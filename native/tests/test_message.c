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
    SCOPED(cl_send_free) struct cl_send send = {.granted = UINT32_MAX};
    uint32_t packet;
    cl_message_begin(&send.message, 5 * PAYLOAD, PAYLOAD);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(cl_send_take(&send, &packet) && packet == i);
    CHECK(cl_send_give_back(&send, 2));
    CHECK(cl_send_give_back(&send, 0));
    CHECK(cl_send_take(&send, &packet) && packet == 0);
    CHECK(cl_send_take(&send, &packet) && packet == 2);
    CHECK(cl_send_take(&send, &packet) && packet == 3);
    CHECK(cl_send_take(&send, &packet) && packet == 4);
    CHECK(!cl_send_take(&send, &packet));
    CHECK(!cl_send_sendable(&send));
}

TEST(test_done_packets_are_not_sent_again)
{
    SCOPED(cl_send_free) struct cl_send send = {.granted = UINT32_MAX};
    uint32_t packet;
    cl_message_begin(&send.message, 2 * PAYLOAD, PAYLOAD);
    cl_send_take(&send, &packet);
    cl_send_take(&send, &packet);
    CHECK(cl_send_give_back(&send, 0));
    CHECK(cl_send_arrive(&send, 0)); /* late acknowledgement */
    CHECK(!cl_send_sendable(&send)); /* whether anything is left decides whether a PROBE leaves */
    CHECK(!cl_send_arrive(&send, 0));
    CHECK(!cl_send_take(&send, &packet));
    CHECK(cl_send_arrive(&send, 1));
    CHECK(cl_send_give_back(&send, 1));
    CHECK(!cl_send_sendable(&send));
    CHECK(cl_message_complete(&send.message));
}

/* Whatever the order in which lost packets arrive after all: something is left to send until the last has arrived. */
TEST(test_lost_packets_arrive_in_any_order)
{
    static const uint32_t ORDERS[][4] = {{1, 2, 4, 5}, {5, 4, 2, 1}, {2, 5, 1, 4}, {4, 1, 5, 2}};
    for (size_t i = 0; i < sizeof ORDERS / sizeof *ORDERS; i++)
        for (uint32_t taken = 0; taken < 4; taken++) { /* before the taken-th arrival one of them is sent again */
            SCOPED(cl_send_free) struct cl_send send = {.granted = UINT32_MAX};
            uint32_t packet, again = UINT32_MAX;
            cl_message_begin(&send.message, 6 * PAYLOAD, PAYLOAD);
            for (uint32_t j = 0; j < 6; j++)
                cl_send_take(&send, &packet);
            for (uint32_t j = 0; j < 4; j++)
                CHECK(cl_send_give_back(&send, ORDERS[i][j]));
            for (uint32_t j = 0; j < 4; j++) {
                if (j == taken) {
                    CHECK(cl_send_take(&send, &again));
                    CHECK(!cl_message_has_arrived(&send.message, again));
                }
                uint32_t left = 0;
                for (uint32_t k = j; k < 4; k++)
                    left += ORDERS[i][k] != again;
                CHECK_EQ(cl_send_sendable(&send), left > 0);
                CHECK(cl_send_arrive(&send, ORDERS[i][j]));
            }
            CHECK(!cl_send_sendable(&send));
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
    SCOPED(cl_send_free) struct cl_send send = {.granted = UINT32_MAX};
    CHECK(cl_message_begin(&send.message, 100 * PAYLOAD, PAYLOAD));
    for (uint32_t i = 0; i < 100; i++)
        CHECK(cl_send_arrive(&send, i));
    CHECK(cl_send_stop(&send));
    CHECK(!cl_send_sendable(&send));
    for (uint32_t i = 0; i < 64; i++)
        send.counted[0] |= (uint64_t)(i != 10) << i;
    SCOPED(cl_ranges_free) struct cl_ranges missing = {0};
    CHECK(cl_message_missing(&send.message, send.counted, &missing));
    CHECK_EQ(missing.count, 2);
    CHECK(missing.list[0].start == 10 * PAYLOAD && missing.list[0].end == 11 * PAYLOAD);
    CHECK(missing.list[1].start == 64 * PAYLOAD && missing.list[1].end == 100 * PAYLOAD);
}
