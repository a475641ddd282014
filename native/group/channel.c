#include "group/channel.h"

#include <stdlib.h>
#include <string.h>

#include "commlayer.h"
#include "group/incoming.h"
#include "group/outgoing.h"

enum {
    KEPT_BYTES = 16 << 20, /* bound of the memory for messages without a receive, twice: eager ones, and offers */
    /* Bytes moved between two looks at the sockets: from other ranks' memory, and through their rings, all together. */
    BUDGET_BYTES = 1 << 20,
};

/* ---- opening ---- */

int cl_channels_init(struct cl_channels *channels, const struct cl_channels_options *options)
{
    *channels = (struct cl_channels){.io = options->io,
                                     .count = options->count,
                                     .self = options->self,
                                     .ranks = options->local,
                                     .lost = options->lost,
                                     .kept_limit_bytes = KEPT_BYTES};
    channels->list = calloc(options->count, sizeof *channels->list);
    channels->index = malloc(options->size * sizeof *channels->index);
    if (channels->list == NULL || channels->index == NULL)
        return CL_ENOMEM;
    memset(channels->index, 0xff, options->size * sizeof *channels->index);
    for (uint32_t i = 0; i < options->count; i++) {
        struct cl_channel *channel = &channels->list[i];
        channels->index[options->local[i]] = i;
        cl_transfers_init(&channel->sends);
        cl_transfers_init(&channel->offered);
        cl_transfers_init(&channel->streams);
        cl_transfers_init(&channel->receives);
        channel->incoming_last = &channel->incoming;
    }
    return CL_OK;
}

void cl_channels_listen(struct cl_channels *channels, _Atomic uint32_t *requests)
{
    channels->requests = requests;
}

void cl_channels_map(struct cl_channels *channels, uint32_t index, void *out, void *in, uint64_t bytes)
{
    struct cl_channel *channel = &channels->list[index];
    uint64_t share = channels->kept_limit_bytes / channels->count;
    cl_ring_open(&channel->out, out, bytes);
    cl_ring_open(&channel->in, in, bytes);
    cl_channel_grant(channel, share > bytes ? share : bytes);
}

void cl_channels_forget(struct cl_channels *channels)
{
    for (uint32_t i = 0; channels->list != NULL && i < channels->count; i++) {
        struct cl_channel *channel = &channels->list[i];
        cl_transfers_init(&channel->sends);
        cl_transfers_init(&channel->offered);
        cl_transfers_init(&channel->streams);
        cl_transfers_init(&channel->receives);
        for (struct cl_incoming *incoming = channel->incoming, *next; incoming != NULL; incoming = next) {
            next = incoming->next;
            free(incoming->bytes);
            free(incoming);
        }
        channel->incoming = NULL;
        channel->incoming_last = &channel->incoming;
        channel->wanted_bytes = 0;
        channel->news = channel->urgent_news = false;
    }
    channels->news = channels->behind = false;
    channels->in_flight = channels->fetching = channels->undecided = 0;
    channels->kept_bytes = 0;
}

void cl_channels_free(struct cl_channels *channels)
{
    cl_channels_forget(channels);
    free(channels->list);
    free(channels->index);
}

struct cl_channel *cl_channels_with(const struct cl_channels *channels, uint32_t rank)
{
    uint32_t index = channels->index[rank];
    struct cl_channel *channel = index == UINT32_MAX || index == channels->self ? NULL : &channels->list[index];
    return channel == NULL || channel->out.memory == NULL ? NULL : channel;
}

/* ---- transfers ---- */

int cl_channel_send(struct cl_channels *channels, struct cl_channel *channel, struct cl_transfer *transfer)
{
    transfer->status = CL_EAGAIN;
    transfer->number = transfer->moved = 0;
    channels->in_flight++;
    cl_transfers_append(&channel->sends, transfer);
    cl_outgoing_announce(channels, channel);
    return CL_OK;
}

int cl_channel_receive(struct cl_channels *channels, struct cl_channel *channel, struct cl_transfer *transfer)
{
    transfer->status = CL_EAGAIN;
    channels->in_flight++;
    for (struct cl_incoming *incoming = channel->incoming; incoming != NULL; incoming = incoming->next)
        if (incoming->tag == transfer->tag && incoming->receive == NULL)
            return cl_incoming_match(channels, channel, incoming, transfer);
    cl_transfers_append(&channel->receives, transfer);
    return CL_OK;
}

bool cl_channels_find(struct cl_channels *channels, uint32_t tag, uint32_t *rank)
{
    for (uint32_t n = 0; n < channels->count; n++) {
        uint32_t i = (channels->next + n) % channels->count;
        for (const struct cl_incoming *incoming = channels->list[i].incoming; incoming != NULL;
             incoming = incoming->next) {
            if (incoming->tag != tag || incoming->receive != NULL)
                continue;
            channels->next = i + 1;
            *rank = channels->ranks[i];
            return true;
        }
    }
    return false;
}

/* ---- reading the ring ---- */

static int read_eager(struct cl_channels *channels, struct cl_channel *channel, const struct cl_ring_entry *entry)
{
    if (entry->length > channel->in.bytes)
        return CL_EMISMATCH;
    channel->used_bytes += cl_ring_cost(entry->length);
    if (channel->used_bytes > channel->granted_bytes)
        return CL_EMISMATCH;
    struct cl_transfer *receive = cl_incoming_receive(channel, entry->tag);
    if (receive != NULL) {
        cl_transfer_begin(channels, receive);
        bool fits = receive->length == entry->length;
        bool whole = fits && cl_ring_copy(&channel->in, receive->memory, entry->length);
        cl_channel_end(channels, receive, whole ? CL_OK : CL_EMISMATCH);
        cl_channel_grant(channel, cl_ring_cost(entry->length));
        return whole ? CL_OK : CL_EMISMATCH;
    }
    struct cl_incoming *incoming = cl_incoming_keep(channel, entry);
    if (incoming == NULL)
        return CL_ENOMEM;
    incoming->state = CL_INCOMING_HERE;
    incoming->cost = cl_ring_cost(entry->length);
    incoming->bytes = malloc(entry->length + 1);
    if (incoming->bytes == NULL)
        return CL_ENOMEM;
    return cl_ring_copy(&channel->in, incoming->bytes, entry->length) ? CL_OK : CL_EMISMATCH;
}

static int read_offer(struct cl_channels *channels, struct cl_channel *channel, const struct cl_ring_entry *entry,
                      uint64_t now_us)
{
    struct cl_incoming *incoming = cl_incoming_keep(channel, entry);
    if (incoming == NULL)
        return CL_ENOMEM;
    incoming->since_us = now_us;
    channels->undecided++;
    struct cl_transfer *receive = cl_incoming_receive(channel, entry->tag);
    return receive == NULL ? CL_OK : cl_incoming_match(channels, channel, incoming, receive);
}

static int read_data(struct cl_channels *channels, struct cl_channel *channel, const struct cl_ring_entry *entry)
{
    struct cl_incoming *incoming = channel->incoming;
    while (incoming != NULL && (incoming->number != entry->number || incoming->state != CL_INCOMING_STREAMING))
        incoming = incoming->next;
    if (incoming == NULL || entry->length > incoming->length - incoming->moved)
        return CL_EMISMATCH;
    uint8_t *target = incoming->bytes != NULL ? incoming->bytes : incoming->receive->memory;
    if (!cl_ring_copy(&channel->in, target + incoming->moved, entry->length))
        return CL_EMISMATCH;
    incoming->moved += entry->length;
    if (incoming->moved == incoming->length) {
        channels->fetching--;
        cl_incoming_arrive(channels, channel, incoming);
    }
    return CL_OK;
}

/* The other rank asks for the data of an offer, or has taken it. */
static int read_answer(struct cl_channels *channels, struct cl_channel *channel, const struct cl_ring_entry *entry)
{
    struct cl_transfer *transfer = cl_outgoing_take(channel, entry->number);
    if (transfer == NULL)
        return CL_EMISMATCH;
    if (entry->kind == CL_RING_TAKEN)
        cl_channel_end(channels, transfer, CL_OK);
    else
        cl_transfers_append(&channel->streams, transfer);
    return CL_OK;
}

/* Reads entries, `budget` bytes of them: while it reads, the writer may go on writing. */
static int read_ring(struct cl_channels *channels, struct cl_channel *channel, uint64_t now_us, uint64_t budget)
{
    struct cl_ring_entry entry;
    uint64_t start = channel->in.position, told = start;
    int status = CL_OK;
    while (status == CL_OK && cl_ring_next(&channel->in, &entry)) {
        if (channel->in.position - start >= budget) {
            channels->behind = true;
            break;
        }
        uint64_t payload_bytes = 0;
        switch (entry.kind) {
        case CL_RING_EAGER:
            payload_bytes = entry.length;
            status = read_eager(channels, channel, &entry);
            break;
        case CL_RING_OFFER:
            status = read_offer(channels, channel, &entry, now_us);
            break;
        case CL_RING_DATA:
            payload_bytes = entry.length;
            status = read_data(channels, channel, &entry);
            break;
        case CL_RING_STREAM:
        case CL_RING_TAKEN:
            status = read_answer(channels, channel, &entry);
            break;
        default:
            status = CL_EMISMATCH;
        }
        if (status != CL_OK)
            break;
        cl_ring_drop(&channel->in, payload_bytes);
        if (channel->in.position - told >= channel->in.bytes / 4) { /* the writer goes on while this side reads */
            told = channel->in.position;
            if (cl_ring_answer(&channel->in))
                channels->io->notify(channels->io->context, (uint32_t)(channel - channels->list), true);
        }
    }
    if (channel->in.position != told && cl_ring_answer(&channel->in))
        cl_channel_tell(channels, channel, true);
    return status;
}

/* ---- progress ---- */

/* Ends the transfers with a rank that has gone. Returns whether there were any. */
static bool fail_waiting(struct cl_channels *channels, struct cl_channel *channel)
{
    uint32_t before = channels->in_flight;
    cl_channel_end_all(channels, &channel->sends, CL_EPEERLOST);
    cl_channel_end_all(channels, &channel->offered, CL_EPEERLOST);
    cl_channel_end_all(channels, &channel->streams, CL_EPEERLOST);
    cl_channel_end_all(channels, &channel->receives, CL_EPEERLOST);
    for (struct cl_incoming *incoming = channel->incoming; incoming != NULL; incoming = incoming->next) {
        if (incoming->receive == NULL)
            continue;
        cl_channel_end(channels, incoming->receive, CL_EPEERLOST);
        incoming->receive = NULL; /* the group fails, and forgets it */
    }
    return channels->in_flight < before;
}

static bool waits(const struct cl_channel *channel)
{
    return channel->sends.first != NULL || channel->offered.first != NULL || channel->streams.first != NULL ||
           channel->receives.first != NULL || channel->incoming != NULL;
}

/* Whether the other rank has gone. The caller asks before its ring is read: it may have written there just before. */
static bool is_gone(const struct cl_channels *channels, uint32_t index, bool waiting, uint64_t now_us)
{
    return atomic_load(&channels->lost[index]) ||
           ((waiting || waits(&channels->list[index])) && channels->io->is_gone(channels->io->context, index, now_us));
}

/* Writes to a channel whatever there is. */
static int write_ring(struct cl_channels *channels, uint32_t index, uint64_t budget, bool *more)
{
    const struct cl_group_io *io = channels->io;
    struct cl_channel *channel = &channels->list[index];
    uint32_t culprit;
    cl_incoming_answer(channels, channel);
    cl_outgoing_announce(channels, channel);
    *more |= cl_outgoing_stream(channels, channel, budget);
    cl_channel_notify(channels, index);
    bool fails = channel->gone && io->aborted(io->context, &culprit) == CL_OK && fail_waiting(channels, channel);
    return fails ? CL_EPEERLOST : CL_OK;
}

static bool is_idle(struct cl_channels *channels, bool waiting)
{
    uint32_t requests = atomic_load(channels->requests);
    bool asked = requests != channels->seen_requests;
    channels->seen_requests = requests;
    return !asked && !waiting && !channels->behind && channels->in_flight == 0 && channels->fetching == 0 &&
           channels->undecided == 0;
}

/* Tells the other ranks of messages that were sent. What came waits in the rings for its receives. */
static void notify_all(struct cl_channels *channels)
{
    for (uint32_t i = 0; i < channels->count && channels->news; i++)
        cl_channel_notify(channels, i);
    channels->news = false;
}

int cl_channels_progress(struct cl_channels *channels, uint64_t now_us, bool waiting, bool *more, uint64_t *deadline_us,
                         uint32_t *culprit)
{
    if (channels->requests == NULL) /* no other rank on this host */
        return CL_OK;
    channels->now_us = now_us;
    if (is_idle(channels, waiting)) {
        notify_all(channels);
        return CL_OK;
    }
    uint64_t budget = BUDGET_BYTES / channels->count;
    int status = CL_OK;
    channels->behind = false;
    for (uint32_t i = 0; i < channels->count && status == CL_OK; i++) {
        *culprit = channels->ranks[i];
        if (i == channels->self)
            continue;
        channels->list[i].gone = is_gone(channels, i, waiting, now_us);
        status = read_ring(channels, &channels->list[i], now_us, budget);
    }
    if (status == CL_OK)
        *more |= cl_incoming_fetch(channels, now_us, deadline_us, BUDGET_BYTES);
    *more |= channels->behind;
    for (uint32_t i = 0; i < channels->count && status == CL_OK; i++) {
        *culprit = channels->ranks[i];
        if (i != channels->self)
            status = write_ring(channels, i, budget, more);
    }
    channels->news = false;
    return status;
}

bool cl_channels_may_sleep(struct cl_channels *channels)
{
    return !channels->news && !channels->behind && channels->undecided == 0 && !cl_channels_listens(channels, false) &&
           cl_channels_arm(channels, false);
}

bool cl_channels_arm(struct cl_channels *channels, bool waiting)
{
    if (channels->requests == NULL)
        return true;
    bool all = cl_channels_listens(channels, waiting);
    channels->io->listen(channels->io->context, all);
    for (uint32_t i = 0; all && i < channels->count; i++) {
        struct cl_channel *channel = &channels->list[i];
        if (i != channels->self &&
            (!cl_ring_is_empty(&channel->in) ||
             (channel->wanted_bytes > 0 && cl_ring_room(&channel->out) >= channel->wanted_bytes)))
            return false;
    }
    return atomic_load(channels->requests) == channels->seen_requests;
}
