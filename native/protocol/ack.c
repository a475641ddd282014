#include "protocol/ack.h"

void cl_ack_init(struct cl_ack *ack)
{
    *ack = (struct cl_ack){.deadline_us = UINT64_MAX};
}

void cl_ack_free(struct cl_ack *ack)
{
    cl_ranges_free(&ack->came);
    cl_ranges_free(&ack->refused);
}

static void raise_floor(struct cl_ack *ack, uint64_t floor)
{
    ack->floor = floor;
    cl_ranges_drop_below(&ack->came, floor);
    cl_ranges_drop_below(&ack->refused, floor);
}

void cl_ack_on_packet(struct cl_ack *ack, uint64_t number, bool refused, bool at_once, uint64_t received_us,
                      uint64_t now_us)
{
    /* Too old to be reported, or no memory: the sender will take it for lost, and its copy will be a duplicate. */
    bool again = number < ack->floor || (refused && cl_ranges_contains(&ack->came, number));
    if (!again && refused && !cl_ranges_add(&ack->refused, number, number + 1))
        again = true;
    if (!again)
        cl_ranges_add(&ack->came, number, number + 1);
    if (ack->came.count > CL_ACK_RANGES)
        raise_floor(ack, ack->came.list[1].start);
    /* A refused packet that can no longer be reported as refused must not be reported at all. */
    if (ack->refused.count > CL_ACK_RANGES)
        raise_floor(ack, ack->refused.list[1].start);

    bool in_order = !ack->any || number == ack->largest + 1;
    if (!ack->any || number > ack->largest) {
        ack->any = true;
        ack->largest = number;
        ack->largest_received_us = received_us;
    }
    ack->waiting++;
    if (at_once || refused || !in_order || ack->waiting >= CL_ACK_EVERY)
        ack->deadline_us = now_us;
    else if (ack->deadline_us == UINT64_MAX)
        ack->deadline_us = now_us + CL_ACK_DELAY_US;
}

/* Writes ranges from the top down as gaps and counts below `from`. It stops at a range or gap that does not fit in 16
 * bits: numbers so far back have been reported before. */
static uint32_t write_ranges(const struct cl_ranges *ranges, uint64_t from, uint8_t *out)
{
    uint32_t written = 0;
    for (uint32_t i = ranges->count; i-- > 0 && written < CL_ACK_RANGES;) {
        const struct cl_range *range = &ranges->list[i];
        uint64_t gap = from - range->end, count = range->end - range->start;
        if (gap > UINT16_MAX)
            break;
        cl_store_u16(out + 4 * written, (uint32_t)gap);
        cl_store_u16(out + 4 * written + 2, count > UINT16_MAX ? UINT16_MAX : (uint32_t)count);
        written++;
        if (count > UINT16_MAX)
            break;
        from = range->start;
    }
    return written;
}

void cl_ack_write(struct cl_ack *ack, struct cl_packet *packet, uint8_t *payload, uint64_t now_us)
{
    uint8_t *ranges = payload + CL_ACK_PORT_BYTES;
    uint32_t came = write_ranges(&ack->came, ack->largest + 1, ranges);
    uint32_t refused = write_ranges(&ack->refused, ack->largest + 1, ranges + 4 * came);
    cl_ack_write_port(payload, 0, 0);
    packet->number = (uint32_t)ack->largest;
    packet->group = (uint32_t)ack->written++;
    packet->sequence = (uint32_t)ack->largest_received_us;
    packet->index = now_us > ack->largest_received_us ? (uint32_t)(now_us - ack->largest_received_us) : 0;
    packet->offset = came | refused << 16;
    packet->signature = (uint16_t)(ack->marked % CL_ACK_MARKS);
    packet->length = (uint16_t)(CL_ACK_PORT_BYTES + 4 * (came + refused));
    ack->waiting = 0;
    ack->deadline_us = UINT64_MAX;
}

static bool read_ranges(struct cl_range *ranges, uint32_t count, uint64_t from, const uint8_t *in)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t gap = cl_load_u16(in + 4 * i), length = cl_load_u16(in + 4 * i + 2);
        if (gap + length > from)
            return false;
        ranges[i] = (struct cl_range){from - gap - length, from - gap};
        from = ranges[i].start;
    }
    return true;
}

bool cl_ack_read(struct cl_ack_frame *frame, const struct cl_packet *packet, const uint8_t *payload,
                 uint64_t next_number)
{
    frame->came_count = cl_ack_came_count(packet);
    frame->refused_count = cl_ack_refused_count(packet);
    if (frame->came_count > CL_ACK_RANGES || frame->refused_count > CL_ACK_RANGES ||
        packet->length != CL_ACK_PORT_BYTES + 4 * (frame->came_count + frame->refused_count))
        return false;
    frame->largest = cl_packet_number(next_number, packet->number);
    if (frame->largest >= next_number)
        return false;
    frame->clock_us = packet->sequence;
    frame->host_delay_us = packet->index;
    frame->marked = packet->signature;
    frame->port_rate = cl_load_u32(payload);
    frame->port_senders = cl_load_u16(payload + 4);
    const uint8_t *ranges = payload + CL_ACK_PORT_BYTES;
    return read_ranges(frame->came, frame->came_count, frame->largest + 1, ranges) &&
           read_ranges(frame->refused, frame->refused_count, frame->largest + 1, ranges + 4 * frame->came_count);
}
