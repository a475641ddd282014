#include "fuzz/attack.h"

#include <string.h>

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "protocol/packet.h"
#include "protocol/partial.h"

enum { OVERSIZE = 300 };

/* ---- giving a packet to an endpoint ---- */

/* An insider's packet may change anything. */
static void give_insider(struct conversation *c, uint32_t to, const uint8_t *bytes, uint32_t length)
{
    c->insider = true;
    conversation_counters.insider++;
    conversation_give(c, to, bytes, length);
}

/* An attacker's packet must be rejected: one counter changes, and nothing is due. */
static void give_attack(struct conversation *c, uint32_t to, const uint8_t *bytes, uint32_t length)
{
    struct cl_endpoint *endpoint = conversation_endpoint(c, to);
    if (endpoint->seal.auth == CL_AUTH_OFF) {
        give_insider(c, to, bytes, length);
        return;
    }
    struct cl_engine_stats before = endpoint->stats, *after = &endpoint->stats;
    uint64_t timeout_us = cl_endpoint_next_timeout(endpoint);
    const struct cl_peer *urgent = endpoint->peers.urgent_last;
    conversation_counters.rejected++;
    conversation_give(c, to, bytes, length);
    HOLDS(after->packets_foreign + after->packets_forged + after->packets_replayed ==
          before.packets_foreign + before.packets_forged + before.packets_replayed + 1);
    before.packets_foreign = after->packets_foreign;
    before.packets_forged = after->packets_forged;
    before.packets_replayed = after->packets_replayed;
    HOLDS(memcmp(&before, after, sizeof(before)) == 0);
    HOLDS(cl_endpoint_next_timeout(endpoint) == timeout_us && endpoint->peers.urgent_last == urgent);
}

/* Seals the packet as a rank would that means it for `to`. */
static void seal(struct conversation *c, uint32_t to, uint8_t *bytes, uint32_t length)
{
    if (length < CL_PACKET_HEAD_BYTES)
        return;
    struct cl_endpoint *endpoint = conversation_endpoint(c, to);
    cl_store_u16(bytes + 6, length - CL_PACKET_HEAD_BYTES);
    struct cl_packet packet;
    const struct cl_peer *peer = NULL;
    if (cl_packet_decode(&packet, bytes, length))
        peer = cl_peer_list_find(&endpoint->peers, packet.source);
    if (peer == NULL || packet.path >= peer->path_count)
        return;
    const struct cl_path *path = &peer->paths[packet.path];
    bool ack = packet.kind == CL_PACKET_ACK;
    uint64_t number = cl_packet_number(ack ? path->acks.next : path->packets.next, ack ? packet.group : packet.number);
    cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &endpoint->seal, (uint16_t)to, number);
}

static void give_sealed(struct conversation *c, uint32_t to, uint8_t *bytes, uint32_t length)
{
    seal(c, to, bytes, length);
    give_insider(c, to, bytes, length);
    conversation_turn(c, to);
}

/* ---- recorded packets ---- */

static const struct flying *recorded(struct conversation *c)
{
    uint32_t count = c->recorded_count < RECORDED ? c->recorded_count : RECORDED;
    return count ? &c->recorded[conversation_take(c) % count] : NULL;
}

void attack_repeat(struct conversation *c)
{
    const struct flying *packet = recorded(c);
    if (packet != NULL)
        give_attack(c, packet->to, packet->bytes, packet->length);
}

void attack_redirect(struct conversation *c)
{
    const struct flying *packet = recorded(c);
    if (packet != NULL)
        give_attack(c, (packet->to + 1u + conversation_take(c) % (ENDPOINTS - 1)) % ENDPOINTS, packet->bytes,
                    packet->length);
}

/* Changes bytes and perhaps the length. */
static uint32_t damage(struct conversation *c, uint8_t *bytes, uint32_t length)
{
    for (uint32_t edits = 1 + conversation_take(c) % 4; edits > 0; edits--) {
        uint32_t how = conversation_take(c), at = conversation_take_u16(c) % (length ? length : 1);
        switch (how % 6) {
        case 0:
        case 1:
            bytes[at] ^= (uint8_t)(1u << how / 8 % 8);
            break;
        case 2:
            bytes[at] = (uint8_t)conversation_take(c);
            break;
        case 3: /* a field of the header becomes a number at the edge of something */
            cl_store_u32(bytes + at % 32 / 4 * 4, (uint32_t)0 - how / 32 + (how & 8 ? 0x80000000u : 0));
            break;
        case 4:
            length = at;
            break;
        default:
            length += conversation_take(c) % (OVERSIZE - DATAGRAM_BYTES);
            length = length < OVERSIZE ? length : OVERSIZE;
            break;
        }
    }
    return length;
}

/* Whether the bytes differ only where CL_AUTH_HEADER does not look: then the packet is accepted. */
static bool passes(const struct conversation *c, const struct flying *packet, const uint8_t *bytes, uint32_t length)
{
    return length == packet->length && memcmp(bytes, packet->bytes, CL_PACKET_HEAD_BYTES) == 0 &&
           conversation_endpoint(c, 0)->seal.auth != CL_AUTH_FULL && cl_packet_kind(bytes) == CL_PACKET_DATA;
}

void attack_damage(struct conversation *c, bool sealed)
{
    uint8_t bytes[OVERSIZE] = {0};
    const struct flying *packet = recorded(c);
    if (c->flying_count && conversation_take(c) % 4)
        packet = &c->flying[conversation_take(c) % c->flying_count];
    if (packet == NULL)
        return;
    uint32_t to = packet->to;
    memcpy(bytes, packet->bytes, packet->length);
    uint32_t length = damage(c, bytes, packet->length);
    if (length == packet->length && memcmp(bytes, packet->bytes, length) == 0)
        return;
    if (sealed) {
        give_sealed(c, to, bytes, length);
    } else if (passes(c, packet, bytes, length)) {
        give_insider(c, to, bytes, length);
        conversation_turn(c, to);
    } else {
        give_attack(c, to, bytes, length);
    }
}

/* ---- packets out of nothing ---- */

void attack_make_up(struct conversation *c, bool sealed)
{
    uint8_t bytes[OVERSIZE] = {0};
    uint32_t to = conversation_take(c) % ENDPOINTS, shape = conversation_take(c),
             length = conversation_take(c) % (DATAGRAM_BYTES - CL_PACKET_HEAD_BYTES);
    struct cl_packet packet = {.kind = (uint8_t)(shape % CL_PACKET_KINDS),
                               .flags = (uint8_t)conversation_take(c),
                               .source = (uint16_t)((to + 1 + shape / 8 % (ENDPOINTS - 1)) % ENDPOINTS),
                               .length = (uint16_t)length,
                               .path = (uint16_t)(shape / 32 % PATHS),
                               .epoch = 1,
                               .group = 1 + conversation_take(c) % (GROUPS + 1),
                               .sequence = conversation_take(c) % (c->sequence + 3),
                               .index = conversation_take(c) % 3,
                               .offset = conversation_take_u16(c) * 8};
    const struct cl_path *path =
        &cl_peer_list_find(&conversation_endpoint(c, to)->peers, packet.source)->paths[packet.path];
    packet.number = (uint32_t)(path->packets.next + conversation_take(c) % 8);
    if (packet.kind == CL_PACKET_ACK) { /* of something that was sent, more or less */
        packet.group = (uint32_t)(path->acks.next + conversation_take(c) % 4);
        packet.number = (uint32_t)(path->sent.next - conversation_take(c) % 32);
        packet.signature = (uint16_t)(conversation_take_u16(c) % CL_ACK_MARKS);
        packet.offset = conversation_take(c) % 20 | (conversation_take(c) % 4) << 16;
        packet.length =
            (uint16_t)(CL_ACK_PORT_BYTES + 4 * (cl_ack_came_count(&packet) + cl_ack_refused_count(&packet)));
        length = packet.length;
    } else if (packet.kind == CL_PACKET_PROBE) {
        packet.length = (uint16_t)(length = CL_PROBE_BYTES);
    } else if (packet.kind == CL_PACKET_STOP && shape & 128) { /* of a message as short as ours are */
        packet.length = (uint16_t)(length %= 4);
        packet.offset = 0;
    }
    for (uint32_t i = 0; i < length; i++)
        bytes[CL_PACKET_HEAD_BYTES + i] = (uint8_t)(i % 2 && packet.kind == CL_PACKET_ACK ? 0 : conversation_take(c));
    cl_packet_encode(&packet, bytes);
    if (sealed)
        give_sealed(c, to, bytes, CL_PACKET_HEAD_BYTES + length);
    else
        give_attack(c, to, bytes, CL_PACKET_HEAD_BYTES + length);
}

void attack_noise(struct conversation *c)
{
    uint8_t bytes[OVERSIZE];
    uint32_t to = conversation_take(c) % ENDPOINTS, length = conversation_take(c);
    for (uint32_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)conversation_take(c);
    give_attack(c, to, bytes, length);
}
