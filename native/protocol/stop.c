#include "protocol/stop.h"

#include <stdlib.h>
#include <string.h>

static bool same(const struct cl_message_id *a, const struct cl_message_id *b)
{
    return a->index == b->index && a->sequence == b->sequence && a->group == b->group;
}

struct cl_stop *cl_stops_add(struct cl_stops *stops, const struct cl_message *message, uint32_t part)
{
    size_t bytes = (message->packet_count + 63) / 64 * sizeof(uint64_t);
    struct cl_stop *stop = calloc(1, sizeof(*stop));
    uint64_t *counted = malloc(bytes);
    if (stop == NULL || counted == NULL) {
        free(stop);
        free(counted);
        return NULL;
    }
    memcpy(counted, message->arrived, bytes);
    *stop = (struct cl_stop){.id = message->id,
                             .packet_count = message->packet_count,
                             .part = part,
                             .counted = counted,
                             .next = stops->first};
    stops->first = stop;
    return stop;
}

struct cl_stop *cl_stops_find(const struct cl_stops *stops, const struct cl_message_id *id)
{
    struct cl_stop *stop = stops->first;
    while (stop != NULL && !same(&stop->id, id))
        stop = stop->next;
    return stop;
}

static void free_stop(struct cl_stop *stop)
{
    cl_ranges_free(&stop->known);
    free(stop->counted);
    free(stop);
}

void cl_stops_acked(struct cl_stops *stops, const struct cl_message_id *id, uint32_t first)
{
    struct cl_stop **link = &stops->first;
    while (*link != NULL && !same(&(*link)->id, id))
        link = &(*link)->next;
    struct cl_stop *stop = *link;
    if (stop == NULL)
        return;
    uint64_t end = (uint64_t)first + stop->part;
    cl_ranges_add(&stop->known, first, end < stop->packet_count ? end : stop->packet_count);
    if (!stop->known.count || stop->known.list[0].start != 0 || stop->known.list[0].end != stop->packet_count)
        return; /* without memory to note it, the record lasts as long as the peer */
    *link = stop->next;
    free_stop(stop);
}

void cl_stops_free(struct cl_stops *stops)
{
    while (stops->first != NULL) {
        struct cl_stop *stop = stops->first;
        stops->first = stop->next;
        free_stop(stop);
    }
}

void cl_stop_write(const struct cl_stop *stop, uint32_t first, uint8_t *payload)
{
    uint32_t bytes = cl_stop_bytes(stop->packet_count, stop->part, first);
    memset(payload, 0, bytes);
    for (uint32_t packet = first; packet < stop->packet_count && packet < first + stop->part; packet++)
        if (!cl_stop_counts(stop, packet))
            payload[(packet - first) / 8] |= (uint8_t)(1 << (packet - first) % 8);
}
