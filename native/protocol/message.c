#include "protocol/message.h"

#include <stdlib.h>
#include <string.h>

bool cl_message_begin(struct cl_message *message, uint32_t length, uint32_t packet_bytes)
{
    uint32_t count = length ? (uint32_t)(((uint64_t)length + packet_bytes - 1) / packet_bytes) : 1;
    uint32_t words = (count + 63) / 64;
    if (message->arrived == NULL || message->arrived == &message->inline_arrived) {
        message->arrived = &message->inline_arrived;
        message->arrived_words = 1;
    }
    if (words > message->arrived_words) {
        uint64_t *arrived = malloc(words * sizeof(*arrived));
        if (arrived == NULL)
            return false;
        if (message->arrived != &message->inline_arrived)
            free(message->arrived);
        message->arrived = arrived;
        message->arrived_words = words;
    }
    memset(message->arrived, 0, words * sizeof(*message->arrived));
    message->length = length;
    message->packet_bytes = packet_bytes;
    message->packet_count = count;
    message->packets_arrived = 0;
    message->first_us = 0;
    return true;
}

void cl_message_free(struct cl_message *message)
{
    if (message->arrived != &message->inline_arrived)
        free(message->arrived);
    message->arrived = NULL;
}

bool cl_message_arrive(struct cl_message *message, uint32_t packet)
{
    uint64_t bit = (uint64_t)1 << (packet % 64);
    if (message->arrived[packet / 64] & bit)
        return false;
    message->arrived[packet / 64] |= bit;
    message->packets_arrived++;
    return true;
}

bool cl_message_missing(const struct cl_message *message, const uint64_t *counted, struct cl_ranges *missing)
{
    for (uint32_t packet = 0; packet < message->packet_count; packet++) {
        if (counted[packet / 64] >> (packet % 64) & 1)
            continue;
        uint64_t start = (uint64_t)packet * message->packet_bytes, end = start + message->packet_bytes;
        if (!cl_ranges_add(missing, start, end < message->length ? end : message->length))
            return false;
    }
    return true;
}

bool cl_send_stop(struct cl_send *send)
{
    uint32_t words = (send->message.packet_count + 63) / 64;
    if (words > send->counted_words) {
        uint64_t *counted = realloc(send->counted, words * sizeof(*counted));
        if (counted == NULL)
            return false;
        send->counted = counted;
        send->counted_words = words;
    }
    memset(send->counted, 0, words * sizeof(*send->counted));
    send->partial.stopped = true;
    send->next_packet = send->message.packet_count;
    cl_ranges_clear(&send->lost);
    cl_ranges_clear(&send->forgone);
    return true;
}

void cl_send_free(struct cl_send *send)
{
    cl_message_free(&send->message);
    cl_ranges_free(&send->lost);
    cl_ranges_free(&send->forgone);
    cl_ranges_free(&send->stop_told);
    free(send->counted);
    send->counted = NULL;
    send->counted_words = 0;
}

/* Lost packets may arrive: their acknowledgements come late. Ensures that the first lost packet has not arrived, so
 * that `lost` is empty when no packet has to be sent again. */
static void forget_arrived(struct cl_send *send)
{
    uint64_t packet;
    while (send->lost.count && cl_message_has_arrived(&send->message, (uint32_t)send->lost.list[0].start))
        cl_ranges_pop(&send->lost, &packet);
}

bool cl_send_take(struct cl_send *send, uint32_t *packet)
{
    uint64_t lost;
    if (cl_ranges_pop(&send->lost, &lost)) {
        *packet = (uint32_t)lost;
        forget_arrived(send);
        return true;
    }
    if (!cl_send_sendable(send))
        return false;
    *packet = send->next_packet++;
    return true;
}

bool cl_send_arrive(struct cl_send *send, uint32_t packet)
{
    if (!cl_message_arrive(&send->message, packet))
        return false;
    forget_arrived(send);
    return true;
}

bool cl_send_give_back(struct cl_send *send, uint32_t packet)
{
    return cl_message_has_arrived(&send->message, packet) || cl_ranges_add(&send->lost, packet, (uint64_t)packet + 1);
}
