#include "protocol/stop.h"

#include <string.h>

#include "tests/check.h"

static void begin(struct cl_message *message, uint32_t packets, uint32_t index)
{
    *message = (struct cl_message){.id = {1, 2, index}};
    CHECK(cl_message_begin(message, packets * 8, 8));
}

TEST(test_what_was_not_counted_is_written)
{
    SCOPED(cl_stops_free) struct cl_stops stops = {0};
    struct cl_message message;
    begin(&message, CL_STOP_PACKETS + 10, 3);
    for (uint32_t i = 0; i < message.packet_count; i++)
        if (i != 0 && i != 9 && i != CL_STOP_PACKETS + 9)
            cl_message_arrive(&message, i);
    struct cl_stop *stop = cl_stops_add(&stops, &message, CL_STOP_PACKETS);
    CHECK(stop != NULL && cl_stops_find(&stops, &message.id) == stop);
    CHECK(cl_stops_find(&stops, &(struct cl_message_id){1, 2, 4}) == NULL);
    cl_message_free(&message); /* the record has its own copy */
    CHECK(!cl_stop_counts(stop, 9));
    CHECK(cl_stop_counts(stop, 10));
    CHECK(!cl_stop_counts(stop, CL_STOP_PACKETS + 10)); /* there is no such packet */
    uint8_t payload[CL_STOP_BYTES_MAX], zeros[CL_STOP_BYTES_MAX] = {0};
    CHECK_EQ(cl_stop_bytes(stop->packet_count, CL_STOP_PACKETS, 0), CL_STOP_BYTES_MAX);
    cl_stop_write(stop, 0, payload);
    CHECK_EQ(payload[0], 0x01);
    CHECK_EQ(payload[1], 0x02);
    CHECK(memcmp(payload + 2, zeros, sizeof payload - 2) == 0);
    CHECK_EQ(cl_stop_bytes(stop->packet_count, CL_STOP_PACKETS, CL_STOP_PACKETS), 2);
    cl_stop_write(stop, CL_STOP_PACKETS, payload);
    CHECK_EQ(payload[0], 0);
    CHECK_EQ(payload[1], 0x02);
}

TEST(test_a_record_goes_when_all_of_it_is_known)
{
    struct cl_stops stops = {0};
    SCOPED(cl_message_free) struct cl_message long_one, short_one;
    begin(&long_one, 2 * CL_STOP_PACKETS + 1, 0);
    begin(&short_one, 7, 1);
    cl_stops_add(&stops, &long_one, CL_STOP_PACKETS);
    cl_stops_add(&stops, &short_one, CL_STOP_PACKETS);
    cl_stops_acked(&stops, &long_one.id, CL_STOP_PACKETS);
    cl_stops_acked(&stops, &long_one.id, 0);
    cl_stops_acked(&stops, &long_one.id, 0); /* again: a late acknowledgement */
    CHECK(cl_stops_find(&stops, &long_one.id) != NULL);
    cl_stops_acked(&stops, &long_one.id, 2 * CL_STOP_PACKETS);
    CHECK(cl_stops_find(&stops, &long_one.id) == NULL);
    CHECK(cl_stops_find(&stops, &short_one.id) != NULL);
    cl_stops_acked(&stops, &short_one.id, 0);
    cl_stops_acked(&stops, &short_one.id, 0); /* of nothing */
    CHECK(stops.first == NULL);
}

TEST(test_a_part_fits_into_a_datagram)
{
    CHECK_EQ(cl_stop_part(1432), CL_STOP_PACKETS);
    CHECK_EQ(cl_stop_part(448), CL_STOP_PACKETS);
    CHECK_EQ(cl_stop_part(160), 1280);
    CHECK_EQ(cl_stop_bytes(2000, 1280, 0), 160);
    CHECK_EQ(cl_stop_bytes(2000, 1280, 1280), 90);
}
