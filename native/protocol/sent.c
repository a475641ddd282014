#include "protocol/sent.h"

#include <stdlib.h>

#include "protocol/packet.h"

enum { INITIAL_CAPACITY = 64 };

static struct cl_sent_packet *slot(const struct cl_sent *sent, uint64_t number)
{
    return &sent->ring[number & (sent->capacity - 1)];
}

static bool grow(struct cl_sent *sent)
{
    uint32_t capacity = sent->capacity ? 2 * sent->capacity : INITIAL_CAPACITY;
    struct cl_sent_packet *ring = calloc(capacity, sizeof(*ring));
    if (ring == NULL)
        return false;
    for (uint64_t number = sent->low; number < sent->next; number++)
        ring[number & (capacity - 1)] = *slot(sent, number);
    free(sent->ring);
    sent->ring = ring;
    sent->capacity = capacity;
    return true;
}

bool cl_sent_push(struct cl_sent *sent, const struct cl_sent_packet *packet)
{
    if (!sent->packets)
        sent->low = sent->next;
    if (sent->next - sent->low >= sent->capacity && !grow(sent))
        return false;
    struct cl_sent_packet *kept = slot(sent, sent->next++);
    *kept = *packet;
    kept->in_flight = true;
    sent->packets++;
    sent->bytes += packet->bytes;
    sent->class_bytes[packet->class] += packet->bytes;
    if (packet->kind == CL_PACKET_PING)
        sent->pings++;
    else
        sent->last_sent_us = packet->sent_us;
    return true;
}

struct cl_sent_packet *cl_sent_find(const struct cl_sent *sent, uint64_t number)
{
    if (number < sent->low || number >= sent->next || !sent->packets)
        return NULL;
    struct cl_sent_packet *packet = slot(sent, number);
    return packet->in_flight ? packet : NULL;
}

void cl_sent_remove(struct cl_sent *sent, uint64_t number)
{
    struct cl_sent_packet *packet = slot(sent, number);
    packet->in_flight = false;
    sent->packets--;
    sent->bytes -= packet->bytes;
    sent->class_bytes[packet->class] -= packet->bytes;
    sent->pings -= packet->kind == CL_PACKET_PING;
    while (sent->low < sent->next && !slot(sent, sent->low)->in_flight)
        sent->low++;
}

void cl_sent_free(struct cl_sent *sent)
{
    free(sent->ring);
    *sent = (struct cl_sent){.low = sent->next, .next = sent->next};
}
