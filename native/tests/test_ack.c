#include "protocol/ack.h"

#include "sim/scarcity.h"
#include "tests/check.h"

/* Writes an acknowledgement and reads it back as the sender would. */
static struct cl_ack_frame frame_of(struct cl_ack *ack, uint64_t next_number, uint64_t now_us)
{
    struct cl_packet packet = {.kind = CL_PACKET_ACK};
    struct cl_ack_frame frame = {0};
    uint8_t payload[CL_ACK_BYTES_MAX];
    cl_ack_write(ack, &packet, payload, now_us);
    CHECK(cl_ack_read(&frame, &packet, payload, next_number));
    return frame;
}

TEST(test_round_trip)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    static const uint64_t CAME[] = {0, 1, 2, 5, 6, 9};
    for (int i = 0; i < 6; i++)
        cl_ack_on_packet(&ack, CAME[i], CAME[i] == 5, false, 1000 + CAME[i], 1500);
    struct cl_ack_frame frame = frame_of(&ack, 10, 2000);
    CHECK_EQ(frame.largest, 9);
    CHECK_EQ(frame.clock_us, 1009);
    CHECK_EQ(frame.host_delay_us, 991);
    CHECK_EQ(frame.came_count, 3);
    CHECK_EQ(frame.came[0].start, 9);
    CHECK_EQ(frame.came[1].start, 5);
    CHECK_EQ(frame.came[1].end, 7);
    CHECK_EQ(frame.came[2].start, 0);
    CHECK_EQ(frame.came[2].end, 3);
    CHECK_EQ(frame.refused_count, 1);
    CHECK_EQ(frame.refused[0].start, 5);
    CHECK_EQ(frame.refused[0].end, 6);
}

/* The count of marks goes on from the start and wraps: a lost acknowledgement takes no marks with it. */
TEST(test_marks)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    cl_ack_on_packet(&ack, 0, false, false, 100, 100);
    CHECK_EQ(frame_of(&ack, 1, 100).marked, 0);
    ack.marked = 3;
    frame_of(&ack, 1, 100);
    CHECK_EQ(frame_of(&ack, 1, 100).marked, 3);
    ack.marked = CL_ACK_MARKS + 5;
    CHECK_EQ(frame_of(&ack, 1, 100).marked, 5);
}

TEST(test_when_due)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    CHECK_EQ(ack.deadline_us, UINT64_MAX);
    cl_ack_on_packet(&ack, 0, false, false, 100, 100);
    CHECK_EQ(ack.deadline_us, 100 + CL_ACK_DELAY_US);
    cl_ack_on_packet(&ack, 1, false, false, 200, 200);
    CHECK_EQ(ack.deadline_us, 100 + CL_ACK_DELAY_US);  /* counts from the first */
    cl_ack_on_packet(&ack, 3, false, false, 300, 300); /* a gap */
    CHECK_EQ(ack.deadline_us, 300);
    frame_of(&ack, 10, 400);
    CHECK_EQ(ack.deadline_us, UINT64_MAX);
    cl_ack_on_packet(&ack, 4, false, true, 500, 500); /* asked for */
    CHECK_EQ(ack.deadline_us, 500);
    frame_of(&ack, 10, 500);
    for (uint64_t i = 5; i < 5 + CL_ACK_EVERY; i++)
        cl_ack_on_packet(&ack, i, false, false, 600, 600);
    CHECK_EQ(ack.deadline_us, 600);
}

/* A refused packet is reported as refused or not at all, however many gaps there are. */
TEST(test_refused_is_never_told_as_accepted)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    for (uint64_t number = 0; number < 400; number++) {
        if (number % 7 == 3)
            continue;
        cl_ack_on_packet(&ack, number, number % 3 == 0, false, number, number);
        struct cl_ack_frame frame = frame_of(&ack, number + 1, number);
        for (uint64_t told = 0; told <= number; told++) {
            bool came = false, refused = false;
            for (uint32_t i = 0; i < frame.came_count; i++)
                came = came || (told >= frame.came[i].start && told < frame.came[i].end);
            for (uint32_t i = 0; i < frame.refused_count; i++)
                refused = refused || (told >= frame.refused[i].start && told < frame.refused[i].end);
            CHECK(!came || told % 7 != 3);
            CHECK(!came || refused == (told % 3 == 0));
        }
    }
}

/* What is refused, without memory to note that, is not reported: as if it had been lost. */
TEST(test_refused_without_memory_is_not_told)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    cl_ack_on_packet(&ack, 0, false, false, 100, 100);
    struct sim_scarcity scarcity = {.random = sim_random_seeded(1, 0)};
    sim_scarcity_set(&scarcity, 1);
    cl_ack_on_packet(&ack, 1, true, false, 200, 200);
    sim_scarcity_set(NULL, 0);
    CHECK(scarcity.failed > 0);
    struct cl_ack_frame frame = frame_of(&ack, 2, 300);
    CHECK_EQ(frame.came_count, 1);
    CHECK_EQ(frame.came[0].end, 1);
    CHECK_EQ(frame.refused_count, 0);
}

TEST(test_malformed_is_refused)
{
    struct cl_packet packet = {.number = 5, .offset = 1, .length = CL_ACK_PORT_BYTES + 4};
    struct cl_ack_frame frame;
    uint8_t payload[CL_ACK_BYTES_MAX] = {1, 2, 0, 0, 3, 0, 0, 0, 3, 0};
    CHECK(cl_ack_read(&frame, &packet, payload, 6));
    CHECK_EQ(frame.port_rate, 0x201);
    CHECK_EQ(frame.port_senders, 3);
    CHECK(!cl_ack_read(&frame, &packet, payload, 5)); /* of a packet never sent */
    packet.length = CL_ACK_PORT_BYTES + 8;
    CHECK(!cl_ack_read(&frame, &packet, payload, 6)); /* length and counts disagree */
    packet.length = 4;                                /* the port's state is missing */
    CHECK(!cl_ack_read(&frame, &packet, payload, 6));
    packet.length = CL_ACK_PORT_BYTES + 4;
    packet.offset = CL_ACK_RANGES + 1;
    CHECK(!cl_ack_read(&frame, &packet, payload, 6));
    packet.offset = 1;
    payload[CL_ACK_PORT_BYTES + 2] = 7; /* more packets than there are numbers */
    CHECK(!cl_ack_read(&frame, &packet, payload, 6));
}

TEST(test_long_ranges_are_cut)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    for (uint64_t number = 0; number < 100000; number++)
        cl_ack_on_packet(&ack, number, false, false, 0, 0);
    struct cl_ack_frame frame = frame_of(&ack, 100000, 0);
    CHECK_EQ(frame.came_count, 1);
    CHECK_EQ(frame.came[0].end, 100000);
    CHECK_EQ(frame.came[0].start, 100000 - UINT16_MAX);
}
