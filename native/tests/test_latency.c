/* How long messages take between two hosts, one after another and several at once, in virtual time, beside the time
 * that the links need. */
#include "tests/network.h"

enum { WARM_UP = 20, MESSAGES = 200, MOST = 1 << 20, WINDOW = 8, DELAY_US = 100, PACKET_BYTES = 1514, PAYLOAD = 1440 };

static double packets_us(double packets, double rate_mbit)
{
    return packets * PACKET_BYTES * 8 / rate_mbit;
}

/* Sends `count` messages at once, and waits until all have come. Returns how long that took. */
static uint64_t exchange_us(struct network *network, uint32_t round, uint32_t count, uint32_t length)
{
    static uint8_t source[MOST], target[MOST];
    uint16_t from = round % 2;
    const struct network_host *to = &network->hosts[1 - from];
    uint32_t wanted = to->completed + count;
    uint64_t start_us = network_now_us(network);
    for (uint32_t i = 0; i < count; i++)
        network_post(network, (struct network_message){.from = from,
                                                       .to = 1 - from,
                                                       .id = {9, round, i},
                                                       .source = source,
                                                       .target = target,
                                                       .length = length,
                                                       .qos = {.priority = 4}});
    CHECK(network_run_completions(network, wanted, start_us + 10000000));
    return to->last_completed_us - start_us;
}

TEST(test_messages_take_what_the_link_takes)
{
    static const uint32_t LENGTHS[] = {4096, 65536, MOST}, RATES_MBIT[] = {50, 200, 1000}, COUNTS[] = {1, WINDOW};
    for (uint32_t n = 0; n < 18; n++) {
        uint32_t length = LENGTHS[n % 3], rate = RATES_MBIT[n / 3 % 3], count = COUNTS[n / 9];
        SCOPED_NETWORK *network = network_new(2, 1, rate, 256, 64 << 20, n + 1);
        network_set_delay(network, DELAY_US);
        double took_us = 0, packets = count * ((length + PAYLOAD - 1) / PAYLOAD);
        double least_us = DELAY_US + packets_us(packets + 1, rate);
        for (uint32_t round = 0; round < WARM_UP + MESSAGES; round++) {
            double us = (double)exchange_us(network, round, count, length);
            took_us += round < WARM_UP ? 0 : us / MESSAGES;
        }
        printf("   %u x %u B at %u Mbit/s: %.0f us, the links need %.0f\n", count, length, rate, took_us, least_us);
        CHECK(took_us > 0.9 * least_us); /* the last packet is shorter */
        CHECK(took_us < 1.02 * least_us);
    }
}
