/*
 * An all-reduce beside traffic that does not yield, in virtual time: half of one host's port is taken, and
 * four hosts burst at once into another's.
 */
#include "tests/all_reduce.h"

enum { RATE_MBIT = 200, BUFFER = 256, WIRE_BYTES = 1514, BURST_ROUNDS = 46, BURST_EVERY_NS = 100000000 };

static const double CROSS = 0.5;

/* Packets of others into one host's port: `rounds` times so many at once, a gap apart; and again after a pause. */
struct stream {
    struct sim_event event; /* the first member: events are cast to streams */
    struct network *network;
    uint16_t to;
    uint32_t at_once, rounds, round;
    uint64_t gap_ns, pause_ns;
};

static void send_others(struct sim_event *event)
{
    struct stream *stream = (struct stream *)(void *)event;
    struct network *network = stream->network;
    for (uint32_t i = 0; i < stream->at_once; i++) {
        struct sim_datagram *datagram = sim_pool_take(&network->links.medium.pool);
        datagram->protocol = NETWORK_OTHERS;
        datagram->length = NETWORK_DATAGRAM_BYTES;
        datagram->route[datagram->hops++] = network_ingress(network, stream->to, 0);
        sim_link_send(datagram->route[0], datagram);
    }
    stream->round = (stream->round + 1) % stream->rounds;
    sim_clock_schedule(&network->clock, event,
                       network->clock.now_ns + (stream->round > 0 ? stream->gap_ns : stream->pause_ns));
}

static struct stream cross, burst;

static struct network *with_traffic(uint64_t sleep_us)
{
    struct network *network = network_new(HOSTS, 1, RATE_MBIT, BUFFER, 64 << 20, 1);
    network->sleep_ns = sleep_us * 1000;
    uint64_t packet_ns = (uint64_t)(WIRE_BYTES * network_ingress(network, 0, 0)->ns_per_byte);
    cross = (struct stream){{.fire = send_others}, network, 1, 1, 1, 0, 0, (uint64_t)((double)packet_ns / CROSS)};
    burst = (struct stream){{.fire = send_others}, network, 0, 4, BURST_ROUNDS, 0, packet_ns, BURST_EVERY_NS};
    sim_clock_schedule(&network->clock, &cross.event, network->clock.now_ns);
    sim_clock_schedule(&network->clock, &burst.event, network->clock.now_ns);
    return network;
}

TEST(test_what_is_left_is_used)
{
    for (uint64_t sleep_us = 0; sleep_us <= 2000; sleep_us += 1000) {
        struct network *network = with_traffic(sleep_us);
        double reached = efficiency(network, 8 << 20, RATE_MBIT * (1 - CROSS));
        printf("   hosts that sleep up to %u us: %.1f %% of what is left\n", (unsigned)sleep_us, reached);
        CHECK(reached > 98);
    }
}

/* With equal shards every host receives 3/2 of the tensor. A host that owns none receives the tensor once, and the
 * others 5/3 of it. */
TEST(test_a_busy_host_that_owns_nothing)
{
    uint32_t lengths[HOSTS];
    shards_without_host_1(lengths);
    for (uint64_t sleep_us = 0; sleep_us <= 1000; sleep_us += 1000) {
        struct network *network = with_traffic(sleep_us);
        double limit_us = link_us(8 << 20, RATE_MBIT * (1 - CROSS));
        double spent_us = all_reduce_us(network, 8 << 20, lengths);
        printf("   hosts that sleep up to %u us: %.1f %% of the limit\n", (unsigned)sleep_us,
               100 * limit_us / spent_us);
        CHECK(spent_us < 1.1 * limit_us);
        struct cl_path_stats busy, other;
        CHECK_EQ(cl_endpoint_read_paths(network->hosts[1].endpoint, 0, &busy, 1), 1);
        CHECK_EQ(cl_endpoint_read_paths(network->hosts[2].endpoint, 0, &other, 1), 1);
        CHECK((double)busy.arrived_bytes < 0.75 * (double)other.arrived_bytes);
        network_free(network);
    }
}
