/* All-reduces of four hosts on slow links, in virtual time. A packet takes half a millisecond there, so queues of a few
 * packets are longer than on fast links. */
#include "tests/all_reduce.h"

enum { SLEEP_US = 1000, SEEDS = 3 };

TEST(test_slow_links_are_filled)
{
    static const uint32_t RATES_MBIT[] = {10, 20, 25, 50};
    for (uint32_t i = 0; i < sizeof RATES_MBIT / sizeof *RATES_MBIT; i++) {
        double least = 100;
        for (uint64_t seed = 1; seed <= SEEDS; seed++) {
            struct network *network = network_new(HOSTS, 1, RATES_MBIT[i], 256, 64 << 20, seed);
            network_set_delay(network, 20);
            network->sleep_ns = SLEEP_US * 1000;
            double reached = efficiency(network, 2 << 20, RATES_MBIT[i]);
            least = reached < least ? reached : least;
        }
        printf("   %u Mbit/s: %.1f %% of the links\n", RATES_MBIT[i], least);
        CHECK(least > 96);
    }
}

static struct network *with_a_slow_host(uint64_t sleep_us)
{
    enum { RATE_MBIT = 200, BUFFER = 256 };
    struct network *network = network_new(HOSTS, 1, RATE_MBIT, BUFFER, 64 << 20, 1);
    network->sleep_ns = sleep_us * 1000;
    network_set_link(network_ingress(network, 1, 0), RATE_MBIT / 2, BUFFER);
    network_set_link(network_egress(network, 1, 0), RATE_MBIT / 2, BUFFER);
    return network;
}

/* Beside a host whose links have half of the others' rate, each host's peaks tell its own rate, although the others
 * wait for it most of the time. */
TEST(test_peaks_tell_the_rates_of_unequal_links)
{
    for (uint64_t sleep_us = 0; sleep_us <= SLEEP_US; sleep_us += SLEEP_US) {
        struct network *network = with_a_slow_host(sleep_us);
        double equal_us = all_reduce_us(network, 8 << 20, EQUAL_SHARDS);
        for (uint16_t host = 0; host < HOSTS; host++) {
            struct cl_path_stats stats;
            uint16_t peer = (uint16_t)((host + 1) % HOSTS);
            CHECK_EQ(cl_endpoint_read_paths(network->hosts[host].endpoint, peer, &stats, 1), 1);
            double rate = host == 1 ? 100e6 / 8 : 200e6 / 8; /* bytes per second */
            double arrived = (double)stats.arrived_bytes, delivered = (double)stats.delivered_bytes;
            CHECK(arrived > 0.9 * rate && arrived < 1.05 * rate);
            CHECK(delivered > 0.9 * rate && delivered < 1.6 * rate);
        }
        network_free(network);
        uint32_t lengths[HOSTS];
        shards_without_host_1(lengths);
        network = with_a_slow_host(sleep_us);
        double unequal_us = all_reduce_us(network, 8 << 20, lengths);
        printf("   hosts that sleep up to %u us: %.2f times as fast\n", (unsigned)sleep_us, equal_us / unequal_us);
        CHECK(equal_us > 1.35 * unequal_us);
        network_free(network);
    }
}
