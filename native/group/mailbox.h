/*
 * Mailbox: names the point-to-point messages of one rank in one group (names: see endpoint.h).
 *
 * Messages of one sender, receiver and tag are received in the order in which they were sent. A receive from a given
 * rank knows the name of its message at once, so arriving bytes go straight to its memory. A receive from any source
 * waits until a message has announced itself. Later receives of the same tag wait behind it, so that they do not take
 * its message. A receive that is bound to a rank gets the next message of that rank.
 *
 * Messages of ranks of this host come through channels (channel.h) and need no names. The mailbox only chooses whether
 * a receive from any source takes one of those or one from the network.
 *
 * A transfer longer than a message takes several messages, one after the other: each of `limit` bytes, and a last one
 * that is shorter, perhaps empty. Two ends that disagree on the length of the transfer therefore disagree on the length
 * of a message.
 */
#pragma once

#include "group/channel.h"
#include "protocol/endpoint.h"
#include "protocol/tags.h"

#define CL_ANY_SOURCE UINT32_MAX

/* One receive. */
struct cl_ticket {
    uint32_t source; /* rank; CL_ANY_SOURCE until it is bound */
    uint32_t tag;
    uint32_t index; /* the index of its first message, once it is bound */
    struct cl_ticket *next;
};

/* The waiting receives of one tag; the first is from any source. */
struct cl_mailbox_queue {
    uint32_t tag;
    struct cl_ticket *first, **last;
    struct cl_mailbox_queue *next;
};

struct cl_mailbox {
    struct cl_endpoint *endpoint;
    uint32_t group; /* the group's number, with CL_GROUP_P2P */
    uint32_t size;
    const uint16_t *peers;           /* rank -> peer id */
    struct cl_tags *sent;            /* by rank, once anything was sent */
    struct cl_mailbox_queue *queues; /* NULL: no receive waits */
    struct cl_channels *channels;    /* the other way by which messages come; NULL: none */
    bool took_local;                 /* the latest message for a receive from any source came by a channel */
};

/* `peers` must outlive the mailbox. */
void cl_mailbox_init(struct cl_mailbox *mailbox, struct cl_endpoint *endpoint, uint32_t group, uint32_t size,
                     const uint16_t *peers);
/* Forgets the tickets that wait. */
void cl_mailbox_free(struct cl_mailbox *mailbox);

/* How many messages a transfer of `length` bytes takes. */
static inline uint64_t cl_mailbox_messages(uint64_t length, uint32_t limit)
{
    return length / limit + 1;
}

/* Names the `messages` messages of a send: *index and those after it. False when there is no memory. */
bool cl_mailbox_send(struct cl_mailbox *mailbox, uint32_t rank, uint32_t tag, uint32_t messages, uint32_t *index);
/* CL_OK: the ticket is bound, and its receives must be posted before the next call to the mailbox. CL_EAGAIN: it waits,
 * and cl_mailbox_next will return it. Else CL_ENOMEM. */
int cl_mailbox_receive(struct cl_mailbox *mailbox, struct cl_ticket *ticket, uint64_t now_us);
/* A ticket that waited and is bound now, to be posted before the next call; NULL: there is none. After packets have
 * arrived, call it until it returns NULL. */
struct cl_ticket *cl_mailbox_next(struct cl_mailbox *mailbox);
/* Whether a receive from any source waits while all other ranks are lost or silent. */
bool cl_mailbox_deserted(const struct cl_mailbox *mailbox, uint64_t now_us);
