#include "protocol/message.h"

#include <stdlib.h>
#include <string.h>

bool cl_message_begin(struct cl_message *message, uint32_t length, uint32_t packet_bytes)
{
    uint32_t count = length ? (uint32_t)(((uint64_t)length + packet_bytes - 1) / packet_bytes) : 1;
    uint32_t words = (count + 63) / 64;
    if (!message->arrived || message->arrived == &message->inline_arrived) {
        message->arrived = &message->inline_arrived;
        message->arrived_words = 1;
    }
    if (words > message->arrived_words) {
        uint64_t *arrived = malloc(words * sizeof(*arrived));
        if (!arrived)
            return false;
        if (message->arrived != &message->inline_arrived)
            free(message->arrived);
        message->arrived = arrived;
        message->arrived_words = words;
    }
    memset(message->arrived, 0, words * sizeof(*message->arrived));
    cl_ranges_clear(&message->lost);
    cl_ranges_clear(&message->forgone);
    cl_ranges_clear(&message->stop_told);
    message->length = length;
    message->packet_bytes = packet_bytes;
    message->packet_count = count;
    message->packets_arrived = message->packets_counted = 0;
    message->packets_in_flight = 0;
    message->next_packet = 0;
    message->refused = 0;
    message->first_us = 0;
    return true;
}

void cl_message_free(struct cl_message *message)
{
    if (message->arrived != &message->inline_arrived)
        free(message->arrived);
    message->arrived = NULL;
    cl_ranges_free(&message->lost);
    cl_ranges_free(&message->forgone);
    cl_ranges_free(&message->stop_told);
    free(message->counted);
    message->counted = NULL;
    message->counted_words = 0;
}

bool cl_message_stop(struct cl_message *message)
{
    uint32_t words = (message->packet_count + 63) / 64;
    if (words > message->counted_words) {
        uint64_t *counted = realloc(message->counted, words * sizeof(*counted));
        if (!counted)
            return false;
        message->counted = counted;
        message->counted_words = words;
    }
    memset(message->counted, 0, words * sizeof(*message->counted));
    message->partial.stopped = true;
    message->next_packet = message->packet_count;
    cl_ranges_clear(&message->lost);
    cl_ranges_clear(&message->forgone);
    return true;
}

/* Lost packets may arrive: their acknowledgements come late. Ensures that the first lost packet has not arrived, so
 * that `lost` is empty when no packet has to be sent again. */
static void forget_arrived(struct cl_message *message)
{
    uint64_t packet;
    while (message->lost.count && cl_message_has_arrived(message, (uint32_t)message->lost.list[0].start))
        cl_ranges_pop(&message->lost, &packet);
}

bool cl_message_take(struct cl_message *message, uint32_t *packet)
{
    uint64_t lost;
    if (cl_ranges_pop(&message->lost, &lost)) {
        *packet = (uint32_t)lost;
        forget_arrived(message);
        return true;
    }
    if (message->next_packet >= message->packet_count)
        return false;
    *packet = message->next_packet++;
    return true;
}

bool cl_message_arrive(struct cl_message *message, uint32_t packet)
{
    uint64_t bit = (uint64_t)1 << (packet % 64);
    if (message->arrived[packet / 64] & bit)
        return false;
    message->arrived[packet / 64] |= bit;
    message->packets_arrived++;
    forget_arrived(message);
    return true;
}

bool cl_message_give_back(struct cl_message *message, uint32_t packet)
{
    return cl_message_has_arrived(message, packet) || cl_ranges_add(&message->lost, packet, (uint64_t)packet + 1);
}

bool cl_message_missing(const struct cl_message *message, struct cl_ranges *missing)
{
    const uint64_t *counted = message->partial.stopped ? message->counted : message->arrived;
    for (uint32_t packet = 0; packet < message->packet_count; packet++) {
        if (counted[packet / 64] >> (packet % 64) & 1)
            continue;
        uint64_t start = (uint64_t)packet * message->packet_bytes, end = start + message->packet_bytes;
        if (!cl_ranges_add(missing, start, end < message->length ? end : message->length))
            return false;
    }
    return true;
}
