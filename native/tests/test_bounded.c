/* Messages that may lose packets, over the virtual network of network.h. In every scenario both ends must report the
 * same missing ranges, within the bound, and what is not missing must be there exactly once. */
#include "core/bounded.h"

#include "core/packet.h"
#include "tests/check.h"
#include "tests/network.h"

enum { STASH = 64 << 20, SECOND_US = 1000000, PAYLOAD = 1432, RANGES_MAX = 4096 };

struct end {
    bool done;
    int status;
    uint64_t at_us;
    uint32_t count;
    struct cl_range missing[RANGES_MAX];
};

struct transfer {
    struct network *network;
    uint32_t from, to, length;
    struct cl_message_id id;
    struct cl_qos qos;
    uint8_t *sent, *received;
    struct end sender, receiver;
};

static struct transfer *make(struct network *network, uint32_t from, uint32_t to, uint32_t index, uint32_t length,
                             struct cl_qos qos)
{
    struct transfer *t = calloc(1, sizeof(*t));
    *t = (struct transfer){
        .network = network, .from = from, .to = to, .length = length, .id = {9, 1, index}, .qos = qos};
    t->sent = malloc(length + 1);
    t->received = calloc(1, length + 1);
    for (uint32_t i = 0; i < length; i++)
        t->sent[i] = (uint8_t)(1 + (i * 31 + (i >> 8) * 7 + index * 17) % 255); /* never 0 */
    return t;
}

static void drop(struct transfer *t)
{
    free(t->sent);
    free(t->received);
    free(t);
}

/* adding shows a second delivery */
static void deliver_add(void *target, const void *payload, size_t length, void *argument)
{
    uint8_t *to = target;
    const uint8_t *from = payload;
    (void)argument;
    for (size_t i = 0; i < length; i++)
        to[i] = (uint8_t)(to[i] + from[i]);
}

static void on_completion(struct network_host *host, const struct cl_completion *completion)
{
    struct end *end = completion->context;
    struct network *network = host->argument;
    CHECK(!end->done);
    *end = (struct end){.done = true, .status = completion->status, .at_us = network_now_us(network)};
    for (uint32_t i = 0; i < completion->missing_count && i < RANGES_MAX; i++)
        end->missing[end->count++] = completion->missing[i];
}

static void post_send(struct transfer *t)
{
    CHECK_EQ(cl_endpoint_post_bounded_send(t->network->hosts[t->from].endpoint, (uint16_t)t->to, t->id, t->sent,
                                           t->length, &t->qos, network_now_us(t->network), &t->sender),
             CL_OK);
    network_wake(t->network, t->from, t->network->now_ns);
}

static void post_receive(struct transfer *t)
{
    struct cl_sink sink = {.target = t->received, .deliver = deliver_add};
    CHECK_EQ(cl_endpoint_post_bounded_receive(t->network->hosts[t->to].endpoint, (uint16_t)t->from, t->id, sink,
                                              t->length, &t->qos, network_now_us(t->network), &t->receiver),
             CL_OK);
    network_wake(t->network, t->to, t->network->now_ns);
}

static struct network *open_network(uint32_t hosts, uint16_t paths, double mbit_per_s, size_t stash, uint64_t seed)
{
    struct network *network = network_new(hosts, paths, mbit_per_s, 150, stash, seed);
    for (uint32_t i = 0; i < hosts; i++) {
        network->hosts[i].on_completion = on_completion;
        network->hosts[i].argument = network;
    }
    return network;
}

static bool run_until_done(struct transfer *const *transfers, uint32_t count, uint64_t limit_us)
{
    struct network *network = transfers[0]->network;
    uint64_t until_us = network_now_us(network) + limit_us;
    for (;;) {
        bool all = true;
        for (uint32_t i = 0; i < count; i++)
            all = all && transfers[i]->sender.done && transfers[i]->receiver.done;
        if (all || !network_step(network, until_us))
            return all;
    }
}

/* Returns how many packets are missing, after checking everything that must hold of a message that ended well. */
static uint32_t check_ended(const struct transfer *t)
{
    const struct end *a = &t->sender, *b = &t->receiver;
    CHECK(a->done && b->done);
    CHECK_EQ(a->status, CL_OK);
    CHECK_EQ(b->status, CL_OK);
    CHECK_EQ(a->count, b->count);
    CHECK(a->count != b->count || memcmp(a->missing, b->missing, a->count * sizeof(*a->missing)) == 0);
    uint32_t packets = (t->length + PAYLOAD - 1) / PAYLOAD, missing = 0;
    uint64_t counted_to = 0;
    bool intact = true;
    for (uint32_t i = 0; i < b->count; i++) {
        const struct cl_range *range = &b->missing[i];
        CHECK(range->start < range->end && range->end <= t->length && range->start % PAYLOAD == 0);
        missing += (uint32_t)((range->end - range->start + PAYLOAD - 1) / PAYLOAD);
        intact = intact && memcmp(t->sent + counted_to, t->received + counted_to, range->start - counted_to) == 0;
        for (uint64_t at = range->start; at < range->end; at++)
            intact = intact && t->received[at] == 0;
        counted_to = range->end;
    }
    intact = intact && memcmp(t->sent + counted_to, t->received + counted_to, t->length - counted_to) == 0;
    CHECK(intact);
    CHECK(missing <= (uint64_t)packets * t->qos.loss_ppm / 1000000);
    return missing;
}

static struct cl_qos bound(uint32_t loss_ppm)
{
    return (struct cl_qos){.loss_ppm = loss_ppm};
}

/* `count` messages from each host to each other; returns how many packets are missing in all. */
static uint32_t exchange(struct network *network, uint32_t count, uint32_t length, struct cl_qos qos)
{
    enum { TRANSFERS_MAX = 512 };
    static struct transfer *transfers[TRANSFERS_MAX];
    uint32_t made = 0, missing = 0;
    for (uint32_t from = 0; from < network->host_count; from++)
        for (uint32_t to = 0; to < network->host_count; to++)
            for (uint32_t index = 0; from != to && index < count; index++)
                transfers[made++] = make(network, from, to, index, length + index, qos);
    for (uint32_t i = 0; i < made; i++) {
        post_send(transfers[i]);
        post_receive(transfers[i]);
    }
    CHECK(run_until_done(transfers, made, 20 * SECOND_US));
    network_run_until(network, network_now_us(network) + SECOND_US);
    for (uint32_t i = 0; i < made; i++) {
        missing += check_ended(transfers[i]);
        drop(transfers[i]);
    }
    for (uint32_t i = 0; i < network->host_count; i++)
        for (uint16_t peer = 0; peer < network->host_count; peer++)
            CHECK(peer == i || network->hosts[i].dead ||
                  !network->hosts[i].endpoint->peers[peer]->stops.first); /* nothing is kept */
    return missing;
}

static const struct cl_endpoint_stats *stats(const struct network *network, uint32_t host)
{
    return cl_endpoint_stats(network->hosts[host].endpoint);
}

static void test_clean_network_is_exact(void)
{
    static const uint32_t BOUNDS[] = {10000, 500000};
    for (size_t i = 0; i < 2; i++) {
        struct network *reliable = open_network(3, 1, 1000, STASH, 1), *network = open_network(3, 1, 1000, STASH, 1);
        CHECK_EQ(exchange(reliable, 5, 300000, bound(0)), 0);
        CHECK_EQ(exchange(network, 5, 300000, bound(BOUNDS[i])), 0);
        CHECK_EQ(network->packets, reliable->packets); /* no PROBE, no STOP */
        CHECK_EQ(stats(network, 0)->packets_retransmitted, 0);
        CHECK_EQ(stats(network, 0)->messages_stopped, 0);
        network_free(network);
        network_free(reliable);
    }
}

/* Several paths, hosts that sleep: nothing is lost, so nothing may be missing. */
static void test_clean_but_rough(void)
{
    struct network *network = open_network(3, 2, 200, STASH, 2);
    for (uint32_t i = 0; i < 3; i++) {
        network_set_link(&network->egress[i][1], 50, 1000);
        network_set_link(&network->ingress[i][0], 200, 1000);
        network_set_link(&network->ingress[i][1], 200, 1000);
    }
    network->sleep_ns = 2000000;
    CHECK_EQ(exchange(network, 6, 300000, bound(100000)), 0);
    CHECK_EQ(network->drops_full, 0);
    network_free(network);
}

static void test_losses(void)
{
    static const double LOSSES[] = {0.01, 0.05, 0.3};
    static const uint32_t BOUNDS[] = {1000, 10000, 100000, 500000};
    for (uint64_t seed = 0; seed < 3; seed++)
        for (size_t l = 0; l < 3; l++)
            for (size_t b = 0; b < 4; b++) {
                struct network *network = open_network(3, 1 + seed % 2, 500, STASH, 40 + seed);
                network->loss = LOSSES[l];
                uint32_t missing = exchange(network, 4, 250000, bound(BOUNDS[b]));
                CHECK((missing > 0) == (BOUNDS[b] >= 10000)); /* 175 packets: 0.1 % of them is none */
                network_free(network);
            }
}

static void test_everything_at_once(void)
{
    for (uint64_t i = 0; i <= 20; i++) {
        uint64_t seed = i < 20 ? i : 1245; /* which once hung: the first packet to a wary receiver was given up */
        struct network *network = open_network(3, 1 + seed % 2, 200, seed % 3 ? STASH : 60000, 100 + seed);
        network->loss = 0.03;
        network->reordering = 0.1;
        network->reordering_ns = 2000000;
        network->duplication = 0.1;
        network->sleep_ns = seed % 4 ? 0 : 3000000;
        exchange(network, 5, 150000, bound(50000));
        network_free(network);
    }
}

/* The network keeps a part of the packets back until long after their messages were ended without them. */
static void test_late_packets_are_not_counted(void)
{
    struct network *network = open_network(2, 1, 1000, STASH, 5);
    network->reordering = 0.02;
    network->reordering_ns = 100000000;
    CHECK(exchange(network, 10, 300000, bound(100000)) > 0);
    CHECK(stats(network, 0)->packets_late > 0);
    network_free(network);
}

static void test_small_messages_lose_nothing(void)
{
    struct network *network = open_network(3, 1, 1000, STASH, 6);
    network->loss = 0.2;
    CHECK_EQ(exchange(network, 20, 9 * PAYLOAD - 30, bound(100000)), 0); /* 9 packets */
    network_free(network);
}

static void test_long_messages(void)
{
    for (uint64_t seed = 0; seed < 6; seed++) { /* three STOP packets each, and many of them lost */
        struct network *network = open_network(2, 1, 0, STASH, seed);
        network->loss = 0.3;
        CHECK(exchange(network, 1, 7500 * PAYLOAD, bound(400000)) > 0);
        network_free(network);
    }
}

/* ---- losses by choice ---- */

struct choice {
    uint32_t first, last; /* packets of DATA that are lost on their first transmission */
    bool every_time;
    bool lost[1024]; /* once */
    uint64_t delay_ns;
    uint64_t late_ns;          /* not 0: they are not lost but come then, all at once */
    uint64_t control_until_us; /* PROBE and STOP are lost until then */
    uint32_t probes, stops;
};

/* What was about to be sent arrives at this time. */
static void put_off(struct network *network, const struct cl_datagram *datagram, uint64_t at_ns)
{
    struct network_packet *late = network_packet_new(network);
    late->event = AT_INGRESS;
    late->to = datagram->peer;
    late->path = datagram->path;
    late->length = datagram->head_length + datagram->payload_length;
    memcpy(late->bytes, datagram->head, datagram->head_length);
    memcpy(late->bytes + datagram->head_length, datagram->payload, datagram->payload_length);
    network_schedule(network, late, at_ns);
}

static bool by_choice(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    struct choice *choice = network->argument;
    struct cl_packet packet;
    (void)from;
    uint8_t bytes[CL_PACKET_HEAD_BYTES];
    memcpy(bytes, datagram->head, sizeof(bytes));
    cl_store_u16(bytes + 6, 0);
    CHECK(cl_packet_decode(&packet, bytes, sizeof(bytes)));
    if (packet.kind == CL_PACKET_DATA) {
        uint32_t number = packet.offset / PAYLOAD;
        bool lost = number >= choice->first && number < choice->last && (choice->every_time || !choice->lost[number]);
        choice->lost[number] |= lost;
        if (lost && choice->late_ns)
            put_off(network, datagram, choice->late_ns > network->now_ns ? choice->late_ns : network->now_ns);
        return lost;
    }
    choice->probes += packet.kind == CL_PACKET_PROBE;
    choice->stops += packet.kind == CL_PACKET_STOP;
    return (packet.kind == CL_PACKET_PROBE || packet.kind == CL_PACKET_STOP) &&
           network_now_us(network) < choice->control_until_us;
}

static uint64_t lose(struct choice *choice, uint32_t packets, struct cl_qos qos, uint32_t expected)
{
    struct network *network = open_network(2, 1, 1000, STASH, 8);
    network->delay_ns += choice->delay_ns;
    network_run_until(network, network_now_us(network) + SECOND_US);
    network->drops = by_choice;
    network->argument = choice;
    choice->control_until_us += network_now_us(network);
    choice->late_ns += choice->late_ns ? network->now_ns : 0;
    struct transfer *t = make(network, 0, 1, 0, packets * PAYLOAD - 8, qos);
    uint64_t start_us = network_now_us(network);
    post_send(t);
    post_receive(t);
    CHECK(run_until_done(&t, 1, 10 * SECOND_US));
    uint32_t missing = check_ended(t);
    CHECK_EQ(missing, expected);
    CHECK(t->sender.at_us <= start_us + 5 * SECOND_US);
    uint64_t took_us = t->receiver.at_us - start_us;
    drop(t);
    network_free(network);
    return took_us;
}

/* One way takes 20 ms: a round trip more would show. */
static void test_no_round_trip_for_what_is_within_the_bound(void)
{
    struct choice none = {.delay_ns = 20000000}, some = {.first = 990, .last = 995, .delay_ns = 20000000}, same = some;
    uint64_t clean_us = lose(&none, 1000, bound(0), 0);
    CHECK(lose(&some, 1000, bound(10000), 5) < clean_us + 40000 / 4 + 2000); /* a quarter of it, for reordering */
    CHECK(lose(&same, 1000, bound(0), 0) > clean_us + 40000);
}

static void test_the_last_packets_are_lost(void)
{
    struct choice one = {.first = 99, .last = 100}, many = {.first = 90, .last = 100},
                  most = {.first = 50, .last = 100};
    CHECK(lose(&one, 100, bound(100000), 1) < 20000);
    CHECK(one.probes > 0);
    CHECK(lose(&many, 100, bound(100000), 10) < 20000);
    CHECK(lose(&most, 100, bound(100000), 10) < 60000); /* 40 of them are sent again */
}

static void test_everything_is_lost(void)
{
    struct choice all = {.first = 0, .last = 100};
    CHECK(lose(&all, 100, bound(500000), 50) < 100000);
}

static void test_all_control_packets_are_lost(void)
{
    struct choice stop = {.first = 10, .last = 15, .control_until_us = 300000};
    CHECK(lose(&stop, 100, bound(100000), 5) < 20000); /* the receiver needs none */
    CHECK(stop.stops > 1);
    struct choice probe = {.first = 95, .last = 100, .control_until_us = 300000};
    lose(&probe, 100, bound(100000), 5);
    CHECK(probe.probes > 1);
}

/* More packets than the loss detection remembers come after all, and complete the message: only the receiver can tell.
 * Either it has the PROBE by then, or gets it when the message is over. */
static void test_what_was_given_up_arrives_late(void)
{
    struct choice before = {.first = 40, .last = 100, .late_ns = 30000000, .every_time = true};
    lose(&before, 100, bound(400000), 0);
    struct choice after = {
        .first = 40, .last = 100, .late_ns = 30000000, .every_time = true, .control_until_us = 200000};
    lose(&after, 100, bound(500000), 0);
    CHECK(after.probes > 0);
}

/* Every tenth packet is lost, and the others take a millisecond longer than control packets. */
static bool slowly(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)from;
    if (datagram->payload_length == 0)
        return false;
    if (cl_load_u32(datagram->head + 20) / PAYLOAD % 10 != 3)
        put_off(network, datagram, network->now_ns + 1000000);
    return true;
}

static void test_a_probe_overtakes_its_message(void)
{
    struct network *network = open_network(2, 1, 1000, STASH, 8);
    network_run_until(network, network_now_us(network) + SECOND_US);
    network->drops = slowly;
    struct transfer *t = make(network, 0, 1, 0, 10 * PAYLOAD, (struct cl_qos){.loss_ppm = 200000, .protect_first = 1});
    post_send(t); /* the receiver knows nothing of it when the PROBE comes */
    network_run_until(network, network_now_us(network) + 20000);
    post_receive(t);
    CHECK(run_until_done(&t, 1, SECOND_US));
    CHECK_EQ(check_ended(t), 1);
    drop(t);
    network_free(network);
}

/* The sender falls silent with most of the message sent, and wakes up later. When the receive ended, 0: not before. */
static uint64_t outlast(struct cl_qos qos)
{
    struct network *network = open_network(2, 1, 100, STASH, 9);
    qos.loss_ppm = 500000;
    qos.deadline_us = 60000;
    struct transfer *t = make(network, 0, 1, 0, 600 * PAYLOAD, qos);
    uint64_t start_us = network_now_us(network);
    post_send(t);
    post_receive(t);
    network_run_until(network, start_us + 40000);
    network->hosts[0].dead = true;
    network_run_until(network, start_us + SECOND_US);
    uint64_t ended_us = t->receiver.done ? t->receiver.at_us - start_us : 0;
    CHECK(!t->sender.done);
    network->hosts[0].dead = false;
    network->hosts[0].run_ns = UINT64_MAX;
    network_wake(network, 0, network->now_ns);
    CHECK(run_until_done(&t, 1, SECOND_US));
    CHECK_EQ(check_ended(t) > 0, ended_us > 0);
    drop(t);
    network_free(network);
    return ended_us;
}

static void test_deadline(void)
{
    uint64_t plain_us = outlast((struct cl_qos){0});
    CHECK(plain_us >= 60000 && plain_us < 70000);
    /* Protected packets that are there already do not hold it up; one that is not, does. */
    CHECK_EQ(outlast((struct cl_qos){.protect_first = 2}), plain_us);
    CHECK_EQ(outlast((struct cl_qos){.protect_last = 1}), 0);
    /* A deadline is no reason to exceed the bound ... */
    struct choice more = {.first = 60, .last = 100};
    CHECK(lose(&more, 100, (struct cl_qos){.loss_ppm = 100000, .deadline_us = 1000}, 10) < 60000);
    /* ... nor to end a message whose packets come steadily, however late. */
    struct network *network = open_network(2, 1, 10, STASH, 9);
    struct transfer *t =
        make(network, 0, 1, 0, 200 * PAYLOAD, (struct cl_qos){.loss_ppm = 500000, .deadline_us = 1000});
    post_send(t);
    post_receive(t);
    CHECK(run_until_done(&t, 1, 5 * SECOND_US));
    CHECK_EQ(check_ended(t), 0);
    drop(t);
    network_free(network);
}

static void test_protected_packets_arrive(void)
{
    uint64_t map[4] = {0x00FF00000000F000u, 0, 0x10, 0};
    for (uint64_t seed = 0; seed < 10; seed++) {
        struct network *network = open_network(2, 1 + seed % 2, 500, STASH, 200 + seed);
        network->loss = 0.3;
        struct cl_qos qos = {.loss_ppm = 400000,
                             .deadline_us = seed % 2 ? 2000 : 0,
                             .protect_first = 2,
                             .protect_last = 1,
                             .protect = map,
                             .protect_bytes = 2048,
                             .protect_offset = 1024};
        struct transfer *t = make(network, 0, 1, 0, 200 * PAYLOAD, qos);
        post_send(t);
        post_receive(t);
        CHECK(run_until_done(&t, 1, 5 * SECOND_US));
        CHECK(check_ended(t) > 0);
        for (uint32_t i = 0; i < t->receiver.count; i++)
            for (uint64_t at = t->receiver.missing[i].start; at < t->receiver.missing[i].end; at++) {
                uint64_t bit = (at + 1024) / 2048;
                CHECK(!(map[bit / 64] >> (bit % 64) & 1));
                CHECK(at >= 2 * PAYLOAD && at < 199 * PAYLOAD);
            }
        drop(t);
        network_free(network);
    }
}

static void test_more_is_protected_than_the_bound_leaves(void)
{
    uint64_t all[4] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    struct choice choice = {.first = 20, .last = 40};
    lose(&choice, 100, (struct cl_qos){.loss_ppm = 500000, .protect = all, .protect_bytes = PAYLOAD}, 0);
}

/* Nothing of a message fits into the stash: it is refused, sent again, and must not be cut off meanwhile. */
static void test_a_late_receiver_loses_nothing(void)
{
    static const size_t STASHES[] = {0, 30000, 200000};
    for (size_t i = 0; i < 3; i++)
        for (uint32_t late_us = 1; late_us < 100000; late_us *= 7) {
            struct network *network = open_network(2, 1, 100, STASHES[i], 11);
            struct transfer *t = make(network, 0, 1, 0, 100 * PAYLOAD, bound(500000));
            post_send(t);
            network_run_until(network, network_now_us(network) + late_us);
            post_receive(t);
            CHECK(run_until_done(&t, 1, 5 * SECOND_US));
            CHECK_EQ(check_ended(t), 0);
            drop(t);
            network_free(network);
        }
}

/* The receive is posted at any moment of the arrival, between a TAIL and what was refused before it, too. */
static void test_a_receive_posted_in_between(void)
{
    for (uint32_t late_us = 100; late_us < 4500; late_us += 40)
        for (size_t lossy = 0; lossy < 2; lossy++) {
            struct network *network = open_network(2, 1, 100, late_us % 3 ? 0 : 20000, 17 + late_us);
            network->loss = lossy ? 0.3 : 0;
            struct transfer *t = make(network, 0, 1, 0, 30 * PAYLOAD, bound(500000));
            post_send(t);
            network_run_until(network, network_now_us(network) + late_us);
            post_receive(t);
            CHECK(run_until_done(&t, 1, 10 * SECOND_US));
            uint32_t missing = check_ended(t);
            CHECK(lossy || missing == 0);
            drop(t);
            network_free(network);
        }
}

static void test_a_path_dies(void)
{
    struct network *network = open_network(2, 2, 200, STASH, 13);
    network_run_until(network, network_now_us(network) + 100000);
    struct transfer *t = make(network, 0, 1, 0, 1000 * PAYLOAD, bound(100000));
    post_send(t);
    post_receive(t);
    network_run_until(network, network_now_us(network) + 10000);
    network->egress[0][1].dead = network->ingress[0][1].dead = true;
    CHECK(run_until_done(&t, 1, 5 * SECOND_US));
    CHECK(check_ended(t) > 0);
    drop(t);
    network_free(network);
}

static void test_bounds_that_differ(void)
{
    static const uint32_t PAIRS[][2] = {{100000, 0}, {100000, 200000}, {200000, 100000}};
    for (size_t i = 0; i < 3; i++) {
        struct network *network = open_network(2, 1, 1000, STASH, 14);
        network->loss = 0.3;
        struct transfer *t = make(network, 0, 1, 0, 200 * PAYLOAD, bound(PAIRS[i][0]));
        post_send(t);
        t->qos = bound(PAIRS[i][1]);
        post_receive(t);
        CHECK(run_until_done(&t, 1, 5 * SECOND_US));
        CHECK(t->sender.status == CL_EMISMATCH || t->receiver.status == CL_EMISMATCH);
        drop(t);
        network_free(network);
    }
}

static void test_what_is_refused(void)
{
    struct network *network = open_network(2, 1, 1000, STASH, 15);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    struct cl_message_id id = {9, 1, 0};
    uint64_t map = 0;
    uint8_t byte = 0;
    struct cl_qos too_much = {.loss_ppm = CL_LOSS_PPM_MAX + 1}, no_grain = {.loss_ppm = 1, .protect = &map},
                  class_8 = {.priority = 8};
    const struct cl_qos *const BAD[] = {&too_much, &no_grain, &class_8};
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(cl_endpoint_post_bounded_send(endpoint, 1, id, &byte, 1, BAD[i], 0, NULL), CL_EINVAL);
        CHECK_EQ(
            cl_endpoint_post_bounded_receive(endpoint, 1, id, (struct cl_sink){.target = &byte}, 1, BAD[i], 0, NULL),
            CL_EINVAL);
    }
    network_free(network);
}

/* A peer that ends in the middle takes its messages with it, and nothing is left behind for the sanitizer. */
static void test_peers_and_groups_go(void)
{
    struct network *network = open_network(3, 1, 100, STASH, 16);
    network->loss = 0.1;
    struct transfer *t = make(network, 0, 1, 0, 500 * PAYLOAD, bound(200000));
    struct transfer *u = make(network, 2, 1, 0, 500 * PAYLOAD, (struct cl_qos){.loss_ppm = 1000, .deadline_us = 10});
    post_send(t);
    post_receive(t);
    post_send(u);
    post_receive(u);
    network_run_until(network, network_now_us(network) + 20000);
    cl_endpoint_peer_lost(network->hosts[1].endpoint, 0);
    cl_endpoint_cancel(network->hosts[1].endpoint, 9, UINT32_MAX);
    network_run_until(network, network_now_us(network) + SECOND_US);
    drop(t);
    drop(u);
    network_free(network);
}

/* The last tenth is lost, and before the sender says so the receiver's group has failed, or closed. */
static void test_a_probe_for_a_group_that_is_gone(void)
{
    for (int failed = 0; failed < 2; failed++) {
        struct choice choice = {.first = 90, .last = 100, .every_time = true};
        struct network *network = open_network(2, 1, 1000, STASH, 8);
        network->delay_ns = 20000000;
        network_run_until(network, network_now_us(network) + SECOND_US);
        network->drops = by_choice;
        network->argument = &choice;
        struct transfer *t = make(network, 0, 1, 0, 100 * PAYLOAD, bound(100000));
        post_send(t);
        post_receive(t);
        network_run_until(network, network_now_us(network) + 30000);
        CHECK(!t->receiver.done && !t->sender.done && !choice.probes);
        if (failed) /* which nobody is told */
            cl_endpoint_abort(network->hosts[1].endpoint, 9, NULL, 0, CL_ETIMEDOUT, UINT16_MAX,
                              network_now_us(network));
        else
            cl_endpoint_cancel(network->hosts[1].endpoint, 9, UINT32_MAX);
        network_run_until(network, network_now_us(network) + 2 * SECOND_US);
        CHECK(failed || choice.probes > 0); /* there the answer to data may come first */
        CHECK(t->sender.done);
        CHECK_EQ(t->sender.status, failed ? CL_EABORTED : CL_OK); /* as with data for such groups */
        CHECK_EQ(t->sender.count, 0);
        CHECK_EQ(t->receiver.done, failed);
        drop(t);
        network_free(network);
    }
}

/* With small datagrams a message is told about in several STOP packets, none of them longer than the others. */
static void test_no_datagram_is_too_long(void)
{
    enum { BYTES = 200, SMALL_PAYLOAD = BYTES - CL_PACKET_HEAD_BYTES, PACKETS = 3000 };
    struct cl_endpoint *endpoints[2];
    struct cl_datagram batch[32];
    struct cl_completion completion;
    struct end ends[2] = {0};
    static uint8_t data[PACKETS * SMALL_PAYLOAD], target[PACKETS * SMALL_PAYLOAD], bytes[2 * BYTES + CL_HEAD_BYTES_MAX];
    uint32_t sent = 0, stops = 0;
    for (uint16_t self = 0; self < 2; self++) {
        struct cl_endpoint_config config = {
            .self = self, .epoch = 1, .datagram_bytes = BYTES, .stash_limit_bytes = STASH, .congestion = "delay"};
        CHECK_EQ(cl_endpoint_create(&config, &endpoints[self]), CL_OK);
        CHECK_EQ(cl_endpoint_add_peer(endpoints[self], !self, 1), CL_OK);
    }
    struct cl_qos qos = bound(200000);
    struct cl_message_id id = {9, 1, 0};
    cl_endpoint_post_bounded_send(endpoints[0], 1, id, data, sizeof data, &qos, 1, &ends[0]);
    cl_endpoint_post_bounded_receive(endpoints[1], 0, id, (struct cl_sink){.target = target}, sizeof data, &qos, 1,
                                     &ends[1]);
    for (uint64_t now_us = 100; now_us < 5 * SECOND_US && !(ends[0].done && ends[1].done); now_us += 100)
        for (int self = 0; self < 2; self++) {
            cl_endpoint_timeout(endpoints[self], now_us);
            size_t count = cl_endpoint_send(endpoints[self], now_us, batch, 32);
            for (size_t i = 0; i < count; i++) {
                struct cl_packet packet;
                size_t length = batch[i].head_length + batch[i].payload_length;
                CHECK(length <= BYTES);
                memcpy(bytes, batch[i].head, batch[i].head_length);
                if (batch[i].payload_length > 0)
                    memcpy(bytes + batch[i].head_length, batch[i].payload, batch[i].payload_length);
                CHECK(cl_packet_decode(&packet, bytes, length));
                stops += packet.kind == CL_PACKET_STOP;
                if (packet.kind != CL_PACKET_DATA || ++sent % 20)
                    cl_endpoint_receive(endpoints[!self], bytes, length, false, now_us, now_us);
            }
            while (cl_endpoint_next_completion(endpoints[self], &completion)) {
                struct end *end = completion.context;
                *end = (struct end){.done = true, .status = completion.status, .count = completion.missing_count};
            }
        }
    CHECK(ends[0].done && ends[1].done);
    CHECK_EQ(ends[0].status, CL_OK);
    CHECK_EQ(ends[0].count, ends[1].count);
    CHECK(ends[0].count > 100);
    CHECK(stops >= 3);
    for (int self = 0; self < 2; self++)
        cl_endpoint_destroy(endpoints[self]);
}

int main(void)
{
    RUN(test_clean_network_is_exact);
    RUN(test_clean_but_rough);
    RUN(test_losses);
    RUN(test_everything_at_once);
    RUN(test_late_packets_are_not_counted);
    RUN(test_small_messages_lose_nothing);
    RUN(test_long_messages);
    RUN(test_no_round_trip_for_what_is_within_the_bound);
    RUN(test_the_last_packets_are_lost);
    RUN(test_everything_is_lost);
    RUN(test_all_control_packets_are_lost);
    RUN(test_a_probe_overtakes_its_message);
    RUN(test_deadline);
    RUN(test_protected_packets_arrive);
    RUN(test_more_is_protected_than_the_bound_leaves);
    RUN(test_a_late_receiver_loses_nothing);
    RUN(test_a_receive_posted_in_between);
    RUN(test_what_was_given_up_arrives_late);
    RUN(test_a_path_dies);
    RUN(test_bounds_that_differ);
    RUN(test_what_is_refused);
    RUN(test_peers_and_groups_go);
    RUN(test_a_probe_for_a_group_that_is_gone);
    RUN(test_no_datagram_is_too_long);
    return CHECK_REPORT();
}
