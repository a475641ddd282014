#include "fuzz/conversation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "protocol/endpoint_state.h"
#include "protocol/packet.h"
#include "protocol/partial.h"

enum {
    ENDPOINTS = 3,
    PATHS = 2,
    DATAGRAM_BYTES = 168, /* small: more packets for the same bytes */
    OVERSIZE = 300,
    FLYING = 128,   /* packets on their way; with more the oldest are lost */
    RECORDED = 128, /* packets a stranger remembers */
    MESSAGES = 96,
    MESSAGE_BYTES_MAX = 3000,
    UNEXPECTED_LIMIT_BYTES = 4000,
    BATCH = 16,
    GROUPS = 3,
    QUIET_US = 30000000,
};

struct conversation_counters conversation_counters;

#define HOLDS(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

struct flying {
    uint16_t to;
    uint32_t length;
    uint8_t bytes[DATAGRAM_BYTES];
};

/* One side of a message. */
struct half {
    bool open; /* posted, not yet complete */
    uint16_t self, peer;
    struct cl_message_id id;
    uint8_t *buffer;
    uint32_t length;
    struct half *other; /* the sender's side of a receive: not yet posted if it is there and has no buffer */
    bool sends, posted;
    struct cl_qos qos; /* a third of the messages may lose packets */
    bool ended_well;
    uint32_t lost; /* then: its packets that were not counted, a bit each */
};

struct conversation {
    const uint8_t *input;
    size_t length, at;
    struct cl_endpoint *endpoints[ENDPOINTS];
    uint64_t now_us;
    uint32_t sequence;
    bool insider; /* somebody with the key took part: anything may be said */
    bool ended;   /* something was cancelled, aborted or lost: not everything can complete */
    struct flying flying[FLYING], recorded[RECORDED];
    uint32_t flying_count, recorded_count;
    struct half halves[2 * MESSAGES];
    uint32_t half_count;
};

static uint32_t take(struct conversation *c)
{
    return c->at < c->length ? c->input[c->at++] : 0;
}

static uint32_t take_u16(struct conversation *c)
{
    uint32_t low = take(c);
    return low | take(c) << 8;
}

/* ---- messages ---- */

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
    struct cl_endpoint *endpoint = c->endpoints[half->self];
    struct cl_sink sink = {.target = half->buffer};
    int status = half->sends ? cl_endpoint_post_partial_send(endpoint, half->peer, half->id, half->buffer, half->length,
                                                             &half->qos, c->now_us, half)
                             : cl_endpoint_post_partial_receive(endpoint, half->peer, half->id, sink, half->length,
                                                                &half->qos, c->now_us, half);
    HOLDS(status == CL_OK || c->ended || c->insider);
    if (status != CL_OK)
        close_half(half);
}

/* A message, of which one side may be posted much later. */
static void post_message(struct conversation *c)
{
    if (c->half_count + 2 > 2 * MESSAGES)
        return;
    uint32_t what = take(c), length = take_u16(c) % MESSAGE_BYTES_MAX;
    uint16_t from = (uint16_t)(what % ENDPOINTS), to = (uint16_t)((from + 1 + what / 4 % (ENDPOINTS - 1)) % ENDPOINTS);
    struct cl_message_id id = {1 + what / 16 % GROUPS, ++c->sequence, what / 64 % 2};
    struct half *sender = &c->halves[c->half_count++], *receiver = &c->halves[c->half_count++];
    uint32_t sides = take(c);
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

static void post_rest(struct conversation *c, uint32_t most)
{
    for (uint32_t i = 0; i < c->half_count && most; i++)
        if (!c->halves[i].posted) {
            post(c, &c->halves[i]);
            most--;
        }
}

/* What a message lost is within its bound and not protected, and both sides say the same. */
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

static void on_completion(struct conversation *c, const struct cl_completion *completion)
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

/* ---- endpoints ---- */

static void fly(struct conversation *c, const struct cl_datagram *datagram)
{
    if (c->flying_count == FLYING)
        memmove(c->flying, c->flying + 1, --c->flying_count * sizeof(c->flying[0]));
    struct flying *packet = &c->flying[c->flying_count++];
    packet->to = datagram->peer;
    packet->length = datagram->head_length + datagram->payload_length;
    HOLDS(packet->length <= DATAGRAM_BYTES);
    memcpy(packet->bytes, datagram->head, datagram->head_length);
    if (datagram->payload_length)
        memcpy(packet->bytes + datagram->head_length, datagram->payload, datagram->payload_length);
}

static void check_bounds(const struct conversation *c, const struct cl_endpoint *endpoint)
{
    HOLDS(endpoint->unexpected.used_bytes <= UNEXPECTED_LIMIT_BYTES);
    HOLDS(endpoint->closed.count <= CL_CLOSED_GROUPS_MAX);
    HOLDS(endpoint->table.count <= c->half_count + UNEXPECTED_LIMIT_BYTES);
    for (uint32_t i = 0; i < endpoint->peers_length; i++) {
        const struct cl_peer *peer = endpoint->peers[i];
        for (uint16_t p = 0; peer && p < peer->path_count; p++) {
            HOLDS(peer->paths[p].ack.came.count <= CL_ACK_RANGES + 1);
            HOLDS(peer->paths[p].ack.refused.count <= CL_ACK_RANGES + 1);
        }
    }
}

static void run_endpoint(struct conversation *c, uint32_t self)
{
    struct cl_endpoint *endpoint = c->endpoints[self];
    static struct cl_datagram batch[BATCH];
    if (cl_endpoint_next_timeout(endpoint) <= c->now_us)
        cl_endpoint_timeout(endpoint, c->now_us);
    struct cl_completion completion;
    while (cl_endpoint_next_completion(endpoint, &completion))
        on_completion(c, &completion);
    uint32_t group;
    uint16_t peer;
    int reason;
    while (cl_endpoint_next_abort(endpoint, &group, &peer, &reason))
        conversation_counters.aborts++;
    for (size_t count; (count = cl_endpoint_send(endpoint, c->now_us, batch, BATCH)) > 0;)
        for (size_t i = 0; i < count; i++)
            fly(c, &batch[i]);
    while (cl_endpoint_next_completion(endpoint, &completion))
        on_completion(c, &completion);
    check_bounds(c, endpoint);
}

static void give(struct conversation *c, uint32_t to, const uint8_t *bytes, uint32_t length)
{
    /* a copy of exactly that size, so that reading beyond it shows */
    uint8_t *exact = malloc(length ? length : 1);
    memcpy(exact, bytes, length);
    conversation_counters.packets++;
    cl_endpoint_receive(c->endpoints[to], exact, length, c->now_us % 3 == 0, c->now_us, c->now_us);
    free(exact);
}

/* A packet that must be rejected: one counter changes, and nothing is due. */
static void give_rejected(struct conversation *c, uint32_t to, const uint8_t *bytes, uint32_t length)
{
    struct cl_endpoint *endpoint = c->endpoints[to];
    if (endpoint->seal.auth == CL_AUTH_OFF) {
        c->insider = true;
        conversation_counters.insider++;
        give(c, to, bytes, length);
        return;
    }
    struct cl_endpoint_stats before = endpoint->stats, *after = &endpoint->stats;
    uint64_t timeout_us = cl_endpoint_next_timeout(endpoint);
    const struct cl_peer *urgent = endpoint->urgent_last;
    conversation_counters.rejected++;
    give(c, to, bytes, length);
    HOLDS(after->packets_foreign + after->packets_forged + after->packets_replayed ==
          before.packets_foreign + before.packets_forged + before.packets_replayed + 1);
    before.packets_foreign = after->packets_foreign;
    before.packets_forged = after->packets_forged;
    before.packets_replayed = after->packets_replayed;
    HOLDS(memcmp(&before, after, sizeof(before)) == 0);
    HOLDS(cl_endpoint_next_timeout(endpoint) == timeout_us && endpoint->urgent_last == urgent);
}

/* ---- what happens to packets ---- */

static struct flying take_flying(struct conversation *c, uint32_t which)
{
    which %= c->flying_count;
    struct flying packet = c->flying[which];
    memmove(c->flying + which, c->flying + which + 1, (--c->flying_count - which) * sizeof(c->flying[0]));
    return packet;
}

/* run: whether the endpoint looks at once at what came of it. */
static void deliver(struct conversation *c, uint32_t which, bool run)
{
    if (!c->flying_count)
        return;
    struct flying packet = take_flying(c, which);
    conversation_counters.genuine++;
    give(c, packet.to, packet.bytes, packet.length);
    c->recorded[c->recorded_count++ % RECORDED] = packet;
    if (run)
        run_endpoint(c, packet.to);
}

static const struct flying *recorded(struct conversation *c)
{
    uint32_t count = c->recorded_count < RECORDED ? c->recorded_count : RECORDED;
    return count ? &c->recorded[take(c) % count] : NULL;
}

static void repeat(struct conversation *c)
{
    const struct flying *packet = recorded(c);
    if (packet)
        give_rejected(c, packet->to, packet->bytes, packet->length);
}

static void redirect(struct conversation *c)
{
    const struct flying *packet = recorded(c);
    if (packet)
        give_rejected(c, (packet->to + 1u + take(c) % (ENDPOINTS - 1)) % ENDPOINTS, packet->bytes, packet->length);
}

/* Changes bytes and perhaps the length. */
static uint32_t damage(struct conversation *c, uint8_t *bytes, uint32_t length)
{
    for (uint32_t edits = 1 + take(c) % 4; edits > 0; edits--) {
        uint32_t how = take(c), at = take_u16(c) % (length ? length : 1);
        switch (how % 6) {
        case 0:
        case 1:
            bytes[at] ^= (uint8_t)(1u << how / 8 % 8);
            break;
        case 2:
            bytes[at] = (uint8_t)take(c);
            break;
        case 3: /* a field of the header becomes a number at the edge of something */
            cl_store_u32(bytes + at % 32 / 4 * 4, (uint32_t)0 - how / 32 + (how & 8 ? 0x80000000u : 0));
            break;
        case 4:
            length = at;
            break;
        default:
            length += take(c) % (OVERSIZE - DATAGRAM_BYTES);
            length = length < OVERSIZE ? length : OVERSIZE;
            break;
        }
    }
    return length;
}

/* Seals the packet as a rank would that means it for `to`. */
static void seal(struct conversation *c, uint32_t to, uint8_t *bytes, uint32_t length)
{
    if (length < CL_PACKET_HEAD_BYTES)
        return;
    struct cl_endpoint *endpoint = c->endpoints[to];
    cl_store_u16(bytes + 6, length - CL_PACKET_HEAD_BYTES);
    struct cl_packet packet;
    const struct cl_peer *peer = NULL;
    if (cl_packet_decode(&packet, bytes, length))
        peer = cl_endpoint_peer(endpoint, packet.source);
    if (!peer || packet.path >= peer->path_count)
        return;
    const struct cl_path *path = &peer->paths[packet.path];
    bool ack = packet.kind == CL_PACKET_ACK;
    uint64_t number = cl_packet_number(ack ? path->acks.next : path->packets.next, ack ? packet.group : packet.number);
    cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &endpoint->seal, (uint16_t)to, number);
}

/* Whether only what "header" leaves out differs: then the packet is taken for good. */
static bool passes(const struct conversation *c, const struct flying *packet, const uint8_t *bytes, uint32_t length)
{
    return length == packet->length && memcmp(bytes, packet->bytes, CL_PACKET_HEAD_BYTES) == 0 &&
           c->endpoints[0]->seal.auth != CL_AUTH_FULL && (bytes[2] & 0x0F) == CL_PACKET_DATA;
}

static void give_damaged(struct conversation *c, bool sealed)
{
    uint8_t bytes[OVERSIZE] = {0};
    const struct flying *packet = recorded(c);
    if (c->flying_count && take(c) % 4)
        packet = &c->flying[take(c) % c->flying_count];
    if (!packet)
        return;
    uint32_t to = packet->to;
    memcpy(bytes, packet->bytes, packet->length);
    uint32_t length = damage(c, bytes, packet->length);
    if (length == packet->length && memcmp(bytes, packet->bytes, length) == 0)
        return;
    if (!sealed && !passes(c, packet, bytes, length)) {
        give_rejected(c, to, bytes, length);
        return;
    }
    if (sealed)
        seal(c, to, bytes, length);
    c->insider = true;
    conversation_counters.insider++;
    give(c, to, bytes, length);
    run_endpoint(c, to);
}

/* A packet out of nothing. */
static void give_made_up(struct conversation *c, bool sealed)
{
    uint8_t bytes[OVERSIZE] = {0};
    uint32_t to = take(c) % ENDPOINTS, shape = take(c), length = take(c) % (DATAGRAM_BYTES - CL_PACKET_HEAD_BYTES);
    struct cl_packet packet = {.kind = (uint8_t)(shape % CL_PACKET_KINDS),
                               .flags = (uint8_t)take(c),
                               .source = (uint16_t)((to + 1 + shape / 8 % (ENDPOINTS - 1)) % ENDPOINTS),
                               .length = (uint16_t)length,
                               .path = (uint16_t)(shape / 32 % PATHS),
                               .epoch = 1,
                               .group = 1 + take(c) % (GROUPS + 1),
                               .sequence = take(c) % (c->sequence + 3),
                               .index = take(c) % 3,
                               .offset = take_u16(c) * 8};
    const struct cl_path *path = &cl_endpoint_peer(c->endpoints[to], packet.source)->paths[packet.path];
    packet.number = (uint32_t)(path->packets.next + take(c) % 8);
    if (packet.kind == CL_PACKET_ACK) { /* of something that was sent, more or less */
        packet.group = (uint32_t)(path->acks.next + take(c) % 4);
        packet.number = (uint32_t)(path->sent.next - take(c) % 32);
        packet.signature = (uint16_t)(take_u16(c) % CL_ACK_MARKS);
        packet.offset = take(c) % 20 | (take(c) % 4) << 16;
        packet.length = (uint16_t)(CL_ACK_PORT_BYTES + 4 * ((packet.offset & 0xFFFF) + (packet.offset >> 16)));
        length = packet.length;
    } else if (packet.kind == CL_PACKET_PROBE) {
        packet.length = (uint16_t)(length = CL_PROBE_BYTES);
    } else if (packet.kind == CL_PACKET_STOP && shape & 128) { /* of a message as short as ours are */
        packet.length = (uint16_t)(length %= 4);
        packet.offset = 0;
    }
    for (uint32_t i = 0; i < length; i++)
        bytes[CL_PACKET_HEAD_BYTES + i] = (uint8_t)(i % 2 && packet.kind == CL_PACKET_ACK ? 0 : take(c));
    cl_packet_encode(&packet, bytes);
    if (!sealed) {
        give_rejected(c, to, bytes, CL_PACKET_HEAD_BYTES + length);
        return;
    }
    seal(c, to, bytes, CL_PACKET_HEAD_BYTES + length);
    c->insider = true;
    conversation_counters.insider++;
    give(c, to, bytes, CL_PACKET_HEAD_BYTES + length);
    run_endpoint(c, to);
}

static void give_noise(struct conversation *c)
{
    uint8_t bytes[OVERSIZE];
    uint32_t to = take(c) % ENDPOINTS, length = take(c);
    for (uint32_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)take(c);
    give_rejected(c, to, bytes, length);
}

static void end_something(struct conversation *c)
{
    uint32_t what = take(c), self = what % ENDPOINTS, group = 1 + what / 4 % GROUPS, which = take(c);
    struct cl_endpoint *endpoint = c->endpoints[self];
    c->ended = true;
    if (what / 16 % 8 == 0) {
        cl_endpoint_peer_lost(endpoint, (uint16_t)((self + 1) % ENDPOINTS));
    } else if (what / 16 % 8 == 1) {
        static const uint16_t EVERYBODY[] = {0, 1, 2, 77};
        cl_endpoint_abort(endpoint, group, EVERYBODY, which % 5, CL_ETIMEDOUT, UINT16_MAX, c->now_us);
    } else {
        bool whole = what / 16 % 8 == 2;
        uint32_t sequence = whole ? UINT32_MAX : which % (c->sequence + 1);
        cl_endpoint_cancel(endpoint, group, sequence);
        for (uint32_t i = 0; i < c->half_count; i++) {
            struct half *half = &c->halves[i];
            if (!half->open || half->self != self || half->id.group != group ||
                (!whole && half->id.sequence != sequence))
                continue;
            conversation_counters.messages_cancelled++;
            close_half(half);
        }
    }
    run_endpoint(c, self);
}

static void pass_time(struct conversation *c)
{
    uint32_t how = take(c);
    c->now_us += (uint64_t)(1 + how % 16) << how / 16;
    for (uint32_t i = 0; i < ENDPOINTS; i++)
        run_endpoint(c, i);
}

static void obey(struct conversation *c)
{
    uint32_t command = take(c);
    switch (command % 16) {
    case 0:
        post_message(c);
        break;
    case 1:
        pass_time(c);
        break;
    case 2:
        deliver(c, take(c), false);
        break;
    case 3:
        if (c->flying_count)
            take_flying(c, take(c));
        break;
    case 4:
        repeat(c);
        break;
    case 5:
        redirect(c);
        break;
    case 6:
        give_damaged(c, false);
        break;
    case 7:
        give_damaged(c, true);
        break;
    case 8:
        give_made_up(c, command & 16);
        break;
    case 9:
        if (command / 16 == 0)
            give_noise(c);
        else if (command / 16 == 1)
            end_something(c);
        else
            post_rest(c, 1);
        break;
    default: /* the rule: packets arrive in order */
        for (uint32_t i = command / 16; i > 0; i--)
            deliver(c, 0, command % 16 > 11 || i == 1);
        break;
    }
}

/* Without further interference everything that was posted completes. */
static void wind_up(struct conversation *c)
{
    post_rest(c, UINT32_MAX);
    uint64_t until_us = c->now_us + QUIET_US;
    for (;;) {
        bool open = false;
        for (uint32_t i = 0; i < c->half_count; i++)
            open = open || c->halves[i].open;
        if (!open || c->ended)
            return;
        HOLDS(c->now_us < until_us);
        for (uint32_t i = 0; i < ENDPOINTS; i++)
            run_endpoint(c, i);
        if (c->flying_count) {
            c->now_us += 10;
            deliver(c, 0, true);
            continue;
        }
        uint64_t next_us = UINT64_MAX;
        for (uint32_t i = 0; i < ENDPOINTS; i++) {
            uint64_t timeout_us = cl_endpoint_next_timeout(c->endpoints[i]);
            next_us = timeout_us < next_us ? timeout_us : next_us;
        }
        HOLDS(next_us != UINT64_MAX);
        c->now_us = next_us > c->now_us ? next_us : c->now_us + 1;
    }
}

static void begin(struct conversation *c)
{
    uint32_t mode = take(c);
    enum cl_auth auth = mode % 8 == 0 ? CL_AUTH_OFF : mode % 2 ? CL_AUTH_HEADER : CL_AUTH_FULL;
    c->now_us = 5000000;
    for (uint16_t i = 0; i < ENDPOINTS; i++) {
        struct cl_endpoint_config config = {.auth = auth,
                                            .job = 77,
                                            .key = "fuzzers have it",
                                            .self = i,
                                            .epoch = 1,
                                            .datagram_bytes = DATAGRAM_BYTES,
                                            .unexpected_limit_bytes = UNEXPECTED_LIMIT_BYTES,
                                            .congestion = "delay"};
        HOLDS(cl_endpoint_create(&config, &c->endpoints[i]) == CL_OK);
    }
    /* sometimes the numbers are about to outgrow their fields */
    uint64_t number = mode & 16 ? 0xFFFFFFE0u : 0;
    for (uint16_t i = 0; i < ENDPOINTS; i++)
        for (uint16_t j = 0; j < ENDPOINTS; j++) {
            if (i == j)
                continue;
            HOLDS(cl_endpoint_add_peer(c->endpoints[i], j, PATHS) == CL_OK);
            for (int p = 0; p < PATHS; p++) {
                struct cl_path *path = &cl_endpoint_peer(c->endpoints[i], j)->paths[p];
                path->sent.low = path->sent.next = path->packets.next = number;
                path->ack.written = path->acks.next = number;
            }
        }
    for (uint32_t i = 0; i < ENDPOINTS; i++)
        run_endpoint(c, i);
}

static void end(struct conversation *c)
{
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        const struct cl_endpoint_stats *stats = cl_endpoint_stats(c->endpoints[i]);
        conversation_counters.received += stats->packets_received;
        conversation_counters.foreign += stats->packets_foreign;
        conversation_counters.forged += stats->packets_forged;
        conversation_counters.replayed += stats->packets_replayed;
        conversation_counters.unexpected += stats->packets_unexpected;
        conversation_counters.refused += stats->packets_unexpected_dropped;
        conversation_counters.duplicate += stats->packets_duplicate;
        conversation_counters.retransmitted += stats->packets_retransmitted;
        conversation_counters.lost += stats->packets_lost;
        conversation_counters.acks += stats->acks_received;
        conversation_counters.probes += stats->probes_sent;
        cl_endpoint_destroy(c->endpoints[i]);
    }
    for (uint32_t i = 0; i < c->half_count; i++)
        free(c->halves[i].buffer);
    conversation_counters.conversations++;
}

void conversation_run(const uint8_t *input, size_t length)
{
    static struct conversation c;
    memset(&c, 0, sizeof(c));
    c.input = input;
    c.length = length;
    begin(&c);
    while (c.at < c.length)
        obey(&c);
    if (!c.insider && !c.ended)
        wind_up(&c);
    end(&c);
}
