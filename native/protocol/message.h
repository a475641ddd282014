/*
 * Message: one transfer, at its sender or at its receiver.
 *
 * A message is always cut at the same places: packet i covers the bytes from i * packet_bytes on. So a packet is there
 * as a whole or not at all, retransmissions never overlap in part, and one bit per packet is the whole state: whether
 * it has arrived at the receiver. The sender knows this from acknowledgements. packet_bytes is the payload of the
 * peer's full packets or, for a message of encoded values, the whole blocks that fit into it.
 */
#pragma once

#include "protocol/index.h"
#include "protocol/message_id.h"
#include "protocol/ranges.h"
#include "protocol/sink.h"
#include "protocol/unexpected.h"

enum cl_message_side { CL_MESSAGE_SEND, CL_MESSAGE_RECEIVE };

/* What both sides use: the first member of cl_send and of cl_receive, of which `side` tells which one it is. */
struct cl_message {
    /* name */
    struct cl_message_id id;
    uint16_t peer;
    uint16_t signature; /* the signature of its operation here; while not posted, of the sender's operation */
    uint8_t side;       /* enum cl_message_side */

    bool posted;         /* false: a receive that so far only holds unexpected packets */
    uint32_t generation; /* changes when the struct is reused: see cl_sent_packet */
    uint32_t length;
    uint32_t packet_bytes;
    uint32_t packet_count;
    uint32_t packets_arrived;
    uint32_t loss_budget; /* packets that may stay missing; 0: none, the message is reliable */
    int status;           /* once completed */
    void *context;
    uint64_t first_us; /* when the first packet was sent or received; 0: none was */

    uint64_t *arrived; /* a bit per packet */
    uint64_t inline_arrived;
    uint32_t arrived_words; /* capacity of `arrived` */

    struct cl_index_place name;         /* in the table */
    struct cl_index_place operation;    /* under its operation, among those that are held or not posted */
    struct cl_message *previous, *next; /* in the queue, among the held, the announced, the ending or the completed */
};

/* The additional state of a partial send: see partial.c. All zero in a reliable one. */
struct cl_send_partial {
    bool has_run_out;           /* a PROBE was ordered */
    bool guarded;               /* there may be protected packets */
    bool stopped;               /* a STOP came; further parts of it may follow */
    uint32_t given_up;          /* lost packets that are not sent again */
    uint32_t protected_count;   /* protected packets */
    uint32_t protected_arrived; /* how many of these have arrived */
    /* which packets are protected: bit b of `protect` stands for protect_bytes bytes of the map's range */
    const uint64_t *protect;
    uint64_t protect_bytes, protect_offset;
    uint32_t protect_first, protect_last; /* packets at either end */
    uint64_t packet_values, values;       /* bytes of that range in a full packet, and in all of them */
};

struct cl_send {
    struct cl_message message;
    const uint8_t *data;
    uint8_t priority;
    uint16_t order; /* within its class, see cl_qos */
    bool queued;    /* in the queue */
    bool held;      /* refused by a receiver without room, waiting for its READY */
    bool accepted;  /* the receiver has accepted a packet of it */
    bool probing;   /* was held; one packet was sent to find out whether there is room */
    uint32_t packets_in_flight;
    uint32_t next_packet;       /* the lowest packet that was never sent */
    uint32_t granted;           /* packets before this one may be sent: see credit.h; UINT32_MAX: all */
    uint64_t asked_us;          /* when it asked for this credit */
    struct cl_ranges lost;      /* packets to send again; the first of them has not arrived, others may have */
    uint32_t refused;           /* how many of these the receiver had no room for */
    uint32_t repeated;          /* how many of these to count as early: see repeat.h */
    uint32_t packets_counted;   /* packets that the receiver counts, after a STOP */
    uint32_t counted_words;     /* capacity of `counted` */
    uint64_t *counted;          /* a bit per packet that the receiver counts, after a STOP */
    struct cl_ranges forgone;   /* packets once given up */
    struct cl_ranges stop_told; /* packets of which a STOP has told whether they count */
    struct cl_send_partial partial;
};

/* Of messages that need credit: `send` asked for it before `other`. */
static inline bool cl_send_is_older(const struct cl_send *send, const struct cl_send *other)
{
    return send->granted != UINT32_MAX && other->granted != UINT32_MAX && send->asked_us < other->asked_us;
}

/* The additional state of a partial receive: see partial.c. All zero in a reliable one. */
struct cl_receive_partial {
    bool exhausted;             /* the sender has sent every packet once */
    bool safe;                  /* every protected packet has come */
    bool guarded;               /* there may be protected packets */
    bool wary;                  /* packets may have been refused, and are sent once more */
    bool ending;                /* in the peer's list of messages with a time to end */
    uint32_t told_budget;       /* the sender's loss budget, from its PROBE; 0: none came */
    uint32_t protected_count;   /* protected packets, from a PROBE */
    uint32_t protected_arrived; /* protected packets that have come */
    uint64_t arrived_us;        /* when the latest packet came */
    uint64_t deadline_us;       /* UINT64_MAX: none */
};

/* What the sender of a receive may send: see credit.c. All zero where it needs no credit. */
struct cl_receive_credit {
    bool requested;
    bool listed;
    uint8_t class;
    uint32_t granted; /* the packets before this one */
    uint32_t owed;    /* packets of these that have not come and are not written off */
    uint64_t owed_us; /* when the latest was granted or came */
    struct cl_receive *previous, *next;
};

struct cl_receive {
    struct cl_message message;
    struct cl_sink sink;
    struct cl_receive_credit credit;
    struct cl_unexpected_chain unexpected; /* until it is posted */
    bool announced;                        /* point-to-point, and not posted yet */
    struct cl_receive_partial partial;
};

/* NULL: the message is a receive, or is NULL. */
static inline struct cl_send *cl_message_as_send(struct cl_message *message)
{
    return message != NULL && message->side == CL_MESSAGE_SEND ? (struct cl_send *)message : NULL;
}

/* NULL: the message is a send, or is NULL. */
static inline struct cl_receive *cl_message_as_receive(struct cl_message *message)
{
    return message != NULL && message->side == CL_MESSAGE_RECEIVE ? (struct cl_receive *)message : NULL;
}

/* Makes the message `length` bytes long, with no packet arrived. False when there is no memory. */
bool cl_message_begin(struct cl_message *message, uint32_t length, uint32_t packet_bytes);
/* Notes that a packet has arrived; false when that is known already. For a send see cl_send_arrive. */
bool cl_message_arrive(struct cl_message *message, uint32_t packet);
/* The bytes of the packets whose bit in `counted` is not set. False when there is no memory. */
bool cl_message_missing(const struct cl_message *message, const uint64_t *counted, struct cl_ranges *missing);
/* Releases what the message owns, as cl_send_free does for a send; the struct may be begun again. */
void cl_message_free(struct cl_message *message);

/* The packet to send next, lost ones first; false when there is none. */
bool cl_send_take(struct cl_send *send, uint32_t *packet);
/* Notes that a packet has arrived; false when that is known already. */
bool cl_send_arrive(struct cl_send *send, uint32_t packet);
/* Gives a packet back to be sent again, unless it has arrived. False when there is no memory. */
__attribute__((warn_unused_result)) bool cl_send_give_back(struct cl_send *send, uint32_t packet);
/* A STOP came: nothing is sent any more, and no packet counts until a STOP says so. False when there is no memory. */
bool cl_send_stop(struct cl_send *send);
void cl_send_free(struct cl_send *send);

/* Messages in one of an endpoint's lists; a message is in one at most. */
struct cl_message_list {
    struct cl_message *first, *last;
};

/* Puts the message behind `before`; NULL: first. */
static inline void cl_message_list_insert(struct cl_message_list *list, struct cl_message *before,
                                          struct cl_message *message)
{
    message->previous = before;
    message->next = before != NULL ? before->next : list->first;
    *(before != NULL ? &before->next : &list->first) = message;
    *(message->next != NULL ? &message->next->previous : &list->last) = message;
}

static inline void cl_message_list_append(struct cl_message_list *list, struct cl_message *message)
{
    cl_message_list_insert(list, list->last, message);
}

static inline void cl_message_list_remove(struct cl_message_list *list, struct cl_message *message)
{
    *(message->previous != NULL ? &message->previous->next : &list->first) = message->next;
    *(message->next != NULL ? &message->next->previous : &list->last) = message->previous;
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
static inline bool cl_send_unsent(const struct cl_send *send)
{
    return send->lost.count > 0 || send->next_packet < send->message.packet_count;
}

/* Whether packets are left that may be sent: lost ones need no credit. */
static inline bool cl_send_sendable(const struct cl_send *send)
{
    return cl_send_unsent(send) && (send->lost.count > 0 || send->next_packet < send->granted);
}
