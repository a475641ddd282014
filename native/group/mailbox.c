#include "group/mailbox.h"

#include <stdlib.h>

void cl_mailbox_init(struct cl_mailbox *mailbox, struct cl_endpoint *endpoint, uint32_t group, uint32_t size,
                     const uint16_t *peers)
{
    *mailbox = (struct cl_mailbox){.endpoint = endpoint, .group = group | CL_GROUP_P2P, .size = size, .peers = peers};
}

static void remove_queue(struct cl_mailbox *mailbox, struct cl_mailbox_queue **at)
{
    struct cl_mailbox_queue *queue = *at;
    *at = queue->next;
    cl_endpoint_unwant(mailbox->endpoint, mailbox->group, queue->tag);
    free(queue);
}

void cl_mailbox_free(struct cl_mailbox *mailbox)
{
    while (mailbox->queues != NULL)
        remove_queue(mailbox, &mailbox->queues);
    for (uint32_t rank = 0; mailbox->sent != NULL && rank < mailbox->size; rank++)
        cl_tags_free(&mailbox->sent[rank]);
    free(mailbox->sent);
    mailbox->sent = NULL;
}

bool cl_mailbox_send(struct cl_mailbox *mailbox, uint32_t rank, uint32_t tag, uint32_t messages, uint32_t *index)
{
    if (mailbox->sent == NULL && (mailbox->sent = calloc(mailbox->size, sizeof(*mailbox->sent))) == NULL)
        return false;
    *index = cl_tags_messages(&mailbox->sent[rank], tag);
    return cl_tags_add(&mailbox->sent[rank], tag, messages);
}

/* The rank of an announced message of this tag; false: there is none. */
static bool find_remote(const struct cl_mailbox *mailbox, uint32_t tag, uint32_t *rank)
{
    uint16_t peer;
    if (!cl_endpoint_find_announced(mailbox->endpoint, mailbox->group, tag, &peer))
        return false;
    for (*rank = 0; *rank < mailbox->size; (*rank)++)
        if (mailbox->peers[*rank] == peer)
            return true;
    return false; /* the sender is no member of this group */
}

/* A rank whose message an any-source receive can take: by turns from the network and from this host. */
static bool find(struct cl_mailbox *mailbox, uint32_t tag, uint32_t *rank)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        bool local = mailbox->took_local == (attempt == 1);
        bool found = local ? mailbox->channels != NULL && cl_channels_find(mailbox->channels, tag, rank)
                           : find_remote(mailbox, tag, rank);
        if (found) {
            mailbox->took_local = local;
            return true;
        }
    }
    return false;
}

/* False: the ticket is for any source, and no message is there. */
static bool bind(struct cl_mailbox *mailbox, struct cl_ticket *ticket)
{
    uint32_t rank = ticket->source;
    if (rank == CL_ANY_SOURCE && !find(mailbox, ticket->tag, &rank))
        return false;
    ticket->source = rank;
    ticket->index =
        cl_endpoint_next_index(mailbox->endpoint, mailbox->peers[ticket->source], mailbox->group, ticket->tag);
    return true;
}

int cl_mailbox_receive(struct cl_mailbox *mailbox, struct cl_ticket *ticket, uint64_t now_us)
{
    struct cl_mailbox_queue *queue = mailbox->queues;
    while (queue != NULL && queue->tag != ticket->tag)
        queue = queue->next;
    if (queue == NULL) {
        if (bind(mailbox, ticket))
            return CL_OK;
        queue = malloc(sizeof(*queue));
        if (queue == NULL || !cl_endpoint_want(mailbox->endpoint, mailbox->group, ticket->tag, now_us)) {
            free(queue);
            return CL_ENOMEM;
        }
        *queue = (struct cl_mailbox_queue){.tag = ticket->tag, .last = &queue->first, .next = mailbox->queues};
        mailbox->queues = queue;
    }
    ticket->next = NULL;
    *queue->last = ticket;
    queue->last = &ticket->next;
    return CL_EAGAIN;
}

struct cl_ticket *cl_mailbox_next(struct cl_mailbox *mailbox)
{
    for (struct cl_mailbox_queue **at = &mailbox->queues; *at != NULL;) {
        struct cl_mailbox_queue *queue = *at;
        struct cl_ticket *ticket = queue->first;
        if (ticket == NULL) {
            remove_queue(mailbox, at);
        } else if (bind(mailbox, ticket)) {
            queue->first = ticket->next;
            if (queue->first == NULL)
                queue->last = &queue->first;
            return ticket; /* the next call removes an empty queue: the receives must be posted first */
        } else {
            at = &queue->next;
        }
    }
    return NULL;
}

bool cl_mailbox_deserted(const struct cl_mailbox *mailbox, uint64_t now_us)
{
    bool deserted = mailbox->queues != NULL;
    for (uint32_t rank = 0; deserted && rank < mailbox->size; rank++) {
        const struct cl_channel *channel = mailbox->channels == NULL ? NULL : cl_channels_with(mailbox->channels, rank);
        deserted =
            channel != NULL ? channel->gone : cl_endpoint_peer_silent(mailbox->endpoint, mailbox->peers[rank], now_us);
    }
    return deserted;
}
