#include "protocol/unexpected.h"

#include <stdlib.h>
#include <string.h>

static size_t cost(const struct cl_unexpected *unexpected)
{
    return sizeof(struct cl_unexpected_packet) + unexpected->payload_bytes;
}

void cl_unexpected_init(struct cl_unexpected *unexpected, size_t limit_bytes, uint32_t payload_bytes)
{
    *unexpected = (struct cl_unexpected){.limit_bytes = limit_bytes, .payload_bytes = payload_bytes};
}

void cl_unexpected_free(struct cl_unexpected *unexpected)
{
    while (unexpected->free != NULL) {
        struct cl_unexpected_packet *packet = unexpected->free;
        unexpected->free = packet->next;
        free(packet);
    }
}

bool cl_unexpected_put(struct cl_unexpected *unexpected, struct cl_unexpected_chain *chain, uint32_t offset,
                       uint8_t flags, const uint8_t *payload, uint16_t length)
{
    if (unexpected->used_bytes + cost(unexpected) > unexpected->limit_bytes)
        return false;
    struct cl_unexpected_packet *packet = unexpected->free;
    if (packet != NULL)
        unexpected->free = packet->next;
    else if ((packet = malloc(cost(unexpected))) == NULL)
        return false;
    unexpected->used_bytes += cost(unexpected);
    packet->next = NULL;
    packet->offset = offset;
    packet->length = length;
    packet->flags = flags;
    memcpy(packet->payload, payload, length);
    if (chain->last != NULL)
        chain->last->next = packet;
    else
        chain->first = packet;
    chain->last = packet;
    return true;
}

struct cl_unexpected_packet *cl_unexpected_take(struct cl_unexpected_chain *chain)
{
    struct cl_unexpected_packet *packet = chain->first;
    if (packet != NULL) {
        chain->first = packet->next;
        if (chain->first == NULL)
            chain->last = NULL;
    }
    return packet;
}

void cl_unexpected_release(struct cl_unexpected *unexpected, struct cl_unexpected_packet *packet)
{
    unexpected->used_bytes -= cost(unexpected);
    packet->next = unexpected->free;
    unexpected->free = packet;
}

void cl_unexpected_drop(struct cl_unexpected *unexpected, struct cl_unexpected_chain *chain)
{
    struct cl_unexpected_packet *packet;
    while ((packet = cl_unexpected_take(chain)) != NULL)
        cl_unexpected_release(unexpected, packet);
}
