/*
 * Ack: the acknowledgements of one path. The receiver reports the packet numbers that came, newest first, and those of
 * them that it refused for lack of room. A refused packet has passed the network, so it is no sign of congestion, but
 * the sender has to send it again.
 *
 * An acknowledgement is due
 *   - at once when the sender asks for it (CL_PACKET_ACK_NOW: the sender knows when its window runs low), when a gap
 *     opens or closes, or when the receiver wants it (a message is complete);
 *   - otherwise after CL_ACK_EVERY packets or CL_ACK_DELAY_US.
 *
 * Payload: {u32 bytes per millisecond that come in at the receiver's port, u16 number of their senders: see ingress.h},
 * then the ranges of both lists as {u16 gap, u16 count}: the next `gap` numbers downwards are not in the list, the
 * `count` numbers below them are. The first gap counts from the largest number. packet.offset = ranges of packets that
 * came | refused ranges << 16. packet.signature = packets that ever came with a mark (ECN's CE), modulo CL_ACK_MARKS:
 * a lost acknowledgement takes no marks with it.
 */
#pragma once

#include "protocol/packet.h"
#include "protocol/ranges.h"

enum {
    CL_ACK_DELAY_US = 4000,
    CL_ACK_EVERY = 64,
    CL_ACK_RANGES = 16, /* ranges per list and packet; older ones have been reported many times */
    CL_ACK_PORT_BYTES = 6,
    CL_ACK_MARKS = 1 << 12,
    CL_ACK_BYTES_MAX = CL_ACK_PORT_BYTES + 2 * CL_ACK_RANGES * 4,
};

struct cl_ack {
    struct cl_ranges came;    /* packet numbers, refused ones included */
    struct cl_ranges refused; /* those of them that were refused */
    uint64_t floor;           /* lower numbers are not reported any more: docs/protocol.md says what that costs */
    uint64_t largest;
    uint64_t largest_received_us;
    uint64_t deadline_us; /* UINT64_MAX: nothing to report */
    uint32_t waiting;     /* packets not yet reported */
    uint32_t marked;      /* packets that came with a mark, since the start */
    uint64_t written;     /* acknowledgements so far; the number of the next one, by which replays are recognised */
    bool any;
};

void cl_ack_init(struct cl_ack *ack);
void cl_ack_free(struct cl_ack *ack);

/* Notes a packet that needs an acknowledgement. */
void cl_ack_on_packet(struct cl_ack *ack, uint64_t number, bool refused, bool at_once, uint64_t received_us,
                      uint64_t now_us);
/* Fills the ACK's own fields of `packet` and its payload (CL_ACK_BYTES_MAX); nothing is due afterwards. */
void cl_ack_write(struct cl_ack *ack, struct cl_packet *packet, uint8_t *payload, uint64_t now_us);
/* Adds the state of this host's port to an acknowledgement that cl_ack_write has filled. */
static inline void cl_ack_write_port(uint8_t *payload, uint32_t rate, uint32_t senders)
{
    cl_store_u32(payload, rate);
    cl_store_u16(payload + 4, senders < UINT16_MAX ? senders : UINT16_MAX);
}

/* An acknowledgement as the sender reads it; ranges newest first. */
struct cl_ack_frame {
    uint64_t largest;
    uint32_t clock_us;      /* receiver's clock when the largest number came */
    uint32_t host_delay_us; /* time from then until the acknowledgement left */
    uint32_t port_rate;     /* bytes per millisecond; 0: not known */
    uint16_t port_senders;
    uint16_t marked; /* marked packets since the start, modulo CL_ACK_MARKS */
    uint32_t came_count, refused_count;
    struct cl_range came[CL_ACK_RANGES], refused[CL_ACK_RANGES];
};

/* The low half of the acknowledgement's own number. */
static inline uint32_t cl_ack_number(const struct cl_packet *packet)
{
    return packet->group;
}

/* How many ranges of packets that came follow the header, ... */
static inline uint32_t cl_ack_came_count(const struct cl_packet *packet)
{
    return packet->offset & 0xFFFF;
}

/* ... and how many of refused ones. */
static inline uint32_t cl_ack_refused_count(const struct cl_packet *packet)
{
    return packet->offset >> 16;
}

/* next_number: the sender's next packet number on this path. False when the packet is malformed. */
bool cl_ack_read(struct cl_ack_frame *frame, const struct cl_packet *packet, const uint8_t *payload,
                 uint64_t next_number);
