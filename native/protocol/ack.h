/*
 * Ack: what one path's receiver tells its sender: which packet numbers came, newest first, and which of them were
 * refused because there was no room for them. A refused packet came through the network all right, so it is no sign of
 * congestion, but it has to be sent again.
 *
 * An acknowledgement is due
 *   - at once when the sender asks (CL_PACKET_ACK_NOW: it knows best when its window runs low), when a gap opens or
 *     closes, or when the receiver says so (a message is complete);
 *   - after CL_ACK_EVERY packets or CL_ACK_DELAY_US otherwise.
 *
 * In a packet: {u32 bytes per millisecond that come in here, u16 senders whose they are: see ingress.h}, then for each
 * list its ranges as {u16 gap, u16 count}: `gap` numbers down from the last one told (at first: from the largest) are
 * not in it, the next `count` are. packet.offset = ranges of all that came | refused ranges << 16, packet.signature =
 * how many packets came with a mark (ECN's CE) ever, modulo CL_ACK_MARKS: so it does not matter when an acknowledgement
 * is lost.
 */
#ifndef CL_PROTOCOL_ACK_H
#define CL_PROTOCOL_ACK_H

#include "protocol/packet.h"
#include "protocol/ranges.h"

enum {
    CL_ACK_DELAY_US = 4000,
    CL_ACK_EVERY = 64,
    CL_ACK_RANGES = 16, /* told per list; older ones have been told many times */
    CL_ACK_PORT_BYTES = 6,
    CL_ACK_MARKS = 1 << 12,
    CL_ACK_BYTES_MAX = CL_ACK_PORT_BYTES + 2 * CL_ACK_RANGES * 4,
};

struct cl_ack {
    struct cl_ranges came;    /* packet numbers, refused ones included */
    struct cl_ranges refused; /* of those */
    uint64_t floor;           /* lower numbers are not told any more */
    uint64_t largest;
    uint64_t largest_received_us;
    uint64_t deadline_us; /* UINT64_MAX: nothing to tell */
    uint32_t waiting;     /* packets not yet told */
    uint32_t marked;      /* packets that came with a mark, ever */
    uint64_t written;     /* acknowledgements so far: numbers them, so that a replayed one is known */
    bool any;
};

void cl_ack_init(struct cl_ack *ack);
void cl_ack_free(struct cl_ack *ack);

/* A packet came that wants an acknowledgement. */
void cl_ack_on_packet(struct cl_ack *ack, uint64_t number, bool refused, bool at_once, uint64_t received_us,
                      uint64_t now_us);
/* Fills the ACK's own fields of `packet` and its payload (CL_ACK_BYTES_MAX); nothing is due afterwards. */
void cl_ack_write(struct cl_ack *ack, struct cl_packet *packet, uint8_t *payload, uint64_t now_us);
/* What is to be told of this host's port; in acknowledgements not told: zero. */
static inline void cl_ack_write_port(uint8_t *payload, uint32_t rate, uint32_t senders)
{
    cl_store_u32(payload, rate);
    cl_store_u16(payload + 4, senders < UINT16_MAX ? senders : UINT16_MAX);
}

/* An acknowledgement as the sender reads it; ranges newest first. */
struct cl_ack_frame {
    uint64_t largest;
    uint32_t clock_us;      /* receiver's clock when the largest came */
    uint32_t host_delay_us; /* from then to the acknowledgement */
    uint32_t port_rate;     /* bytes per millisecond; 0: not known */
    uint16_t port_senders;
    uint16_t marked; /* packets ever, modulo CL_ACK_MARKS */
    uint32_t came_count, refused_count;
    struct cl_range came[CL_ACK_RANGES], refused[CL_ACK_RANGES];
};

/* next_number: the sender's next packet number on this path. False when the packet is malformed. */
bool cl_ack_read(struct cl_ack_frame *frame, const struct cl_packet *packet, const uint8_t *payload,
                 uint64_t next_number);

#endif
