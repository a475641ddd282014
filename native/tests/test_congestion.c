/* Whole endpoints on long, lossy and shallow paths, in virtual time: the cost of congestion control. */
#include "congestion/cc.h"

#include "tests/check.h"
#include "tests/network.h"

enum { MIB = 1 << 20, LINK_MBIT = 200, OPERATIONS = 8 };

static uint8_t data[MIB], target[MIB];

static double link_us(uint32_t messages)
{
    return (double)messages * MIB * 1514 / 1432 * 8 / LINK_MBIT;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* All hosts send each other 1 MiB, several times. Returns the median of the times, in us; frees the network. */
static double exchange(struct network *network, double loss_bound)
{
    double times[OPERATIONS];
    uint32_t hosts = network->host_count;
    struct cl_qos qos = {.loss_bound = loss_bound};
    for (uint32_t i = 0; i < OPERATIONS; i++) {
        uint64_t start_us = network_now_us(network);
        struct cl_message_id id = {1, i + 1, 0};
        for (uint32_t host = 0; host < hosts; host++)
            network->hosts[host].completed = 0;
        for (uint16_t a = 0; a < hosts; a++)
            for (uint16_t b = 0; b < hosts; b++)
                if (a != b)
                    network_post(network, (struct network_message){a, b, id, data, target, MIB, qos});
        CHECK(network_run_completions(network, 2 * (hosts - 1), start_us + 60000000));
        times[i] = (double)(network_now_us(network) - start_us);
    }
    network_free(network);
    qsort(times, OPERATIONS, sizeof(*times), compare);
    return times[OPERATIONS / 2];
}

static struct network *hosts_apart(uint32_t hosts, uint64_t delay_us, uint32_t buffer_packets, double loss,
                                   uint64_t seed)
{
    struct network *network = network_new(hosts, 1, LINK_MBIT, 2000, 64 << 20, seed);
    for (uint32_t i = 0; i < hosts; i++)
        network_set_link(network_ingress(network, i, 0), LINK_MBIT, buffer_packets);
    network_set_delay(network, delay_us);
    network_set_noise(network, (struct sim_noise){.loss = loss});
    return network;
}

/* 40 ms there and back, and buffers for a tenth of what is in flight: bursts overflow them at first, and growing back
 * by a few packets per round trip would take seconds. */
TEST(test_long_ways_with_shallow_buffers)
{
    double ideal_us = link_us(3) + 40000;
    CHECK(exchange(hosts_apart(4, 20000, 64, 0, 1), 0) < 1.05 * ideal_us);
    double mean_us = 0; /* how one of them fares is chance: 1.3 to 1.55 */
    for (uint32_t buffer_packets = 12; buffer_packets <= 32; buffer_packets += 4)
        mean_us += exchange(hosts_apart(4, 20000, buffer_packets, 0, 1), 0) / 6;
    CHECK(mean_us < 1.5 * ideal_us);
}

TEST(test_long_ways_with_partial_messages)
{
    CHECK(exchange(hosts_apart(4, 20000, 32, 0.01, 1), 0.02) < 2 * (link_us(3) + 40000));
    double reliable_us = 0, partial_us = 0;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        reliable_us += exchange(hosts_apart(4, 20000, 64, 0.01, seed), 0);
        partial_us += exchange(hosts_apart(4, 20000, 64, 0.01, seed), 0.03);
    }
    CHECK(partial_us < 0.9 * reliable_us);
}

/* Loss that does not depend on the rate costs only the retransmissions. */
TEST(test_random_loss)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        CHECK(exchange(hosts_apart(2, 100, 150, 0.15, seed), 0.2) < 1.15 * link_us(1));
        CHECK(exchange(hosts_apart(4, 100, 150, 0.15, seed), 0.2) < 1.15 * link_us(3));
        CHECK(exchange(hosts_apart(2, 5000, 150, 0.15, seed), 0) < 3 * link_us(1));
    }
}

/* Eight messages from host 0 to host 1: how long they take. */
static uint64_t stream_us(struct network *network)
{
    uint64_t start_us = network_now_us(network);
    for (uint32_t sequence = 1; sequence <= 8; sequence++) {
        struct cl_message_id id = {1, sequence, 0};
        network_post(network, (struct network_message){0, 1, id, data, target, MIB, {0}});
    }
    CHECK(network_run_completions(network, 8, start_us + 60000000));
    return network_now_us(network) - start_us;
}

/* A port four times slower than its senders, with room for 16 packets, whether or not there is random
 * loss as well. */
TEST(test_full_buffers_are_respected)
{
    for (int i = 0; i < 2; i++) {
        SCOPED_NETWORK *network = hosts_apart(2, 100, 150, 0.1 * i, 1);
        network_set_link(network_ingress(network, 1, 0), LINK_MBIT / 4.0, 16);
        uint64_t us = stream_us(network);
        CHECK(network_overflows(network) < network->links.medium.counts.sent / 12);
        CHECK((double)us < 1.5 * 4 * link_us(8));
    }
}

/* A port with a quarter of the link's rate and a shallow buffer, which marks at a third of it: much less is lost than
 * without marks, and it takes no longer. */
TEST(test_marks_prevent_losses)
{
    uint64_t took_us[2], drops[2];
    for (int marks = 0; marks < 2; marks++) {
        SCOPED_NETWORK *network = hosts_apart(2, 100, 150, 0, 1);
        struct sim_link *port = network_ingress(network, 1, 0);
        network_set_link(port, LINK_MBIT / 4.0, 24);
        port->queue.type = &sim_queue_type_switch;
        port->queue.mark_bytes = marks ? port->queue.limit_bytes / 3 : 0;
        took_us[marks] = stream_us(network);
        drops[marks] = network_overflows(network);
    }
    CHECK(drops[1] < drops[0] / 2);
    CHECK(took_us[1] < took_us[0] * 102 / 100);
}
