/*
 * Queue: decides which message sends the next packet.
 *
 * Priority is strict over all messages of the endpoint, packet by packet. Within a class the peers take turns, and the
 * messages of a peer go by their order: the smallest first, equal ones first in, first out. A message with lost packets
 * goes before all that wait. Of messages that need credit (credit.h), the one that asked for it first has its turns
 * first. Credit comes in parts, the next part when the last one has arrived. If each part waited for a turn of all
 * peers, results would overtake contributions, for which others wait. Nobody goes before a message that needs no
 * credit, so all peers behind it keep their turns. The packets of a turn leave as one super-packet (wire/udp.c): that
 * is much cheaper, so on fast links a turn is longer, as the caller says. A short packet, the last one of most
 * messages, ends the super-packet: if less than half of a long turn is left then, the turn ends, too, and the peer has
 * the rest later, as a further turn. One packet in CL_QUEUE_GUARD is the guard's: it goes to the least urgent class
 * with data, so that no class starves. A blocked peer (no window, no tokens) has no turns until it is unblocked: it
 * costs nothing and delays nobody. A class may be blocked while more urgent classes of the same peer are not.
 */
#pragma once

#include "congestion/class.h"
#include "protocol/message.h"

enum {
    CL_QUEUE_GUARD = 64,
    CL_QUEUE_TURN = 4, /* packets, at least */
    CL_QUEUE_TURN_MOST = 32,
};

struct cl_queue_node;

/* One peer's messages of one class. */
struct cl_queue_class {
    struct cl_message_list sends;
    struct cl_queue_node *previous, *next; /* the ring of peers that have a turn in this class */
    uint32_t left; /* unused packets of earlier turns; as many as a turn has are one more turn */
};

/* One peer's place in the queue. */
struct cl_queue_node {
    struct cl_queue_class classes[CL_CLASSES_BETWEEN_HOSTS];
    uint16_t blocked; /* bit c: class c */
};

struct cl_queue {
    struct cl_queue_node *turn[CL_CLASSES_BETWEEN_HOSTS]; /* the peer whose turn it is; NULL: no peer has data */
    uint16_t classes;                                     /* bit c: turn[c] is not NULL */
    uint32_t packets;                                     /* taken so far, for the guard */
    uint32_t turn_packets;
    uint32_t turn_limit; /* packets of the present turn; fewer than CL_QUEUE_TURN count as that */
};

static inline uint32_t cl_queue_turn_limit(const struct cl_queue *queue)
{
    return queue->turn_limit > CL_QUEUE_TURN ? queue->turn_limit : CL_QUEUE_TURN;
}

void cl_queue_push(struct cl_queue *queue, struct cl_queue_node *node, struct cl_send *send, bool first);
void cl_queue_remove(struct cl_queue *queue, struct cl_queue_node *node, struct cl_send *send);
/* The message to send a packet of; NULL when there is none. */
struct cl_send *cl_queue_next(const struct cl_queue *queue);
/* The most urgent class with data; CL_CLASSES_BETWEEN_HOSTS: none. */
static inline uint8_t cl_queue_first_class(const struct cl_queue *queue)
{
    return (uint8_t)__builtin_ctz(queue->classes | 1u << CL_CLASSES_BETWEEN_HOSTS);
}
/* Moves the turn on after a packet of `send` was sent, which is in `node`, in the class of the message that
 * cl_queue_next returned. It is called before the message is removed. is_short: no further packet fits into the
 * super-packet. */
void cl_queue_sent(struct cl_queue *queue, struct cl_queue_node *node, const struct cl_send *send, bool is_short);
/* Whether the next packet is the first of a turn. */
static inline bool cl_queue_turn_begins(const struct cl_queue *queue)
{
    return queue->turn_packets == 0;
}
/* Gives the turn in this class to a peer that is not blocked and has messages of it. */
void cl_queue_give_turn(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class);
/* Blocks the peer's messages of this class and of all less urgent ones. */
void cl_queue_block(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class);
void cl_queue_unblock(struct cl_queue *queue, struct cl_queue_node *node);
