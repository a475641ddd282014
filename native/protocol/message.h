/*
 * Message: one transfer, on either side of it.
 *
 * A message is always cut at the same places: packet i covers the bytes from i * payload_bytes on. So every packet is
 * either wholly there or not, retransmissions never overlap partially, and one bit per packet is the whole state. At
 * the sender a bit means acknowledged, at the receiver delivered.
 */
#ifndef CL_PROTOCOL_MESSAGE_H
#define CL_PROTOCOL_MESSAGE_H

#include "protocol/endpoint.h"
#include "protocol/ranges.h"
#include "protocol/unexpected.h"

enum cl_message_side { CL_MESSAGE_SEND, CL_MESSAGE_RECEIVE };

/* What a message that may lose packets knows more than another: see bounded.c. All zero in a reliable one. */
struct cl_message_bound {
    uint32_t budget;      /* packets that may stay missing; 0: none, the message is reliable */
    uint32_t told_budget; /* receive: what a PROBE says it is at the sender; 0: none came. send: a PROBE was ordered */
    uint32_t protected_packets; /* send: not acknowledged yet; receive: came so far */
    uint32_t protected_told;    /* receive: how many there are, by a PROBE */
    uint32_t given_up;          /* send: lost packets that are not sent again */
    bool exhausted;             /* receive: every packet has been sent once */
    bool safe;                  /* receive: every protected packet came */
    bool guarded;               /* there may be protected packets */
    bool wary;                  /* receive: some may have been refused, and are sent once more */
    bool ending;                /* receive: in the peer's list of messages with a time to end */
    bool stopped;               /* send: a STOP came, further parts of it are awaited */
    uint64_t arrived_us;        /* receive: the latest packet */
    uint64_t deadline_us;       /* receive: UINT64_MAX: none */
    /* send: which packets are protected: bit b of `protect` stands for protect_bytes bytes of the map's range */
    const uint64_t *protect;
    uint64_t protect_bytes, protect_offset;
    uint32_t protect_first, protect_last; /* packets at either end */
};

struct cl_message {
    /* name */
    struct cl_message_id id;
    uint16_t peer;
    uint8_t side;
    uint16_t signature; /* of its operation: here, or while not posted, at the sender */

    uint8_t priority;
    bool posted;         /* false: a receive that only holds stashed packets so far */
    bool queued;         /* send: in the queue */
    bool held;           /* send: refused by a receiver without room, waiting for its READY */
    bool accepted;       /* send: the receiver has taken some packet of it */
    bool probing;        /* send: held before, one packet was let go to see */
    bool announced;      /* receive: point-to-point, and not posted yet */
    uint32_t generation; /* changes when the struct is reused: see cl_sent_packet */
    uint32_t length;
    uint32_t packet_count;
    uint32_t packets_done;
    uint32_t packets_in_flight; /* send */
    uint32_t next_packet;       /* send: the lowest never sent */
    struct cl_ranges lost;      /* send: packets to send again */
    struct cl_ranges forgone;   /* send: packets once given up; after a STOP: packets it has told about */
    struct cl_message_bound bound;
    const uint8_t *data;              /* send */
    struct cl_sink sink;              /* receive */
    struct cl_unexpected_chain stash; /* receive: until it is posted */
    void *context;
    int status; /* once completed */

    uint64_t *bits;
    uint64_t inline_bits;
    uint32_t bits_words; /* capacity of `bits` */

    struct cl_message *hash_next;
    struct cl_message *previous, *next; /* in the queue, among the held, the announced or the completed */
};

/* Makes the message `length` bytes long, with no packet done. False when there is no memory. */
bool cl_message_begin(struct cl_message *message, uint32_t length, uint32_t payload_bytes);
/* Releases what the message owns except the stash chain; the struct may be begun again. */
void cl_message_free(struct cl_message *message);

/* The packet to send next, lost ones first; false when there is none. */
bool cl_message_take(struct cl_message *message, uint32_t *packet);
/* Marks a packet done; false when it already was. */
bool cl_message_done(struct cl_message *message, uint32_t packet);
/* Gives a packet back to be sent again, unless it is done. False when there is no memory. */
bool cl_message_give_back(struct cl_message *message, uint32_t packet);
/* The bytes of the packets that are not done. False when there is no memory. */
bool cl_message_missing(const struct cl_message *message, uint32_t payload_bytes, struct cl_ranges *missing);

static inline bool cl_message_is_done(const struct cl_message *message, uint32_t packet)
{
    return message->bits[packet / 64] >> (packet % 64) & 1;
}

static inline bool cl_message_complete(const struct cl_message *message)
{
    return message->packets_done == message->packet_count;
}

static inline bool cl_message_sendable(const struct cl_message *message)
{
    return message->lost.count > 0 || message->next_packet < message->packet_count;
}

#endif
