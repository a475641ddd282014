/* All-reduces of four hosts whose network loses packets one by one or in bursts, in virtual time: loss that does not
 * fall when the rate falls costs little more than what is lost, between hosts that sleep as well. */
#include "tests/all_reduce.h"

enum { RATE_MBIT = 200, BUFFER_PACKETS = 500, BYTES = 8 << 20, SEEDS = 8, BURST_NS = 20000000 };

/* The packets that reach a host are lost in bursts, as `commlayer emulate` loses them: a burst ends with each packet by
 * chance, and after some time. */
struct bursts {
    double begin, end; /* chance, with each packet */
    uint64_t until_ns[HOSTS];
    void (*deliver)(void *context, struct sim_datagram *datagram);
};

static void lose_in_bursts(void *context, struct sim_datagram *datagram)
{
    struct network *network = context;
    struct bursts *bursts = network->argument;
    uint64_t now_ns = network->clock.now_ns, *until_ns = &bursts->until_ns[datagram->to];
    if (now_ns < *until_ns && network_random(network) < bursts->end)
        *until_ns = 0;
    else if (now_ns >= *until_ns && network_random(network) < bursts->begin)
        *until_ns = now_ns + BURST_NS;
    if (now_ns < *until_ns)
        sim_medium_lose(&network->links.medium, datagram, SIM_LOST_NOISE, "burst");
    else
        bursts->deliver(context, datagram);
}

/* The mean time of all-reduces. */
static double lossy_us(double loss, uint32_t packets, uint64_t sleep_us, uint64_t seeds)
{
    double sum_us = 0;
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        struct network *network = network_new(HOSTS, 1, RATE_MBIT, BUFFER_PACKETS, 64 << 20, seed);
        struct bursts bursts = {loss / packets / (1 - loss), 1.0 / packets, {0}, network->links.medium.deliver};
        network_set_delay(network, 20);
        network->sleep_ns = sleep_us * 1000;
        network->argument = &bursts;
        network->links.medium.deliver = lose_in_bursts;
        sum_us += all_reduce_us(network, BYTES, EQUAL_SHARDS) / (double)seeds;
        network_free(network);
    }
    return sum_us;
}

TEST(test_loss_of_the_link_costs_little)
{
    static const struct {
        double loss;
        uint32_t packets;
        double most; /* of the time without loss */
    } CASES[] = {{0.01, 1, 1.03}, {0.03, 1, 1.06}, {0.01, 8, 1.03}, {0.03, 8, 1.06}};
    for (uint64_t sleep_us = 0; sleep_us <= 1000; sleep_us += 1000) {
        double clean_us = lossy_us(0, 1, sleep_us, 1);
        printf("   hosts that sleep up to %u us, %.0f ms:", (unsigned)sleep_us, clean_us / 1000);
        for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
            double ratio = lossy_us(CASES[i].loss, CASES[i].packets, sleep_us, SEEDS) / clean_us;
            printf(" %.0f %% in bursts of %u: %.3f;", 100 * CASES[i].loss, CASES[i].packets, ratio);
            CHECK(ratio < CASES[i].most);
        }
        puts("");
    }
}
