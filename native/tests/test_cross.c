/*
 * An all-reduce beside traffic of others that does not yield, in virtual time: half of one host's port is taken, and
 * four hosts burst at once into another's.
 */
#include "tests/all_reduce.h"

enum { RATE_MBIT = 200, BUFFER = 256, WIRE_BYTES = 1514, BURST_PACKETS = 4 * 46, BURST_EVERY_NS = 100000000 };

static const double CROSS = 0.5;

static uint64_t next_cross_ns, next_burst_ns;

/* Others' packet, if the port has room. */
static void add_packet(struct network_link *port, uint64_t at_ns)
{
    uint64_t start_ns = port->free_ns > at_ns ? port->free_ns : at_ns;
    if ((double)(start_ns - at_ns) / port->ns_per_byte + WIRE_BYTES <= port->buffer_bytes)
        port->free_ns = start_ns + (uint64_t)(WIRE_BYTES * port->ns_per_byte);
}

/* Called with each datagram of the job, of which it drops none: brings the others' traffic up to date. */
static bool others(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)from;
    (void)datagram;
    struct network_link *burst = &network->ingress[0][0], *cross = &network->ingress[1][0];
    for (; next_cross_ns <= network->now_ns; next_cross_ns += (uint64_t)(WIRE_BYTES * cross->ns_per_byte / CROSS))
        add_packet(cross, next_cross_ns);
    for (; next_burst_ns <= network->now_ns; next_burst_ns += BURST_EVERY_NS)
        for (uint32_t i = 0; i < BURST_PACKETS; i++) /* four at a time */
            add_packet(burst, next_burst_ns + (uint64_t)((i / 4) * WIRE_BYTES * burst->ns_per_byte));
    return false;
}

static void test_what_is_left_is_used(void)
{
    for (uint64_t sleep_us = 0; sleep_us <= 2000; sleep_us += 1000) {
        struct network *network = network_new(HOSTS, 1, RATE_MBIT, BUFFER, 64 << 20, 1);
        network->sleep_ns = sleep_us * 1000;
        for (uint32_t host = 0; host < HOSTS; host++)
            network_set_link(&network->ingress[host][0], RATE_MBIT, BUFFER);
        next_cross_ns = next_burst_ns = network->now_ns;
        network->drops = others;
        double reached = efficiency(network, 8 << 20, RATE_MBIT * (1 - CROSS));
        printf("   hosts that sleep up to %u us: %.1f %% of what is left\n", (unsigned)sleep_us, reached);
        CHECK(reached > 98);
    }
}

int main(void)
{
    RUN(test_what_is_left_is_used);
    return CHECK_REPORT();
}
