#include "protocol/message.h"

#include <stdlib.h>
#include <string.h>

bool cl_message_begin(struct cl_message *message, uint32_t length, uint32_t payload_bytes)
{
    uint32_t count = length ? (uint32_t)(((uint64_t)length + payload_bytes - 1) / payload_bytes) : 1;
    uint32_t words = (count + 63) / 64;
    if (!message->bits || message->bits == &message->inline_bits) {
        message->bits = &message->inline_bits;
        message->bits_words = 1;
    }
    if (words > message->bits_words) {
        uint64_t *bits = malloc(words * sizeof(*bits));
        if (!bits)
            return false;
        if (message->bits != &message->inline_bits)
            free(message->bits);
        message->bits = bits;
        message->bits_words = words;
    }
    memset(message->bits, 0, words * sizeof(*message->bits));
    cl_ranges_clear(&message->lost);
    cl_ranges_clear(&message->forgone);
    message->length = length;
    message->packet_count = count;
    message->packets_done = 0;
    message->packets_in_flight = 0;
    message->next_packet = 0;
    return true;
}

void cl_message_free(struct cl_message *message)
{
    if (message->bits != &message->inline_bits)
        free(message->bits);
    message->bits = NULL;
    cl_ranges_free(&message->lost);
    cl_ranges_free(&message->forgone);
}

bool cl_message_take(struct cl_message *message, uint32_t *packet)
{
    uint64_t lost;
    while (cl_ranges_pop(&message->lost, &lost)) {
        *packet = (uint32_t)lost;
        /* it may have been acknowledged late, after it was given back */
        if (!cl_message_is_done(message, *packet))
            return true;
    }
    if (message->next_packet >= message->packet_count)
        return false;
    *packet = message->next_packet++;
    return true;
}

bool cl_message_done(struct cl_message *message, uint32_t packet)
{
    uint64_t bit = (uint64_t)1 << (packet % 64);
    if (message->bits[packet / 64] & bit)
        return false;
    message->bits[packet / 64] |= bit;
    message->packets_done++;
    return true;
}

bool cl_message_give_back(struct cl_message *message, uint32_t packet)
{
    return cl_message_is_done(message, packet) || cl_ranges_add(&message->lost, packet, (uint64_t)packet + 1);
}

bool cl_message_missing(const struct cl_message *message, uint32_t payload_bytes, struct cl_ranges *missing)
{
    for (uint32_t packet = 0; packet < message->packet_count; packet++) {
        if (cl_message_is_done(message, packet))
            continue;
        uint64_t start = (uint64_t)packet * payload_bytes, end = start + payload_bytes;
        if (!cl_ranges_add(missing, start, end < message->length ? end : message->length))
            return false;
    }
    return true;
}
