#include "group/incoming.h"

#include <stdlib.h>
#include <string.h>

#include "commlayer.h"

enum {
    OFFER_WAITS_US = 1000,  /* the time that an offer waits for a receive, before it is copied to this rank's memory */
    PART_BYTES = 256 << 10, /* read of one message, before a more urgent one may be next */
    PART_COST_BYTES = 4096, /* least part of the budget: the search for the next part takes time, too */
};

struct cl_transfer *cl_incoming_receive(struct cl_channel *channel, uint32_t tag)
{
    for (struct cl_transfer **at = &channel->receives.first; *at != NULL; at = &(*at)->next)
        if ((*at)->tag == tag)
            return cl_transfers_take(&channel->receives, at);
    return NULL;
}

struct cl_incoming *cl_incoming_keep(struct cl_channel *channel, const struct cl_ring_entry *entry)
{
    struct cl_incoming *incoming = malloc(sizeof *incoming);
    if (incoming == NULL)
        return NULL;
    *incoming = (struct cl_incoming){.length = entry->length,
                                     .number = entry->number,
                                     .address = entry->address,
                                     .tag = entry->tag,
                                     .class = (uint8_t)(entry->class & 7)};
    *channel->incoming_last = incoming;
    channel->incoming_last = &incoming->next;
    return incoming;
}

/* Frees one that has ended, and the memory that it took. */
static void drop(struct cl_channels *channels, struct cl_channel *channel, struct cl_incoming *incoming)
{
    struct cl_incoming **at = &channel->incoming;
    while (*at != incoming)
        at = &(*at)->next;
    *at = incoming->next;
    if (incoming->next == NULL)
        channel->incoming_last = at;
    if (incoming->cost > 0)
        cl_channel_grant(channel, incoming->cost);
    else if (incoming->bytes != NULL)
        channels->kept_bytes -= incoming->length;
    free(incoming->bytes);
    free(incoming);
}

void cl_incoming_arrive(struct cl_channels *channels, struct cl_channel *channel, struct cl_incoming *incoming)
{
    incoming->state = CL_INCOMING_HERE;
    if (incoming->receive == NULL)
        return;
    if (incoming->bytes != NULL && incoming->length > 0)
        memcpy(incoming->receive->memory, incoming->bytes, incoming->length);
    cl_channel_end(channels, incoming->receive, CL_OK);
    drop(channels, channel, incoming);
}

int cl_incoming_match(struct cl_channels *channels, struct cl_channel *channel, struct cl_incoming *incoming,
                      struct cl_transfer *receive)
{
    if (receive->length != incoming->length) {
        cl_channel_end(channels, receive, CL_EMISMATCH);
        return CL_EMISMATCH;
    }
    incoming->receive = receive;
    cl_transfer_begin(channels, receive);
    if (incoming->state == CL_INCOMING_HERE) {
        cl_incoming_arrive(channels, channel, incoming);
        return CL_OK;
    }
    if (incoming->bytes == NULL) {
        channels->undecided--;
        channels->fetching++;
    } else if (incoming->state == CL_INCOMING_OFFERED) { /* begins again, in the receive's memory */
        channels->kept_bytes -= incoming->length;
        free(incoming->bytes);
        incoming->bytes = NULL;
        incoming->moved = 0;
    }
    return CL_OK;
}

/* ---- offers ---- */

/* Whether the data of an offer may be read now; else *deadline_us is lowered to the time when it may. */
static bool may_fetch(struct cl_channels *channels, struct cl_incoming *incoming, uint64_t now_us,
                      uint64_t *deadline_us)
{
    if (incoming->state != CL_INCOMING_OFFERED)
        return false;
    if (incoming->receive != NULL || incoming->bytes != NULL)
        return true;
    if (incoming->length > channels->kept_limit_bytes - channels->kept_bytes)
        return false;
    if (now_us - incoming->since_us < OFFER_WAITS_US) {
        if (incoming->since_us + OFFER_WAITS_US < *deadline_us)
            *deadline_us = incoming->since_us + OFFER_WAITS_US;
        return false;
    }
    incoming->bytes = malloc(incoming->length + 1);
    if (incoming->bytes == NULL)
        return false;
    channels->kept_bytes += incoming->length;
    channels->undecided--;
    channels->fetching++;
    return true;
}

/* Writes the answer that an offer waits for; false: no room. */
static bool answer(struct cl_channels *channels, struct cl_channel *channel, struct cl_incoming *incoming)
{
    bool taken = incoming->state == CL_INCOMING_READ;
    struct cl_ring_entry entry = {.kind = taken ? CL_RING_TAKEN : CL_RING_STREAM, .number = incoming->number};
    if (!cl_channel_write(channels, channel, &entry, NULL, 0, 0))
        return false;
    cl_channel_tell(channels, channel, false);
    if (taken) {
        channels->fetching--;
        cl_incoming_arrive(channels, channel, incoming);
    } else {
        incoming->state = CL_INCOMING_STREAMING;
    }
    return true;
}

/* Reads a part of an offer from the sender's memory. Returns its length. */
static uint64_t read_part(struct cl_channels *channels, uint32_t index, struct cl_incoming *incoming)
{
    const struct cl_group_io *io = channels->io;
    uint8_t *target = incoming->bytes != NULL ? incoming->bytes : incoming->receive->memory;
    uint64_t left = incoming->length - incoming->moved, bytes = left < PART_BYTES ? left : PART_BYTES;
    uint32_t culprit;
    if (io->read_memory(io->context, index, incoming->address + incoming->moved, target + incoming->moved, bytes) !=
        CL_OK) {
        incoming->moved = 0;
        incoming->state = CL_INCOMING_REFUSED;
        return 0;
    }
    incoming->moved += bytes;
    /* A sender that gives up says so before its memory is another's: then the last bytes may be wrong. */
    if (incoming->moved == incoming->length && io->aborted(io->context, &culprit) == CL_OK)
        incoming->state = CL_INCOMING_READ;
    return bytes;
}

void cl_incoming_answer(struct cl_channels *channels, struct cl_channel *channel)
{
    for (struct cl_incoming *incoming = channel->incoming, *next; incoming != NULL; incoming = next) {
        next = incoming->next;
        bool waits = incoming->state == CL_INCOMING_REFUSED || incoming->state == CL_INCOMING_READ;
        if (waits && !answer(channels, channel, incoming))
            return;
    }
}

/* The most urgent offer whose data may be read now, and the local index of its sender; NULL: there is none. Senders of
 * equally urgent offers take turns. */
static struct cl_incoming *choose(struct cl_channels *channels, uint64_t now_us, uint64_t *deadline_us, uint32_t *index)
{
    struct cl_incoming *best = NULL;
    for (uint32_t n = 0; n < channels->count; n++) {
        uint32_t i = (channels->next_sender + n) % channels->count;
        for (struct cl_incoming *incoming = channels->list[i].incoming; incoming != NULL; incoming = incoming->next) {
            if ((best != NULL && incoming->class >= best->class) || !may_fetch(channels, incoming, now_us, deadline_us))
                continue;
            best = incoming;
            *index = i;
        }
    }
    if (best != NULL)
        channels->next_sender = *index + 1;
    return best;
}

bool cl_incoming_fetch(struct cl_channels *channels, uint64_t now_us, uint64_t *deadline_us, uint64_t budget)
{
    struct cl_incoming *offer;
    uint32_t index;
    while ((offer = choose(channels, now_us, deadline_us, &index)) != NULL) {
        if (budget == 0)
            return true;
        uint64_t bytes = read_part(channels, index, offer), cost = bytes > PART_COST_BYTES ? bytes : PART_COST_BYTES;
        budget -= cost < budget ? cost : budget;
        if (offer->state != CL_INCOMING_OFFERED)
            answer(channels, &channels->list[index], offer);
        else if (offer->moved == offer->length)
            return false; /* aborted */
    }
    return false;
}
