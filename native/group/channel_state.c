#include "group/channel_state.h"

#include "commlayer.h"

void cl_transfers_init(struct cl_transfer_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

void cl_transfers_append(struct cl_transfer_list *list, struct cl_transfer *transfer)
{
    transfer->next = NULL;
    *list->last = transfer;
    list->last = &transfer->next;
}

struct cl_transfer *cl_transfers_take(struct cl_transfer_list *list, struct cl_transfer **at)
{
    struct cl_transfer *transfer = *at;
    *at = transfer->next;
    if (transfer->next == NULL)
        list->last = at;
    return transfer;
}

void cl_channel_end(struct cl_channels *channels, struct cl_transfer *transfer, int status)
{
    transfer->status = status;
    channels->in_flight--;
}

void cl_channel_end_all(struct cl_channels *channels, struct cl_transfer_list *list, int status)
{
    while (list->first != NULL)
        cl_channel_end(channels, cl_transfers_take(list, &list->first), status);
}

void cl_channel_grant(struct cl_channel *channel, uint64_t bytes)
{
    channel->granted_bytes += bytes;
    atomic_store_explicit(&channel->in.memory->granted, channel->granted_bytes, memory_order_release);
}

void cl_channel_tell(struct cl_channels *channels, struct cl_channel *channel, bool urgent)
{
    channels->news = channel->news = true;
    channel->urgent_news |= urgent;
}

bool cl_channel_write(struct cl_channels *channels, struct cl_channel *channel, const struct cl_ring_entry *entry,
                      const void *payload, uint64_t payload_bytes, uint64_t reserve)
{
    uint64_t wanted = cl_ring_cost(payload_bytes) + reserve;
    if ((reserve > 0 && cl_ring_room(&channel->out) < wanted) ||
        !cl_ring_write(&channel->out, entry, payload, payload_bytes)) {
        if (!cl_ring_ask(&channel->out, wanted)) {
            if (channel->wanted_bytes == 0)
                cl_channel_tell(channels, channel, true); /* the reader may have nothing in flight */
            channel->wanted_bytes = wanted;
            return false;
        }
        if (!cl_ring_write(&channel->out, entry, payload, payload_bytes))
            return false;
    }
    channel->wanted_bytes = 0;
    return true;
}

void cl_channel_notify(struct cl_channels *channels, uint32_t index)
{
    struct cl_channel *channel = &channels->list[index];
    if (channel->news)
        channels->io->notify(channels->io->context, index, channel->urgent_news);
    channel->news = channel->urgent_news = false;
}
