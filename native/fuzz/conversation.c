#include "fuzz/conversation.h"

#include <string.h>

#include "fuzz/attack.h"
#include "fuzz/message.h"
#include "protocol/endpoint_state.h"

enum { UNEXPECTED_LIMIT_BYTES = 4000, BATCH = 16, QUIET_US = 30000000 };

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
    message_complete(conversation_of(driver), completion);
}

static void count_abort(struct sim_driver *driver, uint32_t group, uint16_t culprit, int reason)
{
    (void)driver;
    (void)group;
    (void)culprit;
    (void)reason;
    conversation_counters.aborts++;
}

static void check_memory(const struct conversation *c, const struct cl_endpoint *endpoint)
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

static const struct sim_driver_type DRIVER = {
    .turn = sim_driver_turn, .emit = fly, .complete = complete, .abort = count_abort};

void conversation_turn(struct conversation *c, uint32_t self)
{
    sim_driver_turn(&c->parties[self].driver);
    check_memory(c, conversation_endpoint(c, self));
}

static void turn_all(struct conversation *c)
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

/* ---- commands ---- */

static struct flying take_flying(struct conversation *c, uint32_t which)
{
    which %= c->flying_count;
    struct flying packet = c->flying[which];
    memmove(c->flying + which, c->flying + which + 1, (--c->flying_count - which) * sizeof(c->flying[0]));
    return packet;
}

/* turn: whether the endpoint takes a turn at once. */
static void deliver(struct conversation *c, uint32_t which, bool turn)
{
    if (!c->flying_count)
        return;
    struct flying packet = take_flying(c, which);
    conversation_counters.genuine++;
    conversation_give(c, packet.to, packet.bytes, packet.length);
    c->recorded[c->recorded_count++ % RECORDED] = packet;
    if (turn)
        conversation_turn(c, packet.to);
}

static void end_something(struct conversation *c)
{
    uint32_t shape = conversation_take(c), self = shape % ENDPOINTS, group = 1 + shape / 4 % GROUPS,
             which = conversation_take(c);
    struct cl_endpoint *endpoint = conversation_endpoint(c, self);
    static const uint16_t EVERYBODY[] = {0, 1, 2, 77};
    c->ended = true;
    switch (shape / 16 % 8) {
    case 0:
        cl_endpoint_peer_lost(endpoint, (uint16_t)((self + 1) % ENDPOINTS));
        break;
    case 1:
        cl_endpoint_abort(endpoint, group, EVERYBODY, which % 5, CL_ETIMEDOUT, UINT16_MAX, conversation_now_us(c));
        break;
    case 2:
        message_cancel(c, self, group, UINT32_MAX);
        break;
    default:
        message_cancel(c, self, group, which % (c->sequence + 1));
        break;
    }
    conversation_turn(c, self);
}

static void pass_time(struct conversation *c)
{
    uint32_t how = conversation_take(c);
    c->clock.now_ns += ((uint64_t)(1 + how % 16) << how / 16) * 1000;
    turn_all(c);
}

static void obey(struct conversation *c)
{
    uint32_t command = conversation_take(c);
    switch (command % 16) {
    case 0:
        message_post(c);
        break;
    case 1:
        pass_time(c);
        break;
    case 2:
        deliver(c, conversation_take(c), false);
        break;
    case 3:
        if (c->flying_count)
            take_flying(c, conversation_take(c));
        break;
    case 4:
        attack_repeat(c);
        break;
    case 5:
        attack_redirect(c);
        break;
    case 6:
        attack_damage(c, false);
        break;
    case 7:
        attack_damage(c, true);
        break;
    case 8:
        attack_make_up(c, command & 16);
        break;
    case 9:
        if (command / 16 == 0)
            attack_noise(c);
        else if (command / 16 == 1)
            end_something(c);
        else
            message_post_rest(c, 1);
        break;
    default: /* the rule: packets arrive in order */
        for (uint32_t i = command / 16; i > 0; i--)
            deliver(c, 0, command % 16 > 11 || i == 1);
        break;
    }
}

/* Without further interference every posted message completes. */
static void wind_up(struct conversation *c)
{
    message_post_rest(c, UINT32_MAX);
    uint64_t until_us = conversation_now_us(c) + QUIET_US;
    while (message_any_open(c) && !c->ended) {
        HOLDS(conversation_now_us(c) < until_us);
        turn_all(c);
        if (c->flying_count) {
            c->clock.now_ns += 10000;
            deliver(c, 0, true);
        } else {
            HOLDS(sim_clock_step(&c->clock));
        }
    }
}

/* ---- beginning and end ---- */

static void begin(struct conversation *c)
{
    uint32_t mode = conversation_take(c);
    enum cl_auth auth = mode % 8 == 0 ? CL_AUTH_OFF : mode % 2 ? CL_AUTH_HEADER : CL_AUTH_FULL;
    c->clock.now_ns = 5000000000;
    for (uint16_t i = 0; i < ENDPOINTS; i++) {
        struct cl_endpoint_config config = {.auth = auth,
                                            .job = 77,
                                            .key = "fuzzers have it",
                                            .self = i,
                                            .epoch = 1,
                                            .datagram_bytes = DATAGRAM_BYTES,
                                            .unexpected_limit_bytes = UNEXPECTED_LIMIT_BYTES,
                                            .congestion = "delay"};
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
            HOLDS(cl_endpoint_add_peer(conversation_endpoint(c, i), j, PATHS) == CL_OK);
            for (int p = 0; p < PATHS; p++) {
                struct cl_path *path = &cl_endpoint_peer(conversation_endpoint(c, i), j)->paths[p];
                path->sent.low = path->sent.next = path->packets.next = number;
                path->ack.written = path->acks.next = number;
            }
        }
    turn_all(c);
}

static void end(struct conversation *c)
{
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        const struct cl_endpoint_stats *stats = cl_endpoint_stats(conversation_endpoint(c, i));
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
