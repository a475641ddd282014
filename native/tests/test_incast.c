/* Several hosts send to one port, in virtual time: the effect of the receiver's reports (congestion/ingress.h).
 */
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"

#include "tests/check.h"
#include "tests/network.h"

enum { SENDERS = 7, BYTES = 256 << 10, OPERATIONS = 10, LINK_MBIT = 200 };

static uint8_t data[BYTES], target[BYTES];

/* The time when the port alone would be done, with what Ethernet adds. */
static double ideal_us(uint32_t bytes)
{
    return (double)bytes * 1514 / 1432 * 8 / LINK_MBIT;
}

static struct network *start(uint32_t buffer_packets, uint64_t seed)
{
    struct network *network = network_new(SENDERS + 1, 1, LINK_MBIT, 2000, 64 << 20, seed);
    network_set_link(network_ingress(network, 0, 0), LINK_MBIT, buffer_packets);
    return network;
}

static void post(struct network *network, uint32_t sequence, uint32_t senders)
{
    struct cl_message_id id = {1, sequence, 0};
    for (uint16_t from = 1; from <= senders; from++)
        network_post(network, (struct network_message){from, 0, id, data, target, BYTES, {.priority = 4}});
}

/* The longest of several gathers in a row, divided by the time that the port needs. */
static double slowest(struct network *network, uint32_t senders)
{
    double most = 0;
    for (uint32_t i = 1; i <= OPERATIONS; i++) {
        uint64_t start_us = network_now_us(network);
        network->hosts[0].completed = 0;
        post(network, i, senders);
        while (network->hosts[0].completed < senders && network_step(network, start_us + 10000000))
            ;
        CHECK_EQ(network->hosts[0].completed, senders);
        double took = (double)(network_now_us(network) - start_us) / (senders * ideal_us(BYTES));
        most = took > most ? took : most;
    }
    network_free(network);
    return most;
}

TEST(test_shallow_port)
{
    static const uint32_t PACKETS[] = {16, 32, 64, 150};
    for (int i = 0; i < 4; i++)
        for (uint64_t seed = 1; seed <= 3; seed++)
            CHECK(slowest(start(PACKETS[i], seed), SENDERS) < (i == 0 ? 1.15 : 1.05));
}

TEST(test_with_random_loss)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct network *network = start(32, seed);
        network_set_noise(network, (struct sim_noise){.loss = 0.01});
        CHECK(slowest(network, SENDERS) < 1.15);
    }
}

TEST(test_hosts_that_sleep)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct network *network = start(64, seed);
        network->sleep_ns = 1000000;
        CHECK(slowest(network, SENDERS) < 1.08);
    }
}

/* All senders have equal shares within milliseconds of the start, not seconds: none finishes long before the
 * others. */
TEST(test_shares_are_equal_at_once)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        SCOPED_NETWORK *network = start(64, seed);
        uint64_t start_us = network_now_us(network), first_us = UINT64_MAX, last_us = 0;
        post(network, 1, SENDERS);
        network_run_until(network, start_us + 10000000);
        for (int i = 1; i <= SENDERS; i++) {
            uint64_t us = network->hosts[i].last_completed_us - start_us;
            first_us = us < first_us ? us : first_us;
            last_us = us > last_us ? us : last_us;
        }
        CHECK(first_us * 10 > last_us * 6);
    }
}

/* A sender that comes late, or goes, changes the others' shares; the port is never idle for it. */
TEST(test_senders_come_and_go)
{
    SCOPED_NETWORK *network = start(64, 1);
    uint64_t start_us = network_now_us(network);
    for (uint32_t i = 1; i <= 4; i++)
        post(network, i, 2);
    network_run_until(network, start_us + 20000);
    CHECK_EQ(
        cl_congestion_nic_port(&network->hosts[0].endpoint->nics.list[0].congestion, network_now_us(network)).senders,
        2);
    struct cl_message_id id = {1, 9, 0};
    network_post(network, (struct network_message){3, 0, id, data, target, BYTES, {.priority = 4}});
    network_run_until(network, network_now_us(network) + 20000);
    CHECK_EQ(network->hosts[0].endpoint->nics.list[0].congestion.delay.ingress.senders.count, 3);
    CHECK(network->hosts[3].endpoint->peers.list[0]->paths[0].congestion.delay.cc.sharing);
    while (network->hosts[0].completed < 9 && network_step(network, start_us + 10000000))
        ;
    CHECK((double)(network_now_us(network) - start_us) < 1.05 * 9 * ideal_us(BYTES));
    CHECK_EQ(network->hosts[0].endpoint->nics.list[0].congestion.delay.ingress.senders.count,
             0); /* no message is expected */
}
