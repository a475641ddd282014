#include "protocol/unexpected.h"

#include <stdlib.h>
#include <string.h>

static size_t cost(const struct cl_unexpected *stash)
{
    return sizeof(struct cl_unexpected_packet) + stash->payload_bytes;
}

void cl_unexpected_init(struct cl_unexpected *stash, size_t limit_bytes, uint32_t payload_bytes)
{
    *stash = (struct cl_unexpected){.limit_bytes = limit_bytes, .payload_bytes = payload_bytes};
}

void cl_unexpected_free(struct cl_unexpected *stash)
{
    while (stash->free) {
        struct cl_unexpected_packet *packet = stash->free;
        stash->free = packet->next;
        free(packet);
    }
}

bool cl_unexpected_put(struct cl_unexpected *stash, struct cl_unexpected_chain *chain, uint32_t offset, uint8_t flags,
                       const uint8_t *payload, uint16_t length)
{
    if (stash->used_bytes + cost(stash) > stash->limit_bytes)
        return false;
    struct cl_unexpected_packet *packet = stash->free;
    if (packet)
        stash->free = packet->next;
    else if (!(packet = malloc(cost(stash))))
        return false;
    stash->used_bytes += cost(stash);
    packet->next = NULL;
    packet->offset = offset;
    packet->length = length;
    packet->flags = flags;
    memcpy(packet->payload, payload, length);
    if (chain->last)
        chain->last->next = packet;
    else
        chain->first = packet;
    chain->last = packet;
    return true;
}

struct cl_unexpected_packet *cl_unexpected_take(struct cl_unexpected_chain *chain)
{
    struct cl_unexpected_packet *packet = chain->first;
    if (packet) {
        chain->first = packet->next;
        if (!chain->first)
            chain->last = NULL;
    }
    return packet;
}

void cl_unexpected_release(struct cl_unexpected *stash, struct cl_unexpected_packet *packet)
{
    stash->used_bytes -= cost(stash);
    packet->next = stash->free;
    stash->free = packet;
}

void cl_unexpected_drop(struct cl_unexpected *stash, struct cl_unexpected_chain *chain)
{
    struct cl_unexpected_packet *packet;
    while ((packet = cl_unexpected_take(chain)))
        cl_unexpected_release(stash, packet);
}
