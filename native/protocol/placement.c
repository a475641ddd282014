#include "protocol/placement.h"

#include <string.h>

#include "kernels/prefetch.h"
#include "protocol/credit.h"
#include "protocol/messages.h"
#include "protocol/partial.h"

static enum cl_placed place(struct cl_endpoint *endpoint, struct cl_receive *receive, bool last, uint32_t offset,
                            const uint8_t *payload, uint16_t length, uint64_t now_us)
{
    struct cl_message *message = &receive->message;
    struct cl_peer *peer = endpoint->peers.list[message->peer];
    uint32_t packet = offset / peer->payload_bytes;
    uint64_t start = (uint64_t)packet * message->packet_bytes, end = start + length;
    if (last ? end != message->length : end >= message->length || length != message->packet_bytes) {
        cl_messages_mismatch(endpoint, receive);
        return CL_PLACED_NOWHERE;
    }
    if (!cl_message_arrive(message, packet))
        return CL_PLACED_BEFORE;
    cl_credit_arrived(endpoint, receive, now_us);
    peer->lacking--;
    if (peer->lacking < endpoint->lacking)
        endpoint->lacking = peer->lacking;
    endpoint->stats.payload_bytes_received += length;
    const struct cl_sink *sink = &receive->sink;
    if (length && sink->deliver != NULL) {
        sink->deliver(sink->target, start, payload, length, sink->argument);
    } else if (length) {
        memcpy(sink->target + start, payload, length);
        cl_prefetch((uintptr_t)sink->target + end, length); /* of the next packet: see the executor's deliver_reduce */
    }
    if (cl_message_complete(message)) {
        cl_history_add(&peer->history, &message->id);
        cl_partial_complete(endpoint, receive);
        cl_messages_complete(endpoint, message, CL_OK);
    }
    return CL_PLACED;
}

enum cl_placed cl_placement_put(struct cl_endpoint *endpoint, struct cl_receive *receive, uint8_t flags,
                                uint32_t offset, const uint8_t *payload, uint16_t length, uint64_t now_us)
{
    struct cl_message *message = &receive->message;
    uint32_t generation = message->generation;
    if (!message->first_us)
        message->first_us = now_us;
    enum cl_placed placed = place(endpoint, receive, flags & CL_PACKET_LAST, offset, payload, length, now_us);
    if (message->generation == generation)
        cl_partial_on_packet(endpoint, receive, flags, placed == CL_PLACED, now_us);
    return placed;
}

bool cl_placement_replay(struct cl_endpoint *endpoint, struct cl_receive *receive, uint64_t now_us)
{
    struct cl_unexpected_chain chain = receive->unexpected;
    receive->unexpected = (struct cl_unexpected_chain){0};
    uint32_t generation = receive->message.generation;
    struct cl_unexpected_packet *packet;
    while (receive->message.generation == generation && (packet = cl_unexpected_take(&chain)) != NULL) {
        cl_placement_put(endpoint, receive, packet->flags, packet->offset, packet->payload, packet->length, now_us);
        cl_unexpected_release(&endpoint->unexpected, packet);
    }
    cl_unexpected_drop(&endpoint->unexpected, &chain);
    return receive->message.generation == generation;
}
