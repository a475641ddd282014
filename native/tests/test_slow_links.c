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
