/* Neighbours by themselves, and their purpose: ranks of a host that share its interface, in virtual time, alone and
 * beside TCP. */
#include "congestion/neighbours.h"

#include "congestion/congestion.h"
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "tests/check.h"
#include "tests/network.h"
#include "tests/tcp.h"

enum { EVERY_US = 1000, LAST = CL_CLASSES_BETWEEN_HOSTS - 1 };

static const double CAPACITY = 1e8;

static uint64_t bytes_of(const struct cl_neighbours *neighbours, uint32_t neighbour)
{
    return neighbours->list[neighbour].told.bytes[LAST];
}

/* Returns the news. */
static uint64_t hear(struct cl_neighbours *neighbours, uint32_t neighbour, uint64_t bytes, uint64_t now_us)
{
    struct cl_told told = {0}, news;
    told.bytes[LAST] = bytes;
    cl_neighbours_hear(neighbours, neighbour, &told, &news, now_us);
    return news.bytes[LAST];
}

/* Tells of some time in which the neighbours send at these rates, in bytes per second. Returns its end. */
static uint64_t pass(struct cl_neighbours *neighbours, const double *rates, uint32_t count, uint64_t from_us)
{
    enum { ROUNDS = 20 };
    uint64_t now_us = from_us;
    for (int i = 0; i < ROUNDS; i++) {
        now_us += EVERY_US;
        for (uint32_t j = 0; j < count; j++) {
            uint64_t more = (uint64_t)(rates[j] * EVERY_US / 1e6);
            CHECK_EQ(hear(neighbours, j, bytes_of(neighbours, j) + more, now_us), more);
        }
        cl_neighbours_judge(neighbours, CAPACITY, EVERY_US, now_us);
    }
    return now_us;
}

/* A part of the interface. */
static double share(const struct cl_neighbours *neighbours)
{
    return cl_neighbours_leave(neighbours, CAPACITY) / CAPACITY;
}

static bool about(double is, double should)
{
    return is > 0.99 * should && is < 1.01 * should;
}

TEST(test_shares)
{
    static const struct {
        double rates[3], share, spare;
    } CASES[] = {
        {{0, 0, 0}, 1, 1},                           /* nobody sends */
        {{50e6, 0, 0}, 0.5, 0.5},                    /* it would take more */
        {{40e6, 0, 0}, 0.5, 0.5},                    /* it uses its share, as far as one can measure */
        {{30e6, 0, 0}, 0.7, 0.5},                    /* it does not */
        {{1e6, 0, 0}, 0.99, 1},                      /* acknowledgements: it does not count */
        {{25e6, 25e6, 25e6}, 0.25, 0.25},            /* all want more */
        {{1e6, 33e6, 33e6}, 0.99 / 3, 1.0 / 3},      /* what the first one takes is small */
        {{10e6, 30e6, 30e6}, 0.25 + 0.15 / 3, 0.25}, /* what it leaves is for three */
        {{1e6, 1e6, 1e6}, 0.97, 1},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        struct cl_neighbours neighbours;
        cl_neighbours_init(&neighbours);
        for (uint32_t j = 0; j < 3; j++) /* what they sent before does not count */
            CHECK_EQ(hear(&neighbours, j, 5000000 * (3 - j), 1000000), 0);
        CHECK(share(&neighbours) == 1);
        uint64_t now_us = pass(&neighbours, CASES[i].rates, 3, 1000000);
        CHECK(about(share(&neighbours), CASES[i].share));
        CHECK(about(cl_neighbours_spare(&neighbours), CASES[i].spare));
        now_us = pass(&neighbours, (double[]){0, 0, 0}, 3, now_us);
        now_us = pass(&neighbours, (double[]){0, 0, 0}, 3, now_us);
        CHECK(share(&neighbours) == 1); /* they have stopped */
    }
}

/* One that begins has its share at once, before its rate is known, and room for its burst a while after its end. */
TEST(test_one_begins)
{
    struct cl_neighbours neighbours;
    cl_neighbours_init(&neighbours);
    hear(&neighbours, 0, 1, 1000000);
    CHECK(cl_neighbours_spare(&neighbours) == 1);
    hear(&neighbours, 0, 500, 1000001); /* an acknowledgement */
    CHECK(share(&neighbours) == 1);
    hear(&neighbours, 0, 20000, 1000002);
    CHECK(share(&neighbours) == 0.5);
    uint64_t now_us = pass(&neighbours, (double[]){10e6}, 1, 1000002);
    CHECK(about(share(&neighbours), 0.9) && cl_neighbours_spare(&neighbours) == 0.5);
    for (int i = 0; i < 10; i++)
        now_us = pass(&neighbours, (double[]){0}, 1, now_us);
    CHECK(share(&neighbours) == 1 && cl_neighbours_spare(&neighbours) == 0.5);
    hear(&neighbours, 0, bytes_of(&neighbours, 0) + 20000, now_us + 1);
    CHECK(share(&neighbours) == 0.5);
    for (int i = 0; i < 60; i++)
        now_us = pass(&neighbours, (double[]){0}, 1, now_us);
    CHECK(cl_neighbours_spare(&neighbours) == 1);
}

/* One that sends little all the time begins once, and not again in each long judgement. */
TEST(test_small_rates_and_long_judgements)
{
    enum { LONG_US = 8000 };
    struct cl_neighbours neighbours;
    cl_neighbours_init(&neighbours);
    hear(&neighbours, 0, 0, 1000000);
    cl_neighbours_judge(&neighbours, CAPACITY, LONG_US, 1000000);
    for (uint64_t now_us = 1000500; now_us < 1200000; now_us += 500) {
        hear(&neighbours, 0, bytes_of(&neighbours, 0) + 1000, now_us); /* 2 % of the link */
        cl_neighbours_judge(&neighbours, CAPACITY, LONG_US, now_us);
        CHECK(now_us < 1100000 || share(&neighbours) > 0.97);
    }
}

/* Those that begin late in a judgement's time have not sent less than their share. */
TEST(test_two_begin_late_in_a_judgement)
{
    enum { LONG_US = 8000 };
    struct cl_neighbours neighbours;
    cl_neighbours_init(&neighbours);
    for (uint32_t i = 0; i < 2; i++)
        hear(&neighbours, i, 0, 1000000);
    cl_neighbours_judge(&neighbours, CAPACITY, LONG_US, 1000000);
    for (uint64_t now_us = 1006500; now_us < 1100000; now_us += 500) {
        for (uint32_t i = 0; i < 2; i++)
            hear(&neighbours, i, bytes_of(&neighbours, i) + 20000, now_us); /* more than a third each */
        cl_neighbours_judge(&neighbours, CAPACITY, LONG_US, now_us);
        CHECK(share(&neighbours) < 0.4);
    }
}

/* Others that begin again and again do not stop the judgement. */
TEST(test_others_come_and_go)
{
    struct cl_neighbours neighbours;
    cl_neighbours_init(&neighbours);
    uint64_t now_us = 1000000;
    for (uint32_t i = 0; i < 32; i++)
        hear(&neighbours, i, 0, now_us);
    uint32_t judged = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        now_us += 100;
        for (uint32_t j = 0; j < 32; j++)
            hear(&neighbours, j, bytes_of(&neighbours, j) + (i % 320 / 10 == j ? 7000 : 0), now_us);
        uint64_t before_us = neighbours.judged_us;
        cl_neighbours_judge(&neighbours, CAPACITY, EVERY_US, now_us);
        judged += neighbours.judged_us != before_us;
    }
    CHECK(judged > 90);
}

/* Another process has the number now, or it was not heard for a while: what it sent before does not count. */
TEST(test_bytes_of_another_time)
{
    struct cl_neighbours neighbours;
    cl_neighbours_init(&neighbours);
    hear(&neighbours, 0, 1000, 1);
    CHECK_EQ(hear(&neighbours, 0, 10, 2), 0);
    CHECK_EQ(hear(&neighbours, 0, 15, 3), 5);
    CHECK_EQ(hear(&neighbours, 0, 1000000000, 100000), 0); /* this process slept, or the other one is new */
    CHECK(share(&neighbours) == 1);
    CHECK_EQ(hear(&neighbours, 0, 1000000007, 100001), 7);
    CHECK_EQ(hear(&neighbours, 2, 1000000, 100001), 0);
    CHECK_EQ(hear(&neighbours, 1, 1000000, 100001), 0);       /* a lower number that is new */
    CHECK_EQ(hear(&neighbours, CL_NEIGHBOURS_MAX, 15, 3), 0); /* there is no such number */
}

/* ---- whole endpoints ---- */

enum { RANKS_MOST = 8, MIB = 1 << 20, MESSAGE_BYTES = 8 * MIB, WIRE_BYTES = 1514, PAYLOAD_BYTES = 1432 };

static uint8_t data[MESSAGE_BYTES], target[MESSAGE_BYTES];

/* Two hosts. Rank i of the first one sends to rank i of the second one. */
static struct network *pair(uint32_t ranks, double mbit, uint64_t delay_us, uint64_t seed)
{
    struct network *network = network_new(2 * ranks, 1, mbit, 256, 64 << 20, seed);
    network->ranks = ranks;
    network_set_delay(network, delay_us);
    return network;
}

static void post(struct network *network, uint32_t rank, uint32_t number)
{
    uint16_t from = (uint16_t)rank, to = (uint16_t)(network->ranks + rank);
    network_post(network,
                 (struct network_message){from, to, {1, number, 0}, data, target, MESSAGE_BYTES, {.priority = 4}});
}

static bool is_contested(const struct network *network, uint32_t rank)
{
    const struct cl_peer *peer = network->hosts[rank].endpoint->peers.list[network->ranks + rank];
    return cl_congestion_is_contested(&peer->paths[0].congestion);
}

/* They meet one after the other, while no queue is there. */
static void meet(struct network *network)
{
    for (uint32_t i = 0; i < network->ranks; i++) {
        cl_endpoint_ping(network->hosts[i].endpoint, (uint16_t)(network->ranks + i));
        network_wake(network, i);
        network_run_until(network, network_now_us(network) + 100000);
    }
}

struct place {
    double mbit;
    uint64_t delay_us, sleep_us;
    double most; /* times the ideal time */
};

/* One message per rank, all at the same time, or the last rank's so much later. Returns how often as long they take
 * from then on as the link needs for what is left. */
static double times_ideal(uint32_t ranks, const struct place *place, uint64_t late_us)
{
    enum { WARM = 3, ROUNDS = 5, PAUSE_US = 50000 };
    struct network *network = pair(ranks, place->mbit, place->delay_us, 1);
    network->sleep_ns = place->sleep_us * 1000;
    meet(network);
    double message_us = (double)MESSAGE_BYTES / PAYLOAD_BYTES * WIRE_BYTES * 8 / place->mbit, took_us = 0;
    for (uint32_t round = 0; round < WARM + ROUNDS; round++) {
        uint64_t from_us = network_now_us(network);
        for (uint32_t i = 0; i + 1 < ranks; i++)
            post(network, i, round);
        network_run_until(network, from_us + late_us);
        post(network, ranks - 1, round);
        CHECK(network_run_completions(network, round + 1, from_us + 60000000));
        for (uint32_t i = 0; i < ranks; i++)
            CHECK(!is_contested(network, i));
        if (round >= WARM)
            took_us += (double)(network_now_us(network) - from_us) / ROUNDS;
        network_run_until(network, network_now_us(network) + PAUSE_US);
    }
    network_free(network);
    return took_us / (ranks * message_us);
}

TEST(test_ranks_fill_their_link)
{
    static const struct place PLACES[] = {
        {200, 100, 0, 1.02},  {200, 100, 1000, 1.02},  {200, 10000, 0, 1.06},
        {1000, 100, 0, 1.03}, {1000, 1000, 200, 1.06},
    };
    for (size_t i = 0; i < sizeof PLACES / sizeof *PLACES; i++)
        for (uint32_t ranks = 2; ranks <= RANKS_MOST; ranks *= 2) {
            double together = times_ideal(ranks, &PLACES[i], 0), late = times_ideal(ranks, &PLACES[i], 20000);
            printf("   %4.0f Mbit/s, %4.1f ms, sleep %4u us, %u ranks: %.3f times the ideal, %.3f with a late one\n",
                   PLACES[i].mbit, (double)PLACES[i].delay_us / 500, (unsigned)PLACES[i].sleep_us, ranks, together,
                   late);
            CHECK(together < PLACES[i].most && late < PLACES[i].most);
        }
}

/* The ranks of a host take together what one takes, and equal parts of it. */
TEST(test_ranks_beside_tcp)
{
    enum { AHEAD = 2, US = 8000000, SEEDS = 3, MBIT = 200, DELAY_US = 100 };
    static const double PERCENT = (double)MBIT * US / 8 / WIRE_BYTES / 100; /* packets */
    for (uint32_t ranks = 1; ranks <= RANKS_MOST; ranks *= 2) {
        double sum = 0;
        for (uint64_t seed = 1; seed <= SEEDS; seed++) {
            struct network *network = pair(ranks, MBIT, DELAY_US, seed);
            uint32_t posted[RANKS_MOST] = {0};
            uint64_t begun_us = network_now_us(network), joined_us = begun_us + 93000 + 7000 * seed;
            uint64_t warm_us = joined_us + US / 4, end_us = warm_us + US, before[RANKS_MOST] = {0};
            struct tcp *tcp = NULL;
            for (uint64_t now_us = begun_us; now_us < end_us; now_us += 1000) {
                for (uint32_t i = 0; i < ranks; i++) {
                    const struct network_host *to = &network->hosts[ranks + i];
                    for (; posted[i] < to->completed + AHEAD; posted[i]++)
                        post(network, i, posted[i]);
                    if (now_us <= warm_us)
                        before[i] = cl_endpoint_stats(to->endpoint)->payload_bytes_received;
                }
                if (now_us >= joined_us && tcp == NULL)
                    tcp = tcp_new(network, TCP_CUBIC, 2 * DELAY_US);
                network_run_until(network, now_us + 1000);
            }
            printf("   %u ranks, seed %u:", ranks, (unsigned)seed);
            double all = 0, least = 100;
            for (uint32_t i = 0; i < ranks; i++) {
                uint64_t bytes = cl_endpoint_stats(network->hosts[ranks + i].endpoint)->payload_bytes_received;
                double part = (double)(bytes - before[i]) / PAYLOAD_BYTES / PERCENT;
                all += part;
                least = part < least ? part : least;
                printf(" %.0f", part);
            }
            printf(" %%\n");
            CHECK(least * ranks > all / 2);
            sum += all / SEEDS;
            network_free(network);
            tcp_free(tcp);
        }
        CHECK(sum > 35 && sum < 65);
    }
}

/* They begin beside it, and pause between their messages, as in all-reduces of a job. */
TEST(test_ranks_that_begin_beside_tcp)
{
    enum { RANKS = 2, ROUNDS = 12, MBIT = 200, DELAY_US = 100, PAUSE_US = 5000, SEEDS = 6 };
    double ideal_us = (double)RANKS * MESSAGE_BYTES / PAYLOAD_BYTES * WIRE_BYTES * 8 / MBIT;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct network *network = pair(RANKS, MBIT, DELAY_US, seed);
        network->sleep_ns = 300000;
        struct tcp *tcp = tcp_new(network, TCP_CUBIC, 2 * DELAY_US);
        network_run_until(network, network_now_us(network) + 500000 + 50000 * seed);
        uint64_t begun_us = network_now_us(network);
        for (uint32_t round = 0; round < ROUNDS; round++) {
            for (uint32_t i = 0; i < RANKS; i++)
                post(network, i, round);
            CHECK(network_run_completions(network, round + 1, network_now_us(network) + 60000000));
            network_run_until(network, network_now_us(network) + PAUSE_US);
        }
        double times = (double)(network_now_us(network) - begun_us - ROUNDS * PAUSE_US) / (ROUNDS * ideal_us);
        printf("   seed %u: %.2f times the time without TCP\n", (unsigned)seed, times);
        CHECK(times > 1 / 0.65 && times < 1 / 0.35);
        network_free(network);
        tcp_free(tcp);
    }
}

/* It goes down to a quarter, or by a quarter. The ranks then take each other for another flow, until they probe at the
 * same time. At a quarter of the rate they soon do so again: what they remember of the link is the former rate. */
TEST(test_ranks_whose_link_becomes_slower)
{
    enum { RANKS = 2, AHEAD = 2, US = 10000000 };
    for (double mbit = 50; mbit <= 150; mbit *= 3) {
        struct network *network = pair(RANKS, 200, 100, 1);
        uint32_t posted[RANKS] = {0}, contested_ms = 0;
        uint64_t begun_us = network_now_us(network), before = 0, bytes = 0;
        for (uint64_t now_us = begun_us; now_us < begun_us + US; now_us += 1000) {
            if (now_us == begun_us + US / 10)
                network_set_link(network_egress(network, 0, 0), mbit, 256);
            for (uint32_t i = 0; i < RANKS; i++) {
                for (; posted[i] < network->hosts[RANKS + i].completed + AHEAD; posted[i]++)
                    post(network, i, posted[i]);
                contested_ms += is_contested(network, i);
            }
            if (now_us == begun_us + US / 5)
                for (uint32_t i = 0; i < RANKS; i++)
                    before += cl_endpoint_stats(network->hosts[RANKS + i].endpoint)->payload_bytes_received;
            network_run_until(network, now_us + 1000);
        }
        for (uint32_t i = 0; i < RANKS; i++)
            bytes += cl_endpoint_stats(network->hosts[RANKS + i].endpoint)->payload_bytes_received;
        double used = (double)(bytes - before) / PAYLOAD_BYTES * WIRE_BYTES * 8 / (mbit * US * 0.8);
        printf("   %3.0f Mbit/s: %.3f of the link, contests of %u ms\n", mbit, used, (unsigned)contested_ms);
        CHECK(used > 0.97);
        CHECK(contested_ms < RANKS * US / 1000 * 0.9 * (mbit < 100 ? 0.95 : 0.5));
        network_free(network);
    }
}
