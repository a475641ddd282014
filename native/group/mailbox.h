/*
 * Mailbox: one rank's point-to-point messages in one group: which name (see endpoint.h) each send and receive gets.
 *
 * Messages of one sender, receiver and tag are received in the order in which they were sent. A receive from a given
 * rank knows its message's name at once, so what comes goes straight to its place. One from any source must wait until
 * a message has announced itself, and receives of the same tag that come after it wait behind it, for they must not
 * take what is its. Both get the next message of the rank they are bound to.
 *
 * A transfer may be longer than a message can be: it takes several, one after the other, all of `limit` bytes but the
 * last, which is shorter, if need be empty. So the two ends never agree on a message while they disagree on the whole.
 */
#ifndef CL_GROUP_MAILBOX_H
#define CL_GROUP_MAILBOX_H

#include "protocol/endpoint.h"
#include "protocol/tags.h"

#define CL_ANY_SOURCE UINT32_MAX

/* One receive. */
struct cl_ticket {
    uint32_t source; /* rank; CL_ANY_SOURCE until it is bound */
    uint32_t tag;
    uint32_t index; /* of its first message, once it is bound */
    struct cl_ticket *next;
};

/* The receives of one tag that wait: the first is from any source. */
struct cl_mailbox_queue {
    uint32_t tag;
    struct cl_ticket *first, **last;
    struct cl_mailbox_queue *next;
};

struct cl_mailbox {
    struct cl_endpoint *endpoint;
    uint32_t group; /* with CL_GROUP_P2P */
    uint32_t size;
    const uint16_t *peers;           /* rank -> peer id */
    struct cl_tags *sent;            /* by rank, once anything was sent */
    struct cl_mailbox_queue *queues; /* NULL: nobody waits */
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
/* CL_OK: the ticket is bound, and its receives must be posted before the mailbox is asked for anything else. CL_EAGAIN:
 * it waits, and cl_mailbox_next will return it. Else CL_ENOMEM. */
int cl_mailbox_receive(struct cl_mailbox *mailbox, struct cl_ticket *ticket, uint64_t now_us);
/* A ticket that waited and is bound now, to be posted likewise; NULL: there is none. Ask until then when packets have
 * come. */
struct cl_ticket *cl_mailbox_next(struct cl_mailbox *mailbox);
/* Somebody waits for a message from any source, and nobody is left who could send it. */
bool cl_mailbox_deserted(const struct cl_mailbox *mailbox, uint64_t now_us);

#endif
