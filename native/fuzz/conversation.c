#include "fuzz/conversation.h"

#include <string.h>

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"

enum { UNEXPECTED_LIMIT_BYTES = 4000, BATCH = 16 };

struct conversation_counters conversation_counters;

uint32_t conversation_take(struct conversation *c)
{
    return c->at < c->length ? c->input[c->at++] : 0;
}

uint32_t conversation_take_u16(struct conversation *c)
{
    uint32_t low = conversation_take(c);
    return low | conversation_take(c) << 8;
}

/* ---- endpoints ---- */

static struct conversation *conversation_of(struct sim_driver *driver)
{
    return ((struct party *)(void *)driver)->conversation; /* the driver is its first member */
}

static bool fly(struct sim_driver *driver, const struct cl_datagram *datagram)
{
    struct conversation *c = conversation_of(driver);
    if (c->flying_count == FLYING)
        memmove(c->flying, c->flying + 1, --c->flying_count * sizeof(c->flying[0]));
    struct flying *packet = &c->flying[c->flying_count++];
    packet->to = datagram->peer;
    HOLDS(datagram->head_length + datagram->payload_length <= DATAGRAM_BYTES);
    packet->length = sim_driver_flatten(packet->bytes, datagram);
    return true;
}

static void complete(struct sim_driver *driver, const struct cl_completion *completion)
{
    struct conversation *c = conversation_of(driver);
    c->complete(c, completion);
}

static void count_abort(struct sim_driver *driver, const struct cl_closed_group *aborted)
{
    (void)driver;
    (void)aborted;
    conversation_counters.aborts++;
}

static void check_memory(const struct conversation *c, const struct cl_endpoint *endpoint)
{
    HOLDS(endpoint->unexpected.used_bytes <= UNEXPECTED_LIMIT_BYTES);
    HOLDS(endpoint->closed.count <= CL_CLOSED_GROUPS_MAX);
    HOLDS(endpoint->table.names.count <= c->half_count + UNEXPECTED_LIMIT_BYTES);
    for (uint32_t i = 0; i < endpoint->peers.length; i++) {
        const struct cl_peer *peer = endpoint->peers.list[i];
        for (uint16_t p = 0; peer != NULL && p < peer->path_count; p++) {
            HOLDS(peer->paths[p].ack.came.count <= CL_ACK_RANGES + 1);
            HOLDS(peer->paths[p].ack.refused.count <= CL_ACK_RANGES + 1);
        }
    }
}

static const struct sim_driver_type DRIVER = {
    .turn = sim_driver_turn, .emit = fly, .complete = complete, .abort = count_abort};

void conversation_turn(struct conversation *c, uint32_t self)
{
    sim_driver_turn(&c->parties[self].driver);
    check_memory(c, conversation_endpoint(c, self));
}

void conversation_turn_all(struct conversation *c)
{
    for (uint32_t i = 0; i < ENDPOINTS; i++)
        conversation_turn(c, i);
}

void conversation_give(struct conversation *c, uint32_t to, const uint8_t *bytes, uint32_t length)
{
    /* a copy of exactly that size, so that the sanitizer sees reads beyond it */
    uint8_t *exact = malloc(length ? length : 1);
    memcpy(exact, bytes, length);
    conversation_counters.packets++;
    uint64_t now_us = conversation_now_us(c);
    cl_endpoint_receive(conversation_endpoint(c, to), exact, length, now_us % 3 == 0, now_us, now_us);
    free(exact);
}

/* ---- packets on their way ---- */

struct flying conversation_take_flying(struct conversation *c, uint32_t which)
{
    which %= c->flying_count;
    struct flying packet = c->flying[which];
    memmove(c->flying + which, c->flying + which + 1, (--c->flying_count - which) * sizeof(c->flying[0]));
    return packet;
}

void conversation_deliver(struct conversation *c, uint32_t which, bool turn)
{
    if (!c->flying_count)
        return;
    struct flying packet = conversation_take_flying(c, which);
    conversation_counters.genuine++;
    conversation_give(c, packet.to, packet.bytes, packet.length);
    c->recorded[c->recorded_count++ % RECORDED] = packet;
    if (turn)
        conversation_turn(c, packet.to);
}

/* ---- beginning and end ---- */

void conversation_begin(struct conversation *c)
{
    uint32_t mode = conversation_take(c);
    enum cl_auth auth = mode % 8 == 0 ? CL_AUTH_OFF : mode % 2 ? CL_AUTH_HEADER : CL_AUTH_FULL;
    c->clock.now_ns = 5000000000;
    for (uint16_t i = 0; i < ENDPOINTS; i++) {
        struct cl_endpoint_config config = {
            .auth = auth,
            .job = 77,
            .key = "fuzzers have it",
            .self = i,
            .epoch = 1,
            .datagram_bytes = DATAGRAM_BYTES,
            .unexpected_limit_bytes = UNEXPECTED_LIMIT_BYTES,
        };
        c->parties[i] =
            (struct party){.driver = {.type = &DRIVER, .clock = &c->clock, .tick_ns = 1000, .batch_capacity = BATCH},
                           .conversation = c};
        HOLDS(sim_driver_open(&c->parties[i].driver, &config) == CL_OK);
    }
    /* sometimes the numbers are about to outgrow their fields */
    uint64_t number = mode & 16 ? 0xFFFFFFE0u : 0;
    for (uint16_t i = 0; i < ENDPOINTS; i++)
        for (uint16_t j = 0; j < ENDPOINTS; j++) {
            if (i == j)
                continue;
            HOLDS(cl_endpoint_add_peer(conversation_endpoint(c, i), j, PATHS, NULL) == CL_OK);
            for (int p = 0; p < PATHS; p++) {
                struct cl_path *path = &cl_peer_list_find(&conversation_endpoint(c, i)->peers, j)->paths[p];
                path->sent.low = path->sent.next = path->packets.next = number;
                path->ack.written = path->acks.next = number;
            }
        }
    conversation_turn_all(c);
}

void conversation_end(struct conversation *c)
{
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        const struct cl_engine_stats *stats = cl_endpoint_stats(conversation_endpoint(c, i));
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
        sim_driver_close(&c->parties[i].driver);
    }
    for (uint32_t i = 0; i < c->half_count; i++)
        free(c->halves[i].buffer);
    sim_clock_free(&c->clock);
    conversation_counters.conversations++;
}
