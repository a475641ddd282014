/*
 * Stop: a receiver's record of a message that it ended before all packets had come: which packets it counted. It lasts
 * until the sender knows. STOP packets are written from it, and late packets are recognised by it.
 */
#pragma once

#include "protocol/message.h"

enum {
    CL_STOP_BYTES_MAX = 448, /* payload of one STOP packet, a bit for each packet; longer messages take several */
    CL_STOP_PACKETS = CL_STOP_BYTES_MAX * 8,
};

struct cl_stop {
    struct cl_message_id id;
    uint32_t packet_count;
    uint32_t part;          /* packets reported in one STOP packet: cl_stop_part */
    uint64_t *counted;      /* a bit per packet */
    struct cl_ranges known; /* packets of whose report the sender has acknowledged the receipt */
    struct cl_stop *next;
};

struct cl_stops {
    struct cl_stop *first;
};

/* The number of packets that one STOP packet reports, where packets hold payload_bytes: the same on both sides. */
static inline uint32_t cl_stop_part(uint32_t payload_bytes)
{
    return payload_bytes < CL_STOP_BYTES_MAX ? payload_bytes * 8 : CL_STOP_PACKETS;
}

/* Records how a receive ended. NULL when there is no memory. */
struct cl_stop *cl_stops_add(struct cl_stops *stops, const struct cl_message *message, uint32_t part);
/* NULL when there is none by that name. */
struct cl_stop *cl_stops_find(const struct cl_stops *stops, const struct cl_message_id *id);
/* The STOP packet that begins with packet `first` was acknowledged. Deletes the record once all of them are. */
void cl_stops_acked(struct cl_stops *stops, const struct cl_message_id *id, uint32_t first);
void cl_stops_free(struct cl_stops *stops);

static inline bool cl_stop_counts(const struct cl_stop *stop, uint32_t packet)
{
    return packet < stop->packet_count && stop->counted[packet / 64] >> (packet % 64) & 1;
}

/* Bytes of the STOP payload that begins with packet `first`: a bit per packet, set: not counted. */
static inline uint32_t cl_stop_bytes(uint32_t packet_count, uint32_t part, uint32_t first)
{
    uint32_t left = packet_count - first;
    return ((left < part ? left : part) + 7) / 8;
}

void cl_stop_write(const struct cl_stop *stop, uint32_t first, uint8_t *payload);
