#include "fuzz/message.h"

#include "protocol/packet.h"
#include "protocol/partial.h"

enum { MESSAGE_BYTES_MAX = 3000 };

static uint8_t content(const struct half *half, uint32_t at)
{
    return (uint8_t)(at * 37 + (at >> 8) + half->id.sequence * 11);
}

static void close_half(struct half *half)
{
    half->open = false;
    free(half->buffer); /* the sanitizer sees any later use */
    half->buffer = NULL;
}

static void post(struct conversation *c, struct half *half)
{
    half->posted = true;
    half->buffer = malloc(half->length ? half->length : 1);
    for (uint32_t i = 0; i < half->length; i++)
        half->buffer[i] = half->sends ? content(half, i) : 0;
    half->open = true;
    struct cl_endpoint *endpoint = conversation_endpoint(c, half->self);
    struct cl_sink sink = {.target = half->buffer};
    uint64_t now_us = conversation_now_us(c);
    int status = half->sends ? cl_endpoint_post_send(endpoint, half->peer, half->id, half->buffer, half->length,
                                                     &half->qos, now_us, half)
                             : cl_endpoint_post_receive(endpoint, half->peer, half->id, sink, half->length, &half->qos,
                                                        now_us, half);
    HOLDS(status == CL_OK || c->ended || c->insider);
    if (status != CL_OK)
        close_half(half);
}

void message_post(struct conversation *c)
{
    if (c->half_count + 2 > 2 * MESSAGES)
        return;
    uint32_t shape = conversation_take(c), length = conversation_take_u16(c) % MESSAGE_BYTES_MAX;
    uint16_t from = (uint16_t)(shape % ENDPOINTS),
             to = (uint16_t)((from + 1 + shape / 4 % (ENDPOINTS - 1)) % ENDPOINTS);
    struct cl_message_id id = {1 + shape / 16 % GROUPS, ++c->sequence, shape / 64 % 2};
    struct half *sender = &c->halves[c->half_count++], *receiver = &c->halves[c->half_count++];
    uint32_t sides = conversation_take(c);
    struct cl_qos qos = {.priority = (uint8_t)(id.sequence % 8), .loss_bound = sides / 4 % 3 == 2 ? 0.3 : 0};
    if (sides / 16 % 4 == 3)
        qos.protect_first = qos.protect_last = 1;
    *sender = (struct half){.self = from, .peer = to, .id = id, .length = length, .sends = true, .qos = qos};
    *receiver = (struct half){.self = to, .peer = from, .id = id, .length = length, .qos = qos};
    sender->other = receiver;
    receiver->other = sender;
    if (sides % 4 != 1)
        post(c, sender);
    if (sides % 4 != 2)
        post(c, receiver);
}

void message_post_rest(struct conversation *c, uint32_t most)
{
    for (uint32_t i = 0; i < c->half_count && most; i++)
        if (!c->halves[i].posted) {
            post(c, &c->halves[i]);
            most--;
        }
}

/* Lost packets are within the loss bound and not protected, and both sides name the same ones. */
static void check_lost(struct half *half, const struct cl_completion *completion)
{
    uint32_t payload = cl_packet_payload_bytes(DATAGRAM_BYTES), packets = (half->length + payload - 1) / payload;
    half->lost = 0;
    for (uint32_t i = 0; i < completion->missing_count; i++)
        for (uint64_t at = completion->missing[i].start; at < completion->missing[i].end; at += payload)
            half->lost |= 1u << at / payload;
    half->ended_well = true;
    HOLDS((uint32_t)__builtin_popcount(half->lost) <= cl_partial_loss_budget(packets, half->qos.loss_bound));
    HOLDS(!half->lost || !half->qos.protect_first || !(half->lost & (1u | 1u << (packets - 1))));
    HOLDS(!half->other->ended_well || half->other->lost == half->lost);
    conversation_counters.messages_stopped += half->lost != 0;
}

void message_complete(struct conversation *c, const struct cl_completion *completion)
{
    struct half *half = completion->context;
    HOLDS(half->open && half->peer == completion->peer);
    if (completion->status == CL_OK) {
        conversation_counters.messages_done++;
        if (!c->insider)
            check_lost(half, completion);
        for (uint32_t i = 0; i < half->length && !half->sends && !c->insider; i++) {
            bool lost = half->lost >> i / cl_packet_payload_bytes(DATAGRAM_BYTES) & 1;
            HOLDS(half->buffer[i] == (lost ? 0 : content(half, i)));
        }
    } else {
        conversation_counters.messages_failed++;
        conversation_counters.peers_lost += completion->status == CL_EPEERLOST;
        HOLDS(c->insider || c->ended || completion->status == CL_EPEERLOST);
        c->ended = true;
    }
    close_half(half);
}

void message_cancel(struct conversation *c, uint32_t self, uint32_t group, uint32_t sequence)
{
    cl_endpoint_cancel(conversation_endpoint(c, self), group, sequence);
    for (uint32_t i = 0; i < c->half_count; i++) {
        struct half *half = &c->halves[i];
        if (!half->open || half->self != self || half->id.group != group ||
            (sequence != UINT32_MAX && half->id.sequence != sequence))
            continue;
        conversation_counters.messages_cancelled++;
        close_half(half);
    }
}

bool message_any_open(const struct conversation *c)
{
    for (uint32_t i = 0; i < c->half_count; i++)
        if (c->halves[i].open)
            return true;
    return false;
}
