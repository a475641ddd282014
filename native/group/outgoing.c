#include "group/outgoing.h"

#include "commlayer.h"

enum { EAGER_BYTES_MOST = 64 << 10, PIECE_BYTES_MOST = 32 << 10 };

/* The longest message that the ring carries as a whole. */
static uint64_t eager_bytes(const struct cl_ring *ring)
{
    return ring->bytes / 4 < EAGER_BYTES_MOST ? ring->bytes / 4 : EAGER_BYTES_MOST;
}

struct cl_transfer *cl_outgoing_take(struct cl_channel *channel, uint64_t number)
{
    for (struct cl_transfer **at = &channel->offered.first; *at != NULL; at = &(*at)->next)
        if ((*at)->number == number)
            return cl_transfers_take(&channel->offered, at);
    return NULL;
}

/* Writes the head of a send, and all of it if it is eager. */
static bool announce(struct cl_channels *channels, struct cl_channel *channel, struct cl_transfer *transfer)
{
    struct cl_ring_entry entry = {.class = transfer->class, .tag = transfer->tag, .length = transfer->length};
    uint64_t cost = cl_ring_cost(transfer->length);
    uint64_t granted = atomic_load_explicit(&channel->out.memory->granted, memory_order_acquire);
    if (transfer->length <= eager_bytes(&channel->out) && channel->eager_bytes + cost <= granted) {
        entry.kind = CL_RING_EAGER;
        if (!cl_channel_write(channels, channel, &entry, transfer->memory, transfer->length, 0))
            return false;
        channel->eager_bytes += cost;
        cl_channel_tell(channels, channel, false);
        return true;
    }
    entry.kind = CL_RING_OFFER;
    entry.number = channel->offers + 1;
    entry.address = (uint64_t)(uintptr_t)transfer->memory;
    if (!cl_channel_write(channels, channel, &entry, NULL, 0, 0))
        return false;
    transfer->number = ++channel->offers;
    cl_channel_tell(channels, channel, true);
    return true;
}

void cl_outgoing_announce(struct cl_channels *channels, struct cl_channel *channel)
{
    while (channel->sends.first != NULL && announce(channels, channel, channel->sends.first)) {
        struct cl_transfer *transfer = cl_transfers_take(&channel->sends, &channel->sends.first);
        cl_transfer_begin(channels, transfer);
        if (transfer->number == 0)
            cl_channel_end(channels, transfer, CL_OK);
        else
            cl_transfers_append(&channel->offered, transfer);
    }
}

bool cl_outgoing_stream(struct cl_channels *channels, struct cl_channel *channel, uint64_t budget)
{
    uint64_t piece = channel->out.bytes / 8 < PIECE_BYTES_MOST ? channel->out.bytes / 8 : PIECE_BYTES_MOST;
    for (uint64_t written = 0; channel->streams.first != NULL;) {
        if (written >= budget)
            return true;
        struct cl_transfer **best = &channel->streams.first;
        for (struct cl_transfer **at = best; *at != NULL; at = &(*at)->next)
            if ((*at)->class < (*best)->class)
                best = at;
        struct cl_transfer *transfer = *best;
        uint64_t left = transfer->length - transfer->moved, bytes = left < piece ? left : piece;
        struct cl_ring_entry entry = {.kind = CL_RING_DATA, .length = bytes, .number = transfer->number};
        if (!cl_channel_write(channels, channel, &entry, transfer->memory + transfer->moved, bytes,
                              channel->out.bytes / 2))
            return false;
        cl_channel_tell(channels, channel, false);
        written += bytes;
        transfer->moved += bytes;
        if (transfer->moved == transfer->length)
            cl_channel_end(channels, cl_transfers_take(&channel->streams, best), CL_OK);
    }
    return false;
}
