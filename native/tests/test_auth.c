/* Attacks on an endpoint: forged, foreign, replayed and damaged packets beside a conversation that must not notice.
 */
#include <malloc.h>

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "protocol/packet.h"
#include "tests/check.h"
#include "tests/network.h"

enum { ROOM = 1 << 20, SECOND_US = 1000000, GROUP = 9, LENGTH = 300000, CAPTURES = 4096 };

/* Bytes in use on the heap, as the sanitizer's allocator or the C library counts them. */
size_t __sanitizer_get_current_allocated_bytes(void) __attribute__((weak));
static size_t heap_bytes(void)
{
    return __sanitizer_get_current_allocated_bytes != NULL ? __sanitizer_get_current_allocated_bytes()
                                                           : mallinfo2().uordblks;
}

/* ---- a conversation: hosts 0 and 1 exchange LENGTH bytes; host 2 looks on ---- */

static uint8_t sent[2][LENGTH], received[2][LENGTH];

static void post_exchange(struct network *network, uint32_t sequence)
{
    memset(received, 0, sizeof(received));
    uint64_t now_us = network_now_us(network);
    for (uint16_t from = 0; from < 2; from++) {
        uint16_t to = 1 - from;
        struct cl_message_id id = {GROUP, sequence, 0};
        struct cl_sink sink = {.target = received[to], .deliver = network_add};
        for (size_t i = 0; i < LENGTH; i++)
            sent[from][i] = (uint8_t)(i * 31 + (i >> 8) * 7 + from * 101);
        CHECK_EQ(
            cl_endpoint_post_send(network->hosts[from].endpoint, to, id, sent[from], LENGTH, &RELIABLE, now_us, NULL),
            CL_OK);
        CHECK_EQ(cl_endpoint_post_receive(network->hosts[to].endpoint, from, id, sink, LENGTH, &RELIABLE, now_us, NULL),
                 CL_OK);
        network_wake(network, from);
    }
}

static bool done(const struct network *network, uint32_t exchanges)
{
    return network->hosts[0].completed >= 2 * exchanges && network->hosts[1].completed >= 2 * exchanges;
}

static void check_exchanged(const struct network *network, uint32_t exchanges)
{
    for (int host = 0; host < 2; host++) {
        CHECK_EQ(network->hosts[host].completed, 2 * exchanges);
        CHECK_EQ(network->hosts[host].failed, 0);
        CHECK(memcmp(sent[1 - host], received[host], LENGTH) == 0);
    }
}

static struct cl_engine_stats *stats_of(struct network *network, uint32_t host)
{
    return &network->hosts[host].endpoint->stats;
}

static void inject(struct network *network, uint32_t host, const uint8_t *bytes, size_t length)
{
    uint64_t now_us = network_now_us(network);
    cl_endpoint_receive(network->hosts[host].endpoint, bytes, length, false, now_us, now_us);
}

/* The packets on the link, as an attacker records them. */
static struct capture {
    uint16_t to;
    uint32_t length;
    uint8_t bytes[NETWORK_DATAGRAM_BYTES];
} captures[CAPTURES];
static uint32_t capture_count;

/* Runs until the exchanges are done, calling `meddle` with every packet about to reach a host. */
static void run(struct network *network, uint32_t exchanges,
                void (*meddle)(struct network *network, struct sim_datagram *packet))
{
    uint64_t until_us = network_now_us(network) + 10 * SECOND_US;
    network->meddle = meddle;
    while (!done(network, exchanges) && network_step(network, until_us))
        ;
    network->meddle = NULL;
}

static void record(struct network *network, struct sim_datagram *packet)
{
    (void)network;
    if (capture_count == CAPTURES)
        return;
    struct capture *capture = &captures[capture_count++];
    *capture = (struct capture){.to = packet->to, .length = packet->length};
    memcpy(capture->bytes, packet->bytes, packet->length);
}

static struct network *network_with(enum cl_auth auth, double loss, uint64_t seed)
{
    struct network *network = network_new(3, 2, 500, 150, ROOM, seed);
    network_set_noise(network, (struct sim_noise){.loss = loss});
    for (uint32_t i = 0; i < network->host_count; i++) {
        struct cl_endpoint *endpoint = network->hosts[i].endpoint;
        endpoint->seal = (struct cl_seal){
            .auth = auth, .job = 5, .key = {0x0123456789abcdef, seed}, .nh = &endpoint->nh}; /* of the job's key, 0 */
    }
    capture_count = 0;
    return network;
}

/* ---- nothing but a counter changes ---- */

/* The whole state of an endpoint except its counters. */
struct image {
    size_t heap_bytes;
    struct cl_endpoint endpoint;
    uint8_t peers[3][sizeof(struct cl_peer) + NETWORK_PATHS_MAX * sizeof(struct cl_path)];
};

static void take_image(struct image *image, const struct cl_endpoint *endpoint)
{
    memset(image, 0, sizeof(*image));
    image->heap_bytes = heap_bytes();
    memcpy(&image->endpoint, endpoint, sizeof(*endpoint));
    memset(&image->endpoint.stats, 0, sizeof(image->endpoint.stats));
    for (uint32_t i = 0; i < endpoint->peers.length; i++)
        if (endpoint->peers.list[i] != NULL)
            memcpy(image->peers[i], endpoint->peers.list[i],
                   sizeof(struct cl_peer) + endpoint->peers.list[i]->path_count * sizeof(struct cl_path));
}

/* Gives host 0 the packet: it must not answer, allocate or change anything but `counter`. */
static void check_ignored(struct network *network, const uint8_t *bytes, size_t length, const uint64_t *counter)
{
    static struct image before, after;
    static struct cl_datagram out[4];
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    uint64_t now_us = network_now_us(network), counted = *counter, others = endpoint->stats.packets_received;
    uint64_t timeout_us = cl_endpoint_next_timeout(endpoint);
    take_image(&before, endpoint);
    cl_endpoint_receive(endpoint, bytes, length, false, now_us, now_us);
    take_image(&after, endpoint);
    CHECK(memcmp(&before, &after, sizeof(before)) == 0);
    CHECK_EQ(*counter, counted + 1);
    CHECK_EQ(endpoint->stats.packets_received, others);
    CHECK_EQ(cl_endpoint_next_timeout(endpoint), timeout_us);
    CHECK_EQ(cl_endpoint_send(endpoint, now_us, out, 4), 0);
    CHECK_EQ(heap_bytes(), before.heap_bytes);
}

/* Every kind of packet, made up without the key: for known and unknown groups, from peers and nobody, with this job's
 * number and others'. */
TEST(test_forged_packets_change_nothing)
{
    static const enum cl_auth AUTHS[] = {CL_AUTH_HEADER, CL_AUTH_FULL, CL_AUTH_OFF};
    for (int a = 0; a < 3; a++) {
        SCOPED_NETWORK *network = network_with(AUTHS[a], 0, 41);
        post_exchange(network, 1);
        run(network, 1, record);
        check_exchanged(network, 1);
        network_run_until(network, network_now_us(network) + 50000); /* nothing is due now */
        struct cl_engine_stats *stats = stats_of(network, 0);
        bool off = AUTHS[a] == CL_AUTH_OFF;
        for (uint32_t i = 0; i < 3000; i++) {
            uint8_t bytes[NETWORK_DATAGRAM_BYTES] = {0};
            bool attacker = i % 7 == 0, stale = i % 11 == 0;
            struct cl_packet packet = {.kind = (uint8_t)(i % CL_PACKET_KINDS),
                                       .flags = CL_PACKET_ACK_NOW | CL_PACKET_LAST,
                                       .source = attacker ? (uint16_t)(i % 5 == 0 ? 0 : 100 + i) : 1,
                                       .length = i % 3 ? 0 : 8,
                                       .path = (uint16_t)(i % 2),
                                       .epoch = stale ? 0 : 1,
                                       .group = i % 4 ? GROUP + i : GROUP,
                                       .sequence = i,
                                       .offset = (uint32_t)CL_EABORTED,
                                       .number = 1000 + i};
            struct cl_seal guess = {.auth = off ? CL_AUTH_OFF : CL_AUTH_FULL, .job = 6 + i, .key = {i, 1}};
            cl_packet_encode(&packet, bytes);
            cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &guess, 0, packet.number);
            check_ignored(network, bytes, CL_PACKET_HEAD_BYTES + packet.length,
                          off || attacker || stale ? &stats->packets_foreign : &stats->packets_forged);
        }
        CHECK_EQ(stats->packets_replayed, 0);
    }
}

/* All packets of an exchange come again, damaged in each of several ways. */
TEST(test_captured_packets_change_nothing)
{
    SCOPED_NETWORK *network = network_with(CL_AUTH_FULL, 0.02, 42);
    post_exchange(network, 1);
    run(network, 1, record);
    network_run_until(network, network_now_us(network) + 300000); /* acknowledgements of the last ones */
    check_exchanged(network, 1);
    struct cl_engine_stats *stats = stats_of(network, 0);
    CHECK(capture_count > 400);
    uint32_t replays = 0, redirected = 0;
    for (uint32_t i = 0; i < capture_count; i++) {
        const struct capture *capture = &captures[i];
        uint8_t bytes[NETWORK_DATAGRAM_BYTES + 1] = {0};
        memcpy(bytes, capture->bytes, capture->length);
        uint16_t source = cl_load_u16(bytes + 4);
        if (capture->to != 0) { /* host 0's own packet is a reflection, another's is for another host */
            check_ignored(network, bytes, capture->length, source ? &stats->packets_forged : &stats->packets_foreign);
            redirected++;
            continue;
        }
        check_ignored(network, bytes, capture->length, &stats->packets_replayed);
        replays++;
        check_ignored(network, bytes, capture->length + 1, &stats->packets_foreign);
        check_ignored(network, bytes, capture->length - 1, &stats->packets_foreign);
        check_ignored(network, bytes, i % CL_PACKET_HEAD_BYTES, &stats->packets_foreign);
        uint32_t at = 8 + i % (capture->length - 8); /* a byte after the fields that are checked first */
        at = at == 28 || at == 29 || at == 30 || at == 31 ? 27 : at;
        bytes[at] ^= 0x10;
        check_ignored(network, bytes, capture->length, &stats->packets_forged);
    }
    CHECK(replays > 200);
    CHECK(redirected > 200);
}

/* ---- beside a conversation ---- */

/* Old packets come again, to their receiver and to the others, and damaged. */
static void pester(struct network *network, struct sim_datagram *packet)
{
    record(network, packet);
    const struct capture *old = &captures[(uint32_t)(network_random(network) * capture_count)];
    uint8_t bytes[NETWORK_DATAGRAM_BYTES];
    memcpy(bytes, old->bytes, old->length);
    if (old != &captures[capture_count - 1]) /* the newest is still to come */
        inject(network, old->to, bytes, old->length);
    inject(network, (old->to + 1u) % 3, bytes, old->length);
    bytes[(uint32_t)(network_random(network) * 40)] ^= 1;
    inject(network, old->to, bytes, old->length);
}

TEST(test_exchange_among_attackers)
{
    static const enum cl_auth AUTHS[] = {CL_AUTH_HEADER, CL_AUTH_FULL};
    for (int a = 0; a < 2; a++)
        for (uint64_t seed = 0; seed < 4; seed++) {
            SCOPED_NETWORK *network = network_with(AUTHS[a], seed % 2 ? 0.05 : 0, 50 + seed);
            network_set_noise(network, (struct sim_noise){.reorder = seed / 2 ? 0.1 : 0, .reorder_ns = 300000});
            for (uint32_t exchange = 1; exchange <= 3; exchange++) {
                post_exchange(network, exchange);
                run(network, exchange, pester);
                check_exchanged(network, exchange);
            }
            for (uint32_t host = 0; host < 2; host++) {
                CHECK(stats_of(network, host)->packets_replayed > 100);
                CHECK(stats_of(network, host)->packets_forged > 100);
                CHECK(stats_of(network, host)->packets_foreign > 100);
            }
            CHECK_EQ(stats_of(network, 2)->packets_unexpected, 0);
        }
}

static void damage_payload(struct network *network, struct sim_datagram *packet)
{
    if (packet->length > CL_PACKET_HEAD_BYTES && network_random(network) < 0.05)
        packet->bytes[packet->length - 1] ^= 0x40;
}

/* With "full", damaged packets count as lost and are sent again. */
TEST(test_full_repairs_damage)
{
    SCOPED_NETWORK *network = network_with(CL_AUTH_FULL, 0, 60);
    post_exchange(network, 1);
    run(network, 1, damage_payload);
    check_exchanged(network, 1);
    CHECK(stats_of(network, 0)->packets_forged > 3);
}

/* With another key, or another coverage of the tag, no packet gets through. */
TEST(test_disagreement)
{
    for (int i = 0; i < 2; i++) {
        SCOPED_NETWORK *network = network_with(CL_AUTH_HEADER, 0, 61);
        if (i)
            network->hosts[1].endpoint->seal.key.k0++;
        else
            network->hosts[1].endpoint->seal.auth = CL_AUTH_FULL;
        post_exchange(network, 1);
        run(network, 1, record);
        for (uint32_t host = 0; host < 2; host++) {
            CHECK_EQ(network->hosts[host].last_status, CL_EPEERLOST);
            CHECK(stats_of(network, host)->packets_forged > 0);
        }
        CHECK_EQ(stats_of(network, 1)->packets_received, 0);
    }
}

/* A replay is no sign of life: a dead peer is lost on time, however many of its packets are replayed. */
TEST(test_replay_keeps_nobody_alive)
{
    SCOPED_NETWORK *network = network_with(CL_AUTH_HEADER, 0, 62);
    post_exchange(network, 1);
    run(network, 1, record);
    sim_driver_kill(&network->hosts[1].driver);
    uint64_t died_us = network_now_us(network);
    post_exchange(network, 2);
    while (network->hosts[0].failed < 2 && network_now_us(network) < died_us + 10 * SECOND_US) {
        network_run_until(network, network_now_us(network) + 10000);
        for (uint32_t i = 0; i < 20 && i < capture_count; i++)
            if (captures[i].to == 0)
                inject(network, 0, captures[i].bytes, captures[i].length);
    }
    CHECK_EQ(network->hosts[0].last_status, CL_EPEERLOST);
    CHECK(network_now_us(network) < died_us + 4 * SECOND_US);
    CHECK(stats_of(network, 0)->packets_replayed > 100);
}

/* Numbers as after a long life: the next ones no longer fit in the 32 bits of the header. */
static void age(struct network *network, uint64_t number)
{
    for (uint16_t i = 0; i < 3; i++)
        for (uint16_t j = 0; j < 3; j++)
            for (uint16_t k = 0; i != j && k < 2; k++) {
                struct cl_path *path = &cl_peer_list_find(&network->hosts[i].endpoint->peers, j)->paths[k];
                path->sent.low = path->sent.next = path->packets.next = number;
                path->ack.written = path->acks.next = number;
            }
}

TEST(test_numbers_wrap)
{
    SCOPED_NETWORK *network = network_with(CL_AUTH_HEADER, 0.02, 63);
    age(network, 0xFFFFFFC0);
    post_exchange(network, 1);
    run(network, 1, record);
    check_exchanged(network, 1);
    const struct cl_path *path = &cl_peer_list_find(&network->hosts[0].endpoint->peers, 1)->paths[0];
    CHECK(path->packets.next > 0x100000000);
    /* 2^32 packets later the same numbers are on the wire again, with other tags */
    struct cl_engine_stats before = *stats_of(network, 0);
    age(network, 0x1FFFFFFC0);
    uint32_t replays = 0;
    for (uint32_t i = 0; i < capture_count; i++)
        if (captures[i].to == 0) {
            inject(network, 0, captures[i].bytes, captures[i].length);
            replays++;
        }
    CHECK_EQ(stats_of(network, 0)->packets_received, before.packets_received);
    CHECK_EQ(stats_of(network, 0)->packets_forged - before.packets_forged, replays);
}

/* A path is down for days. Its sender tries it every 50 ms, each time with another number, and the other direction
 * acknowledges tries of its own: afterwards the numbers are far ahead of all that came, and the path works again. */
TEST(test_a_path_returns_after_days)
{
    static const enum cl_auth AUTHS[] = {CL_AUTH_HEADER, CL_AUTH_FULL, CL_AUTH_OFF};
    enum { DAYS = 40, TRIES = DAYS * 24 * 3600 * 20 };
    for (int a = 0; a < 3; a++) {
        SCOPED_NETWORK *network = network_with(AUTHS[a], 0, 64);
        post_exchange(network, 1);
        run(network, 1, record);
        check_exchanged(network, 1);
        struct cl_path *paths[2];
        for (uint16_t host = 0; host < 2; host++) {
            network_egress(network, host, 1)->down = 1;
            paths[host] = &cl_peer_list_find(&network->hosts[host].endpoint->peers, !host)->paths[1];
        }
        post_exchange(network, 2);
        run(network, 2, record);
        for (uint16_t host = 0; host < 2; host++) {
            CHECK(paths[host]->dead);
            cl_sent_free(&paths[host]->sent);
            paths[host]->sent.low = paths[host]->sent.next += TRIES;
            paths[host]->ack.written += TRIES / 2;
            network_egress(network, host, 1)->down = 0;
        }
        uint64_t before = paths[0]->sent.next;
        for (uint32_t exchange = 3; exchange < 12; exchange++) {
            post_exchange(network, exchange);
            run(network, exchange, record);
            check_exchanged(network, exchange);
            network_run_until(network, network_now_us(network) + SECOND_US / 10);
        }
        CHECK(!paths[0]->dead && !paths[1]->dead);
        CHECK(paths[0]->sent.next > before + 100);
        /* Where packets are authenticated, the first one counts; else only one that follows another. */
        for (uint16_t host = 0; host < 2 && AUTHS[a] != CL_AUTH_OFF; host++)
            CHECK_EQ(network->hosts[host].endpoint->stats.packets_foreign, 0);
    }
}
