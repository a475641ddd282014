#include "core/stash.h"

#include <stdlib.h>
#include <string.h>

static size_t cost(const struct cl_stash *stash)
{
    return sizeof(struct cl_stash_packet) + stash->payload_bytes;
}

void cl_stash_init(struct cl_stash *stash, size_t limit_bytes, uint32_t payload_bytes)
{
    *stash = (struct cl_stash){.limit_bytes = limit_bytes, .payload_bytes = payload_bytes};
}

void cl_stash_free(struct cl_stash *stash)
{
    while (stash->free) {
        struct cl_stash_packet *packet = stash->free;
        stash->free = packet->next;
        free(packet);
    }
}

bool cl_stash_put(struct cl_stash *stash, struct cl_stash_chain *chain, uint32_t offset, uint8_t flags,
                  const uint8_t *payload, uint16_t length)
{
    if (stash->used_bytes + cost(stash) > stash->limit_bytes)
        return false;
    struct cl_stash_packet *packet = stash->free;
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

struct cl_stash_packet *cl_stash_take(struct cl_stash_chain *chain)
{
    struct cl_stash_packet *packet = chain->first;
    if (packet) {
        chain->first = packet->next;
        if (!chain->first)
            chain->last = NULL;
    }
    return packet;
}

void cl_stash_release(struct cl_stash *stash, struct cl_stash_packet *packet)
{
    stash->used_bytes -= cost(stash);
    packet->next = stash->free;
    stash->free = packet;
}

void cl_stash_drop(struct cl_stash *stash, struct cl_stash_chain *chain)
{
    struct cl_stash_packet *packet;
    while ((packet = cl_stash_take(chain)))
        cl_stash_release(stash, packet);
}
