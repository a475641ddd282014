/* Whole endpoints over the virtual network of network.h. Every scenario is deterministic. */
#include "core/calls.h"
#include "core/endpoint.h"

#include "core/endpoint_state.h"
#include "core/packet.h"
#include "tests/check.h"
#include "tests/network.h"

enum { STASH = 64 << 20, SECOND_US = 1000000 };

static uint8_t pattern(uint32_t from, uint32_t to, uint32_t index, size_t at)
{
    return (uint8_t)(at * 31 + (at >> 8) * 7 + from * 101 + to * 53 + index * 17);
}

/* One message as both sides see it. */
struct transfer {
    uint32_t from, to, index, length;
    uint8_t *sent, *received;
};

static struct transfer *transfer_new(uint32_t from, uint32_t to, uint32_t index, uint32_t length)
{
    struct transfer *transfer = malloc(sizeof(*transfer));
    *transfer = (struct transfer){from, to, index, length, malloc(length + 1), calloc(1, length + 1)};
    for (size_t i = 0; i < length; i++)
        transfer->sent[i] = pattern(from, to, index, i);
    return transfer;
}

static void transfer_free(struct transfer *transfer)
{
    free(transfer->sent);
    free(transfer->received);
    free(transfer);
}

static void post_send(struct network *network, struct transfer *t, uint32_t sequence, uint8_t priority)
{
    struct cl_message_id id = {9, sequence, t->index};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[t->from].endpoint, (uint16_t)t->to, id, t->sent, t->length, priority,
                                   network_now_us(network), t),
             CL_OK);
    network_wake(network, t->from, network->now_ns);
}

/* deliver functions must be called once per byte: adding shows a second call */
static void deliver_add(void *target, const void *payload, size_t length, void *argument)
{
    uint8_t *to = target;
    const uint8_t *from = payload;
    (void)argument;
    for (size_t i = 0; i < length; i++)
        to[i] = (uint8_t)(to[i] + from[i]);
}

static void post_receive(struct network *network, struct transfer *t, uint32_t sequence)
{
    struct cl_message_id id = {9, sequence, t->index};
    struct cl_sink sink = {.target = t->received, .deliver = deliver_add};
    CHECK_EQ(cl_endpoint_post_receive(network->hosts[t->to].endpoint, (uint16_t)t->from, id, sink, t->length,
                                      network_now_us(network), t),
             CL_OK);
    network_wake(network, t->to, network->now_ns);
}

static bool intact(const struct transfer *t)
{
    return memcmp(t->sent, t->received, t->length) == 0;
}

static uint64_t network_failures(const struct network *network)
{
    uint64_t failures = 0;
    for (uint32_t i = 0; i < network->host_count; i++)
        failures += network->hosts[i].failed;
    return failures;
}

/* All hosts send each other `count` messages of about `length` bytes; everything has to arrive within `limit_us`. */
static void all_to_all(struct network *network, uint32_t count, uint32_t length, uint64_t limit_us)
{
    uint32_t hosts = network->host_count, total = hosts * (hosts - 1) * count, made = 0;
    struct transfer **transfers = malloc(total * sizeof(struct transfer *));
    for (uint32_t from = 0; from < hosts; from++)
        for (uint32_t to = 0; to < hosts; to++)
            for (uint32_t index = 0; from != to && index < count; index++)
                transfers[made++] = transfer_new(from, to, index, length + index);
    for (uint32_t i = 0; i < total; i++) {
        post_send(network, transfers[i], 1, 0);
        post_receive(network, transfers[i], 1);
    }
    uint64_t start_us = network_now_us(network);
    CHECK(network_run_completions(network, 2 * (hosts - 1) * count, start_us + limit_us));
    CHECK_EQ(network_failures(network), 0);
    for (uint32_t i = 0; i < total; i++) {
        CHECK(intact(transfers[i]));
        transfer_free(transfers[i]);
    }
    free(transfers);
}

static void test_clean_network(void)
{
    struct network *network = network_new(3, 1, 1000, 150, STASH, 1);
    all_to_all(network, 5, 200000, SECOND_US);
    const struct cl_endpoint_stats *stats = cl_endpoint_stats(network->hosts[0].endpoint);
    CHECK_EQ(stats->packets_retransmitted, 0);
    CHECK_EQ(stats->packets_foreign, 0);
    CHECK_EQ(stats->packets_duplicate, 0);
    CHECK_EQ(stats->payload_bytes_received, stats->payload_bytes_sent);
    network_free(network);
}

static void test_loss(void)
{
    static const double LOSSES[] = {0.01, 0.1, 0.3};
    for (size_t i = 0; i < sizeof(LOSSES) / sizeof(LOSSES[0]); i++) {
        struct network *network = network_new(3, 1, 1000, 150, STASH, 2 + i);
        network->loss = LOSSES[i];
        all_to_all(network, 4, 100000, 5 * SECOND_US);
        CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_retransmitted > 0);
        network_free(network);
    }
}

static void test_reordering_and_duplication(void)
{
    struct network *network = network_new(3, 1, 1000, 150, STASH, 3);
    network->reordering = 0.2;
    network->reordering_ns = 300000;
    network->duplication = 0.2;
    network->loss = 0.02;
    all_to_all(network, 4, 100000, 2 * SECOND_US);
    const struct cl_endpoint_stats *stats = cl_endpoint_stats(network->hosts[0].endpoint);
    CHECK(stats->packets_replayed > 0);
    CHECK_EQ(stats->packets_forged, 0);
    network_free(network);
}

/* After the first spurious losses the thresholds adapt: few packets are sent twice although every fifth is late. */
static void test_reordering_costs_little(void)
{
    struct network *network = network_new(2, 1, 100, 300, STASH, 4);
    network->reordering = 0.2;
    network->reordering_ns = 1000000;
    all_to_all(network, 4, 1 << 20, 3 * SECOND_US);
    const struct cl_endpoint_stats *stats = cl_endpoint_stats(network->hosts[0].endpoint);
    CHECK(stats->packets_spurious > 0);
    CHECK(stats->packets_retransmitted * 50 < stats->packets_sent);
    network_free(network);
}

static void test_odd_lengths(void)
{
    static const uint32_t LENGTHS[] = {0, 1, 7, 8, 1431, 1432, 1433, 2863, 2864, 2865, 100001};
    struct network *network = network_new(2, 1, 1000, 150, STASH, 5);
    uint32_t count = sizeof(LENGTHS) / sizeof(LENGTHS[0]);
    struct transfer *transfers[sizeof(LENGTHS) / sizeof(LENGTHS[0])];
    for (uint32_t i = 0; i < count; i++) {
        transfers[i] = transfer_new(0, 1, i, LENGTHS[i]);
        post_send(network, transfers[i], 1, (uint8_t)(i % 8));
        post_receive(network, transfers[i], 1);
    }
    CHECK(network_run_completions(network, count, network_now_us(network) + SECOND_US));
    for (uint32_t i = 0; i < count; i++) {
        CHECK(intact(transfers[i]));
        transfer_free(transfers[i]);
    }
    network_free(network);
}

/* A message whose very last packet is lost is whole within milliseconds, not after some long timeout. */
static void test_tail_loss_recovers_fast(void)
{
    struct network *network = network_new(2, 1, 1000, 150, STASH, 6);
    network_run_until(network, network_now_us(network) + 10000);
    struct transfer *t = transfer_new(0, 1, 0, 1000);
    post_receive(network, t, 1);
    network->loss = 1;
    post_send(network, t, 1, 0);
    uint64_t start_us = network_now_us(network);
    network_run_until(network, start_us + 500);
    network->loss = 0;
    CHECK(network_run_completions(network, 1, start_us + 5000));
    CHECK(intact(t));
    CHECK_EQ(cl_endpoint_stats(network->hosts[0].endpoint)->packets_retransmitted, 1);
    transfer_free(t);
    network_free(network);
}

/* A receiver that does not run for 50 ms costs a few probes, not a second copy of everything. */
static void test_sleeping_receiver_costs_probes_only(void)
{
    struct network *network = network_new(2, 1, 1000, 600, STASH, 7);
    network_run_until(network, network_now_us(network) + 10000);
    struct transfer *t = transfer_new(0, 1, 0, 100000);
    post_receive(network, t, 1);
    network_run_until(network, network_now_us(network) + 1000);
    network->hosts[1].awake_ns = network->now_ns + 50000000;
    post_send(network, t, 1, 0);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 60000));
    CHECK(intact(t));
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_retransmitted <= 6);
    transfer_free(t);
    network_free(network);
}

/* Rank 2 enters 500 ms late. Nobody fails or floods it, and what was stashed is there at once. */
static void test_late_receiver(void)
{
    struct network *network = network_new(3, 1, 200, 150, STASH, 8);
    struct transfer *transfers[2];
    for (uint32_t from = 0; from < 2; from++) {
        transfers[from] = transfer_new(from, 2, 0, 1 << 20);
        post_send(network, transfers[from], 1, 0);
    }
    network_run_until(network, network_now_us(network) + 500000);
    const struct cl_endpoint_stats *late = cl_endpoint_stats(network->hosts[2].endpoint);
    CHECK_EQ(network->hosts[0].completed, 1); /* the stash holds all of it */
    CHECK_EQ(late->packets_stashed, 2 * 733);
    for (uint32_t from = 0; from < 2; from++)
        post_receive(network, transfers[from], 1);
    network_run_until(network, network_now_us(network) + 1);
    CHECK_EQ(network->hosts[2].completed, 2);
    CHECK(intact(transfers[0]) && intact(transfers[1]));
    CHECK_EQ(late->packets_stash_dropped, 0);
    transfer_free(transfers[0]);
    transfer_free(transfers[1]);
    network_free(network);
}

/* The same with room for 20 packets only: the senders stop, and go on as soon as the receives are posted. */
static void test_tiny_stash(void)
{
    struct network *network = network_new(3, 1, 200, 150, 30000, 9);
    enum { MESSAGES = 50 };
    struct transfer *transfers[2 * MESSAGES];
    for (uint32_t i = 0; i < 2 * MESSAGES; i++) {
        transfers[i] = transfer_new(i % 2, 2, i / 2, 20000);
        post_send(network, transfers[i], 1, 0);
    }
    network_run_until(network, network_now_us(network) + 100000);
    uint64_t sent = cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent;
    network_run_until(network, network_now_us(network) + 400000);
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent - sent < 20); /* all quiet */
    CHECK(cl_endpoint_stats(network->hosts[2].endpoint)->packets_stash_dropped < 300);
    for (uint32_t i = 0; i < 2 * MESSAGES; i++)
        post_receive(network, transfers[i], 1);
    uint64_t posted_us = network_now_us(network);
    CHECK(network_run_completions(network, MESSAGES, posted_us + 110000)); /* 2 MB at 200 Mbit/s take 85 ms */
    for (uint32_t i = 0; i < 2 * MESSAGES; i++) {
        CHECK(intact(transfers[i]));
        transfer_free(transfers[i]);
    }
    network_free(network);
}

/* No room at all, receives posted one by one, loss: refusals, READYs and data get lost and overtake each other. */
static void test_no_stash_with_loss(void)
{
    struct network *network = network_new(2, 1, 200, 150, 0, 10);
    network->loss = 0.05;
    network->reordering = 0.1;
    network->reordering_ns = 500000;
    enum { MESSAGES = 40 };
    struct transfer *transfers[MESSAGES];
    for (uint32_t i = 0; i < MESSAGES; i++) {
        transfers[i] = transfer_new(0, 1, i, 5000);
        post_send(network, transfers[i], i, 0);
    }
    uint64_t start_us = network_now_us(network);
    for (uint32_t i = MESSAGES; i-- > 0;) { /* last first */
        network_run_until(network, network_now_us(network) + 3000);
        post_receive(network, transfers[i], i);
    }
    CHECK(network_run_completions(network, MESSAGES, start_us + SECOND_US));
    for (uint32_t i = 0; i < MESSAGES; i++) {
        CHECK(intact(transfers[i]));
        transfer_free(transfers[i]);
    }
    network_free(network);
}

static void test_path_death(void)
{
    struct network *network = network_new(2, 2, 200, 150, STASH, 11);
    struct transfer *t = transfer_new(0, 1, 0, 8 << 20);
    post_receive(network, t, 1);
    post_send(network, t, 1, 0);
    uint64_t start_us = network_now_us(network);
    network_run_until(network, start_us + 50000);
    network->egress[0][1].dead = true;
    CHECK(network_run_completions(network, 1, start_us + 600000)); /* one path needs 355 ms for all of it */
    CHECK(intact(t));
    CHECK(cl_endpoint_peer_alive(network->hosts[0].endpoint, 1));

    /* and it is used again once it works */
    network->egress[0][1].dead = false;
    network_run_until(network, network_now_us(network) + 200000);
    uint64_t idle_ns = network->egress[0][1].free_ns;
    struct transfer *second = transfer_new(0, 1, 1, 1 << 20);
    post_receive(network, second, 1);
    post_send(network, second, 1, 0);
    CHECK(network_run_completions(network, 2, network_now_us(network) + 100000));
    CHECK(network->egress[0][1].free_ns > idle_ns + 10000000);
    transfer_free(t);
    transfer_free(second);
    network_free(network);
}

/* A dead path is probed more often than its round trip; it must come back nevertheless. */
static void test_path_with_long_round_trip_revives(void)
{
    struct network *network = network_new(2, 2, 200, 150, STASH, 24);
    network->delay_ns = 60000000;
    struct transfer *first = transfer_new(0, 1, 0, 1 << 20), *second = transfer_new(0, 1, 1, 1 << 20);
    network_run_until(network, network_now_us(network) + 200000);
    network->egress[0][1].dead = true;
    post_receive(network, first, 1);
    post_send(network, first, 1, 0);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 2 * SECOND_US));
    network->egress[0][1].dead = false;
    network_run_until(network, network_now_us(network) + SECOND_US);
    network->egress[0][0].dead = true;
    post_receive(network, second, 1);
    post_send(network, second, 1, 0);
    CHECK(network_run_completions(network, 2, network_now_us(network) + 3 * SECOND_US));
    CHECK(intact(second));
    transfer_free(first);
    transfer_free(second);
    network_free(network);
}

/* A path dies with all there is to send on it: the other one, which is idle, must be asked whether the peer lives. */
static void test_path_death_with_everything_on_it(void)
{
    for (uint32_t path = 0; path < 2; path++) {
        struct network *network = network_new(2, 2, 200, 150, STASH, 21);
        network_run_until(network, network_now_us(network) + 20000);
        struct transfer *t = transfer_new(0, 1, 0, 100);
        network->egress[0][path].dead = true;
        post_receive(network, t, 1);
        post_send(network, t, 1, 0);
        CHECK(network_run_completions(network, 1, network_now_us(network) + 100000));
        CHECK(intact(t));
        transfer_free(t);
        network_free(network);
    }
}

static void test_peer_death(void)
{
    struct network *network = network_new(3, 1, 200, 150, STASH, 12);
    network_run_until(network, network_now_us(network) + 1500000);
    struct transfer *to_dead = transfer_new(0, 2, 0, 1 << 20), *from_dead = transfer_new(2, 0, 0, 1000);
    struct transfer *alive = transfer_new(0, 1, 0, 1000);
    network->hosts[2].dead = true;
    uint64_t start_us = network_now_us(network);
    post_send(network, to_dead, 1, 0);
    post_receive(network, from_dead, 1);
    network_run_until(network, start_us + 1000000);
    CHECK_EQ(network->hosts[0].completed, 0);
    network_run_until(network, start_us + 3500000);
    CHECK_EQ(network->hosts[0].completed, 2);
    CHECK_EQ(network->hosts[0].failed, 2);
    CHECK_EQ(network->hosts[0].last_status, CL_EPEERLOST);
    CHECK(!cl_endpoint_peer_alive(network->hosts[0].endpoint, 2));
    CHECK(cl_endpoint_peer_alive(network->hosts[1].endpoint, 2)); /* nobody waits for it there: it may have left */
    CHECK(cl_endpoint_peer_alive(network->hosts[0].endpoint, 1));
    struct cl_message_id id = {9, 2, 0};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[0].endpoint, 2, id, to_dead->sent, 5, 0, 0, NULL), CL_EPEERLOST);
    /* silence was not for lack of trying, but not a flood either */
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent < 250);
    post_receive(network, alive, 3);
    post_send(network, alive, 3, 0);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 10000));
    transfer_free(to_dead);
    transfer_free(from_dead);
    transfer_free(alive);
    network_free(network);
}

static void test_idle_peers_stay_alive(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 13);
    network_run_until(network, network_now_us(network) + 20 * SECOND_US);
    CHECK(cl_endpoint_peer_alive(network->hosts[0].endpoint, 1));
    CHECK(cl_endpoint_peer_alive(network->hosts[1].endpoint, 0));
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent < 50);
    network_free(network);
}

/* A process that was stopped for long does not blame its peers for the silence it did not hear. */
static void test_own_sleep_is_no_silence(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 14);
    network_run_until(network, network_now_us(network) + 10000);
    struct transfer *t = transfer_new(1, 0, 0, 1000);
    post_receive(network, t, 1);
    network_run_until(network, network_now_us(network) + 10000);
    network->hosts[0].awake_ns = network->now_ns + 2500000000;
    network_run_until(network, network_now_us(network) + 2600000);
    CHECK(cl_endpoint_peer_alive(network->hosts[0].endpoint, 1));
    post_send(network, t, 1, 0);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 10000));
    transfer_free(t);
    network_free(network);
}

/* A process that is stopped for less than the timeout, just before it would have had something to say, is not lost. */
static void test_pause_shorter_than_the_timeout(void)
{
    for (uint32_t before_us = 0; before_us < 2000000; before_us += 100000) {
        struct network *network = network_new(2, 1, 200, 150, STASH, 22);
        network_run_until(network, network_now_us(network) + 10000);
        struct transfer *t = transfer_new(1, 0, 0, 1000);
        post_receive(network, t, 1);
        network_run_until(network, network_now_us(network) + before_us);
        network->hosts[1].awake_ns = network->now_ns + 2950000000;
        network_run_until(network, network_now_us(network) + 3000000);
        CHECK(cl_endpoint_peer_alive(network->hosts[0].endpoint, 1));
        post_send(network, t, 1, 0);
        CHECK(network_run_completions(network, 1, network_now_us(network) + 10000));
        transfer_free(t);
        network_free(network);
    }
}

static void run_mismatch(uint32_t sent_length, uint32_t received_length, double loss)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 15);
    network->loss = loss;
    struct transfer *t = transfer_new(0, 1, 0, 10000), *other = transfer_new(0, 1, 1, 5000);
    t->length = sent_length;
    post_send(network, t, 1, 0);
    t->length = received_length;
    post_receive(network, t, 1);
    post_send(network, other, 1, 0);
    post_receive(network, other, 1);
    CHECK(network_run_completions(network, 2, network_now_us(network) + 200000));
    CHECK_EQ(network->hosts[0].failed, 1);
    CHECK_EQ(network->hosts[1].failed, 1);
    CHECK(intact(other));
    transfer_free(t);
    transfer_free(other);
    network_free(network);
}

static void test_mismatch(void)
{
    static const uint32_t LENGTHS[][2] = {{10000, 9999}, {9999, 10000}, {0, 1},       {1, 0},
                                          {1432, 1433},  {1433, 1432},  {1432, 2864}, {10000, 1432}};
    for (size_t i = 0; i < sizeof(LENGTHS) / sizeof(LENGTHS[0]); i++) {
        run_mismatch(LENGTHS[i][0], LENGTHS[i][1], 0);
        run_mismatch(LENGTHS[i][0], LENGTHS[i][1], 0.2);
    }
}

static void note_status(struct network_host *host, const struct cl_completion *completion)
{
    int *statuses = host->argument;
    statuses[-completion->status]++;
}

static void test_abort(void)
{
    struct network *network = network_new(3, 1, 200, 150, STASH, 16);
    network->loss = 0.1;
    int statuses[2][16] = {{0}};
    for (uint32_t i = 0; i < 2; i++) {
        network->hosts[i + 1].on_completion = note_status;
        network->hosts[i + 1].argument = statuses[i];
    }
    struct transfer *waits = transfer_new(0, 1, 0, 1000), *sends = transfer_new(1, 2, 0, 1 << 20);
    post_receive(network, waits, 1);
    post_send(network, sends, 1, 0);
    post_receive(network, sends, 1);
    network_run_until(network, network_now_us(network) + 5000);
    static const uint16_t PEERS[] = {1, 2};
    cl_endpoint_abort(network->hosts[0].endpoint, 9, PEERS, 2, CL_ETIMEDOUT, 7, network_now_us(network));
    network_wake(network, 0, network->now_ns);
    network_run_until(network, network_now_us(network) + 50000);
    CHECK_EQ(statuses[0][-CL_EABORTED], 2);
    CHECK_EQ(statuses[1][-CL_EABORTED], 1);
    for (uint32_t i = 1; i <= 2; i++) {
        uint32_t group;
        uint16_t peer;
        int reason;
        CHECK(cl_endpoint_next_abort(network->hosts[i].endpoint, &group, &peer, &reason));
        CHECK_EQ(group, 9);
        CHECK_EQ(peer, 7); /* as host 0 said */
        CHECK_EQ(reason, CL_ETIMEDOUT);
        CHECK(!cl_endpoint_next_abort(network->hosts[i].endpoint, &group, &peer, &reason));
    }
    /* the group is over for good */
    struct cl_message_id id = {9, 2, 0};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[1].endpoint, 2, id, sends->sent, 5, 0, 0, NULL), CL_EABORTED);
    transfer_free(waits);
    transfer_free(sends);
    network_free(network);
}

/* Host 0 aborts without telling host 1, which learns it as soon as it sends. */
/* Nothing gets from 1 to 0, all gets from 0 to 1: who gives up first tells the other, who would wait twice as long. */
static void test_abort_reaches_a_lost_peer(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 23);
    network_run_until(network, network_now_us(network) + 10000);
    struct transfer *there = transfer_new(0, 1, 0, 1000), *back = transfer_new(1, 0, 0, 1000);
    network->egress[1][0].dead = true;
    post_send(network, there, 1, 0);
    post_receive(network, back, 1);
    post_send(network, back, 1, 0);
    network_run_until(network, network_now_us(network) + 3400000);
    CHECK(!cl_endpoint_peer_alive(network->hosts[0].endpoint, 1));
    CHECK(cl_endpoint_peer_alive(network->hosts[1].endpoint, 0));
    uint16_t lost = 1;
    cl_endpoint_abort(network->hosts[0].endpoint, 9, &lost, 1, CL_EPEERLOST, UINT16_MAX, network_now_us(network));
    network_wake(network, 0, network->now_ns);
    network_run_until(network, network_now_us(network) + 10000);
    uint32_t group;
    uint16_t peer;
    int reason;
    CHECK(cl_endpoint_next_abort(network->hosts[1].endpoint, &group, &peer, &reason));
    CHECK_EQ(group, 9);
    CHECK_EQ(reason, CL_EPEERLOST);
    CHECK_EQ(network->hosts[1].last_status, CL_EABORTED);
    transfer_free(there);
    transfer_free(back);
    network_free(network);
}

/* Nothing gets from 0 to 1: 0 hears 1 all the time, but never an answer. */
static void test_a_peer_that_never_answers_is_lost(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 25);
    network_run_until(network, network_now_us(network) + 10000);
    struct transfer *there = transfer_new(0, 1, 0, 1000);
    network->egress[0][0].dead = true;
    post_send(network, there, 1, 0);
    network_run_until(network, network_now_us(network) + 7 * SECOND_US);
    CHECK_EQ(network->hosts[0].last_status, CL_EPEERLOST);
    transfer_free(there);
    network_free(network);
}

static void test_abort_answers_data(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 17);
    int statuses[16] = {0};
    network->hosts[1].on_completion = note_status;
    network->hosts[1].argument = statuses;
    cl_endpoint_abort(network->hosts[0].endpoint, 9, NULL, 0, CL_EABORTED, UINT16_MAX, network_now_us(network));
    struct transfer *t = transfer_new(1, 0, 0, 100000);
    post_send(network, t, 1, 0);
    CHECK(network_run_completions(network, 0, 0));
    network_run_until(network, network_now_us(network) + 20000);
    CHECK_EQ(statuses[-CL_EABORTED], 1);
    transfer_free(t);
    network_free(network);
}

/* Both sides of an operation, each with a signature of its own. The receiver calls first or last. */
static void disagree(uint16_t sender, uint16_t receiver, bool receiver_first, bool posts)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 18);
    struct transfer *t = transfer_new(0, 1, 0, 20000);
    bool agree = !cl_calls_differ(sender, receiver);
    for (int i = 0; i < 2; i++) {
        if ((i == 0) == receiver_first) {
            CHECK_EQ(cl_endpoint_begin(network->hosts[1].endpoint, 9, 1, receiver), CL_OK);
            if (posts && (agree || receiver_first))
                post_receive(network, t, 1);
        } else {
            CHECK_EQ(cl_endpoint_begin(network->hosts[0].endpoint, 9, 1, sender), CL_OK);
            post_send(network, t, 1, 0);
        }
        network_run_until(network, network_now_us(network) + 50000);
    }
    uint32_t group;
    uint16_t blame;
    int reason;
    bool failed = cl_endpoint_next_abort(network->hosts[1].endpoint, &group, &blame, &reason);
    CHECK_EQ(failed, !agree);
    if (failed) {
        CHECK_EQ(group, 9);
        CHECK_EQ(blame, 0);
        CHECK_EQ(reason, CL_EMISMATCH);
    }
    cl_endpoint_end(network->hosts[1].endpoint, 9, 1);
    transfer_free(t);
    network_free(network);
}

static void test_signatures(void)
{
    for (int order = 0; order < 2; order++) {
        disagree(4095, 4095, order, true);
        disagree(5, 0, order, true);
        disagree(0, 5, order, true);
        disagree(5, 6, order, true);
        disagree(5, 6, order, false); /* a message that nobody waits for */
    }
}

/* Each waits for the other, and neither sends. */
static void test_pings_carry_signatures(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 20);
    uint8_t bytes[8];
    struct cl_sink sink = {bytes, NULL, NULL};
    for (uint16_t i = 0; i < 2; i++) {
        struct cl_endpoint *endpoint = network->hosts[i].endpoint;
        CHECK_EQ(cl_endpoint_begin(endpoint, 9, 1, (uint16_t)(5 + i)), CL_OK);
        CHECK_EQ(cl_endpoint_post_receive(endpoint, 1 - i, (struct cl_message_id){9, 1, 0}, sink, 8,
                                          network_now_us(network), NULL),
                 CL_OK);
        network_wake(network, i, network->now_ns);
    }
    network_run_until(network, network_now_us(network) + 1500000); /* half of the time after which a peer is lost */
    for (uint16_t i = 0; i < 2; i++) {
        uint32_t group;
        uint16_t blame;
        int reason;
        CHECK(cl_endpoint_next_abort(network->hosts[i].endpoint, &group, &blame, &reason));
        CHECK_EQ(reason, CL_EMISMATCH);
        CHECK_EQ(blame, 1 - i);
        cl_endpoint_end(network->hosts[i].endpoint, 9, 1);
    }
    network_free(network);
}

static void test_late_peer(void)
{
    struct network *network = network_new(3, 1, 200, 150, STASH, 19);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    uint8_t bytes[8];
    struct cl_sink sink = {bytes, NULL, NULL};
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 9, 1), UINT16_MAX);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, (struct cl_message_id){9, 1, 1}, sink, 8, 0, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 2, (struct cl_message_id){9, 1, 0}, sink, 8, 0, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, (struct cl_message_id){9, 2, 0}, sink, 8, 0, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 9, 1), 2);
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 9, 2), 1);
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 8, 1), UINT16_MAX);
    network_free(network);
}

static void test_cancel(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 18);
    struct transfer *t = transfer_new(0, 1, 0, 1 << 20), *next = transfer_new(0, 1, 0, 5000);
    post_send(network, t, 1, 0);
    post_receive(network, t, 1);
    network_run_until(network, network_now_us(network) + 5000);
    cl_endpoint_cancel(network->hosts[1].endpoint, 9, 1); /* the sender goes on for a while */
    network_run_until(network, network_now_us(network) + 2000);
    cl_endpoint_cancel(network->hosts[0].endpoint, 9, 1);
    post_send(network, next, 2, 0);
    post_receive(network, next, 2);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 100000));
    CHECK_EQ(network->hosts[1].completed, 1);
    CHECK(intact(next));
    CHECK(cl_endpoint_stats(network->hosts[1].endpoint)->packets_stashed == 0); /* what came late was dropped */

    cl_endpoint_cancel(network->hosts[1].endpoint, 9, UINT32_MAX);
    struct cl_message_id id = {9, 3, 0};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[1].endpoint, 0, id, t->sent, 5, 0, 0, NULL), CL_ECLOSED);
    transfer_free(t);
    transfer_free(next);
    network_free(network);
}

/* A completion that waits to be fetched is forgotten, too. */
static void test_cancel_drops_completions(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 19);
    struct transfer *t = transfer_new(0, 1, 0, 100);
    post_send(network, t, 1, 0);
    network_run_until(network, network_now_us(network) + 5000);
    struct cl_endpoint *receiver = network->hosts[1].endpoint;
    struct cl_message_id id = {9, 1, 0};
    struct cl_completion completion;
    CHECK_EQ(cl_endpoint_post_receive(receiver, 0, id, (struct cl_sink){.target = t->received}, 100,
                                      network_now_us(network), t),
             CL_OK);
    CHECK(intact(t));
    cl_endpoint_cancel(receiver, 9, 1);
    CHECK(!cl_endpoint_next_completion(receiver, &completion));
    transfer_free(t);
    network_free(network);
}

/* A small urgent message overtakes megabytes that were posted before it. */
static void test_priority(void)
{
    struct network *network = network_new(2, 1, 100, 150, STASH, 20);
    struct transfer *bulk = transfer_new(0, 1, 0, 4 << 20), *urgent = transfer_new(0, 1, 1, 20000);
    post_receive(network, bulk, 1);
    post_receive(network, urgent, 1);
    post_send(network, bulk, 1, 5);
    network_run_until(network, network_now_us(network) + 50000);
    uint64_t start_us = network_now_us(network);
    post_send(network, urgent, 1, 1);
    CHECK(network_run_completions(network, 1, start_us + 20000)); /* the queue in the network is a few ms long */
    CHECK(intact(urgent));
    CHECK(!intact(bulk));
    CHECK(network_run_completions(network, 2, start_us + SECOND_US));
    CHECK(intact(bulk));
    transfer_free(bulk);
    transfer_free(urgent);
    network_free(network);
}

static void test_foreign_packets_change_nothing(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 21);
    network_run_until(network, network_now_us(network) + 10000);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    struct cl_packet good = {
        .kind = CL_PACKET_DATA, .flags = CL_PACKET_LAST, .source = 1, .epoch = 1, .group = 9, .length = 8, .number = 1};
    uint64_t now_us = network_now_us(network), foreign = 0;
    uint8_t bytes[64] = {0};
    for (int i = 0; i < 10; i++) {
        struct cl_packet packet = good;
        size_t length = 48;
        packet.number += (uint32_t)i;
        packet.source = i == 0 ? 0 : i == 1 ? 500 : 1; /* ourselves, nobody */
        packet.epoch = i == 2 ? 0 : 1;
        packet.path = i == 3 ? 7 : i == 4;
        packet.offset = i == 5 ? 8 : 0;           /* not where packets are cut */
        packet.flags = i == 6 ? 0 : packet.flags; /* short, but not the last one */
        packet.kind = i == 7 ? CL_PACKET_ACK : packet.kind;
        packet.offset = i == 7 ? 20 : packet.offset;
        length = i == 8 ? 47 : i == 9 ? 39 : length;
        cl_packet_encode(&packet, bytes);
        cl_packet_seal(bytes, bytes + 40, &endpoint->seal, 0, packet.number);
        cl_endpoint_receive(endpoint, bytes, length, now_us, now_us);
        CHECK_EQ(cl_endpoint_stats(endpoint)->packets_foreign, ++foreign);
    }
    CHECK_EQ(cl_endpoint_stats(endpoint)->packets_stashed, 0);
    good.number += 10;
    cl_packet_encode(&good, bytes);
    cl_packet_seal(bytes, bytes + 40, &endpoint->seal, 0, good.number);
    cl_endpoint_receive(endpoint, bytes, 48, now_us, now_us);
    CHECK_EQ(cl_endpoint_stats(endpoint)->packets_stashed, 1);
    network_free(network);
}

/* Packets with flipped bits under a right tag: whatever they say, nothing breaks. */
static void test_mutated_packets(void)
{
    struct network *network = network_new(3, 2, 200, 150, 100000, 23);
    network->loss = 0.02;
    struct transfer *t = transfer_new(0, 1, 0, 1 << 20), *back = transfer_new(1, 0, 0, 1 << 20);
    post_send(network, t, 1, 0);
    post_receive(network, t, 1);
    post_send(network, back, 1, 0); /* never received: stash, refusals and READYs take part */
    uint64_t until_us = network_now_us(network) + 300000;
    while (network_step(network, until_us)) {
        struct network_packet *next = network->heap_count ? network->heap[0] : NULL;
        if (!next || next->event != AT_HOST || network_random(network) > 0.2)
            continue;
        for (int flips = 1 + (int)(network_random(network) * 4); flips > 0; flips--) {
            uint32_t at = (uint32_t)(network_random(network) * 32); /* all of the header but the tag */
            next->bytes[at] = (uint8_t)(next->bytes[at] ^ 1u << (int)(network_random(network) * 8));
        }
        cl_store_u16(next->bytes + 6, next->length - CL_PACKET_HEAD_BYTES); /* what is sealed must be there */
        cl_packet_seal(next->bytes, next->bytes + CL_PACKET_HEAD_BYTES, &network->hosts[next->to].endpoint->seal,
                       next->to, 0);
    }
    CHECK(cl_endpoint_stats(network->hosts[1].endpoint)->packets_foreign > 0);
    CHECK(cl_endpoint_stats(network->hosts[1].endpoint)->packets_received > 100);
    transfer_free(t);
    transfer_free(back);
    network_free(network);
}

static void test_arguments(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 22);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint, *none = NULL;
    struct cl_message_id id = {9, 1, 0};
    uint8_t byte = 0;
    struct cl_sink sink = {.target = &byte};
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 1, 1), CL_EINVAL);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 5, 0), CL_EINVAL);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 5, 9), CL_EINVAL);
    static const uint32_t beyond[] = {8};
    CHECK_EQ(cl_endpoint_add_peer_through(endpoint, 5, 1, beyond), CL_EINVAL);
    CHECK_EQ(cl_endpoint_post_send(endpoint, 7, id, &byte, 1, 0, 0, NULL), CL_EINVAL);
    CHECK_EQ(cl_endpoint_post_send(endpoint, 1, id, &byte, 1, 8, 0, NULL), CL_EINVAL);
    CHECK_EQ(cl_endpoint_post_send(endpoint, 1, id, &byte, 1, 0, 0, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_post_send(endpoint, 1, id, &byte, 1, 0, 0, NULL), CL_EINVAL);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, id, sink, 1, 0, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, id, sink, 1, 0, NULL), CL_EINVAL);
    struct cl_endpoint_config config = {.datagram_bytes = 1472, .congestion = "none"};
    CHECK_EQ(cl_endpoint_create(&config, &none), CL_EINVAL);
    config.congestion = "fixed"; /* without a rate */
    CHECK_EQ(cl_endpoint_create(&config, &none), CL_EINVAL);
    config.congestion = "delay";
    config.datagram_bytes = 20;
    CHECK_EQ(cl_endpoint_create(&config, &none), CL_EINVAL);
    network_free(network);
}

/* A peer of this host is reached over loopback, others through the interfaces: first paths, but no common queue. */
static void test_paths_leave_through_their_interface(void)
{
    struct network *network = network_new(2, 1, 200, 150, STASH, 23);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    static const uint32_t local[] = {2}, outside[] = {1, 0};
    CHECK_EQ(cl_endpoint_add_peer_through(endpoint, 5, 1, local), CL_OK);
    CHECK_EQ(cl_endpoint_add_peer_through(endpoint, 6, 2, outside), CL_OK);
    CHECK(endpoint->peers[1]->paths[0].egress == &endpoint->egresses[0]);
    CHECK(endpoint->peers[5]->paths[0].egress == &endpoint->egresses[2]);
    CHECK(endpoint->peers[6]->paths[0].egress == &endpoint->egresses[1]);
    CHECK(endpoint->peers[6]->paths[1].egress == &endpoint->egresses[0]);
    CHECK_EQ(endpoint->egress_count, 3);
    network_free(network);
}

/* Thousands of messages of random sizes, classes and moments, over a network with every fault at once. */
static void run_random(uint64_t seed)
{
    enum { ROUNDS = 25, BATCH = 40 };
    struct network *network = network_new(4, (uint16_t)(1 + seed % 2), 500, 100, (seed % 3) * 100000, seed);
    network->loss = 0.03;
    network->reordering = 0.05;
    network->reordering_ns = 400000;
    network->duplication = 0.02;
    network->sleep_ns = seed % 4 == 0 ? 2000000 : 0;
    static struct transfer *transfers[ROUNDS * BATCH];
    uint32_t made = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < BATCH; i++) {
            uint32_t from = (uint32_t)(network_random(network) * 4), step = 1 + (uint32_t)(network_random(network) * 3);
            double size = network_random(network);
            uint32_t length = (uint32_t)(size * size * size * 60000);
            struct transfer *t = transfer_new(from, (from + step) % 4, i, length);
            transfers[made++] = t;
            bool receive_first = network_random(network) < 0.5;
            if (receive_first)
                post_receive(network, t, round);
            post_send(network, t, round, (uint8_t)(network_random(network) * 8));
            if (network_random(network) < 0.3)
                network_run_until(network, network_now_us(network) + (uint64_t)(network_random(network) * 2000));
            if (!receive_first)
                post_receive(network, t, round);
        }
    }
    uint64_t deadline_us = network_now_us(network) + 10 * SECOND_US;
    uint32_t done = 0;
    while (network_step(network, deadline_us)) {
        done = 0;
        for (uint32_t i = 0; i < 4; i++)
            done += network->hosts[i].completed;
        if (done == 2 * made)
            break;
    }
    CHECK_EQ(done, 2 * made);
    CHECK_EQ(network_failures(network), 0);
    uint32_t broken = 0;
    for (uint32_t i = 0; i < made; i++) {
        broken += !intact(transfers[i]);
        transfer_free(transfers[i]);
    }
    if (broken || done != 2 * made)
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
    CHECK_EQ(broken, 0);
    network_free(network);
}

static void test_random_messages(void)
{
    for (uint64_t seed = 1; seed <= 12; seed++)
        run_random(seed);
}

int main(void)
{
    RUN(test_clean_network);
    RUN(test_loss);
    RUN(test_reordering_and_duplication);
    RUN(test_reordering_costs_little);
    RUN(test_odd_lengths);
    RUN(test_tail_loss_recovers_fast);
    RUN(test_sleeping_receiver_costs_probes_only);
    RUN(test_late_receiver);
    RUN(test_tiny_stash);
    RUN(test_no_stash_with_loss);
    RUN(test_path_death);
    RUN(test_path_with_long_round_trip_revives);
    RUN(test_path_death_with_everything_on_it);
    RUN(test_peer_death);
    RUN(test_idle_peers_stay_alive);
    RUN(test_own_sleep_is_no_silence);
    RUN(test_pause_shorter_than_the_timeout);
    RUN(test_mismatch);
    RUN(test_abort);
    RUN(test_abort_reaches_a_lost_peer);
    RUN(test_a_peer_that_never_answers_is_lost);
    RUN(test_abort_answers_data);
    RUN(test_signatures);
    RUN(test_pings_carry_signatures);
    RUN(test_late_peer);
    RUN(test_cancel);
    RUN(test_cancel_drops_completions);
    RUN(test_priority);
    RUN(test_foreign_packets_change_nothing);
    RUN(test_mutated_packets);
    RUN(test_arguments);
    RUN(test_paths_leave_through_their_interface);
    RUN(test_random_messages);
    return CHECK_REPORT();
}
