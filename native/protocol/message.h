/*
 * Message: one transfer, at its sender or at its receiver.
 *
 * A message is always cut at the same places: packet i covers the bytes from i * packet_bytes on. So a packet is there
 * as a whole or not at all, retransmissions never overlap in part, and one bit per packet is the whole state: whether
 * it has arrived at the receiver. The sender knows this from acknowledgements. packet_bytes is the payload of the
 * peer's full packets or, for a message of encoded values, the whole blocks that fit into it.
 */
#ifndef CL_PROTOCOL_MESSAGE_H
#define CL_PROTOCOL_MESSAGE_H

#include "protocol/message_id.h"
#include "protocol/ranges.h"
#include "protocol/sink.h"
#include "protocol/unexpected.h"

enum cl_message_side { CL_MESSAGE_SEND, CL_MESSAGE_RECEIVE };

/* The additional state of a partial message: see partial.c. All zero in a reliable one. */
struct cl_message_partial {
    uint32_t loss_budget;       /* packets that may stay missing; 0: none, the message is reliable */
    uint32_t told_budget;       /* receive: the sender's loss budget, from its PROBE; 0: none came */
    bool has_run_out;           /* send: a PROBE was ordered */
    uint32_t protected_count;   /* send: protected packets; receive: the same, from a PROBE */
    uint32_t protected_arrived; /* of these */
    uint32_t given_up;          /* send: lost packets that are not sent again */
    bool exhausted;             /* receive: the sender has sent every packet once */
    bool safe;                  /* receive: every protected packet has come */
    bool guarded;               /* there may be protected packets */
    bool wary;                  /* receive: packets may have been refused, and are sent once more */
    bool ending;                /* receive: in the peer's list of messages with a time to end */
    bool stopped;               /* send: a STOP came; further parts of it may follow */
    uint64_t arrived_us;        /* receive: when the latest packet came */
    uint64_t deadline_us;       /* receive: UINT64_MAX: none */
    /* send: which packets are protected: bit b of `protect` stands for protect_bytes bytes of the map's range */
    const uint64_t *protect;
    uint64_t protect_bytes, protect_offset;
    uint32_t protect_first, protect_last; /* packets at either end */
    uint64_t packet_values, values;       /* bytes of that range in a full packet, and in all of them */
};

struct cl_message {
    /* name */
    struct cl_message_id id;
    uint16_t peer;
    uint8_t side;
    uint16_t signature; /* of its operation here; while not posted, of the sender's operation */

    uint8_t priority;
    uint16_t order;      /* send: within its class, see cl_qos */
    bool posted;         /* false: a receive that so far only holds unexpected packets */
    bool queued;         /* send: in the queue */
    bool held;           /* send: refused by a receiver without room, waiting for its READY */
    bool accepted;       /* send: the receiver has accepted a packet of it */
    bool probing;        /* send: was held; one packet was sent to find out whether there is room */
    bool announced;      /* receive: point-to-point, and not posted yet */
    uint32_t generation; /* changes when the struct is reused: see cl_sent_packet */
    uint32_t length;
    uint32_t packet_bytes;
    uint32_t packet_count;
    uint32_t packets_arrived;
    uint32_t packets_counted;   /* send, after a STOP */
    uint32_t packets_in_flight; /* send */
    uint32_t next_packet;       /* send: the lowest packet that was never sent */
    struct cl_ranges lost;      /* send: packets to send again; the first of them has not arrived, others may have */
    uint32_t refused;           /* send: how many of these the receiver had no room for */
    struct cl_ranges forgone;   /* send: packets once given up */
    struct cl_ranges stop_told; /* send: packets of which a STOP has told whether they count */
    struct cl_message_partial partial;
    const uint8_t *data;                   /* send */
    struct cl_sink sink;                   /* receive */
    struct cl_unexpected_chain unexpected; /* receive: until it is posted */
    void *context;
    int status;        /* once completed */
    uint64_t first_us; /* when the first packet was sent or received; 0: none was */

    uint64_t *arrived; /* a bit per packet */
    uint64_t inline_arrived;
    uint32_t arrived_words; /* capacity of `arrived` */
    uint32_t counted_words;
    uint64_t *counted; /* send, after a STOP: a bit per packet that the receiver counts */

    struct cl_message *hash_next;
    struct cl_message *previous, *next; /* in the queue, among the held, the announced or the completed */
};

/* Makes the message `length` bytes long, with no packet arrived. False when there is no memory. */
bool cl_message_begin(struct cl_message *message, uint32_t length, uint32_t packet_bytes);
/* Releases what the message owns except the unexpected packets; the struct may be begun again. */
void cl_message_free(struct cl_message *message);

/* The packet to send next, lost ones first; false when there is none. */
bool cl_message_take(struct cl_message *message, uint32_t *packet);
/* Notes that a packet has arrived; false when that is known already. */
bool cl_message_arrive(struct cl_message *message, uint32_t packet);
/* Gives a packet back to be sent again, unless it has arrived. False when there is no memory. */
__attribute__((warn_unused_result)) bool cl_message_give_back(struct cl_message *message, uint32_t packet);
/* send: a STOP came: nothing is sent any more, and no packet counts until a STOP says so. False when there is no
 * memory.
 */
bool cl_message_stop(struct cl_message *message);
/* The bytes of the packets that have not arrived, or after a STOP, do not count. False when there is no memory. */
bool cl_message_missing(const struct cl_message *message, struct cl_ranges *missing);

/* Messages in one of an endpoint's lists; a message is in one at most. */
struct cl_message_list {
    struct cl_message *first, *last;
};

static inline void cl_message_list_append(struct cl_message_list *list, struct cl_message *message)
{
    message->next = NULL;
    message->previous = list->last;
    *(list->last ? &list->last->next : &list->first) = message;
    list->last = message;
}

static inline void cl_message_list_remove(struct cl_message_list *list, struct cl_message *message)
{
    *(message->previous ? &message->previous->next : &list->first) = message->next;
    *(message->next ? &message->next->previous : &list->last) = message->previous;
    message->previous = message->next = NULL;
}

static inline bool cl_message_has_arrived(const struct cl_message *message, uint32_t packet)
{
    return message->arrived[packet / 64] >> (packet % 64) & 1;
}

static inline bool cl_message_complete(const struct cl_message *message)
{
    return message->packets_arrived == message->packet_count;
}

/* Whether packets are left to send: packets that were never sent, or lost ones that have not arrived. */
static inline bool cl_message_sendable(const struct cl_message *message)
{
    return message->lost.count > 0 || message->next_packet < message->packet_count;
}

#endif
