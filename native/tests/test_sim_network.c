#include <string.h>

#include "sim/memory.h"
#include "sim/network.h"
#include "tests/check.h"

enum { PACKETS = 1000, BYTES = 958 /* and 42 of overhead */ };

struct arrivals {
    struct sim_network *network;
    uint32_t count, order[2 * PACKETS];
    uint64_t last_ns;
};

static void arrive(void *context, struct sim_datagram *datagram)
{
    struct arrivals *arrivals = context;
    memcpy(&arrivals->order[arrivals->count++], datagram->bytes, sizeof(uint32_t));
    arrivals->last_ns = arrivals->network->medium.clock->now_ns;
    sim_pool_give(&arrivals->network->medium.pool, datagram);
}

struct fixture {
    struct sim_clock clock;
    struct sim_trace trace;
    struct sim_network network;
    struct arrivals arrivals;
};

/* Two hosts, 1000 bytes take 1000 ns on each link. */
static void set_up(struct fixture *fixture, bool trunks)
{
    memset(fixture, 0, sizeof *fixture);
    fixture->trace.clock = &fixture->clock;
    sim_network_init(&fixture->network, &fixture->clock, &fixture->trace, 5, 2, 1, trunks, 1472);
    fixture->network.medium.deliver = arrive;
    fixture->network.medium.context = &fixture->arrivals;
    fixture->arrivals.network = &fixture->network;
    struct sim_link *links[] = {fixture->network.egress,      fixture->network.egress + 1, fixture->network.ingress,
                                fixture->network.ingress + 1, fixture->network.trunk[0],   fixture->network.trunk[1]};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        links[i]->ns_per_byte = 1;
        links[i]->queue.limit_bytes = 1 << 30;
    }
}

static void send_packets(struct fixture *fixture, uint32_t count, uint8_t priority)
{
    for (uint32_t i = 0; i < count; i++) {
        struct sim_datagram *datagram = sim_pool_take(&fixture->network.medium.pool);
        datagram->length = BYTES;
        datagram->priority = priority;
        datagram->to = 1;
        memcpy(datagram->bytes, &i, sizeof i);
        sim_network_send(&fixture->network, datagram, 0, 1);
    }
}

static void tear_down(struct fixture *fixture)
{
    while (sim_clock_step(&fixture->clock)) {
    }
    CHECK_EQ(fixture->network.medium.pool.used, 0);
    sim_network_free(&fixture->network);
    sim_clock_free(&fixture->clock);
}

TEST(test_rate_and_delay)
{
    struct fixture fixture;
    for (int trunks = 0; trunks < 2; trunks++) {
        set_up(&fixture, trunks);
        fixture.network.egress->delay_ns = 5000;
        send_packets(&fixture, 10, 0);
        tear_down(&fixture);
        CHECK_EQ(fixture.arrivals.count, 10);
        CHECK_EQ(fixture.arrivals.last_ns, 10 * 1000 + 5000 + (trunks ? 2 : 1) * 1000);
    }
}

TEST(test_full_queue)
{
    struct fixture fixture;
    set_up(&fixture, false);
    fixture.network.egress->queue.limit_bytes = 3000;
    send_packets(&fixture, 10, 0); /* one leaves at once, three wait */
    tear_down(&fixture);
    CHECK_EQ(fixture.arrivals.count, 4);
    CHECK_EQ(fixture.network.medium.counts.lost[SIM_LOST_QUEUE], 6);
}

TEST(test_priorities)
{
    struct fixture fixture;
    set_up(&fixture, false);
    fixture.network.egress->queue.type = &sim_queue_type_priority;
    send_packets(&fixture, 5, 4);
    for (uint32_t i = 0; i < 5; i++) {
        struct sim_datagram *urgent = sim_pool_take(&fixture.network.medium.pool);
        uint32_t number = 100 + i;
        urgent->length = BYTES;
        urgent->to = 1;
        memcpy(urgent->bytes, &number, sizeof number);
        sim_network_send(&fixture.network, urgent, 0, 1);
    }
    tear_down(&fixture);
    static const uint32_t ORDER[] = {0, 100, 101, 102, 103, 104, 1, 2, 3, 4};
    CHECK(fixture.arrivals.count == 10 && memcmp(fixture.arrivals.order, ORDER, sizeof ORDER) == 0);
}

TEST(test_noise)
{
    struct fixture fixture;
    set_up(&fixture, false);
    fixture.network.ingress[1].noise = (struct sim_noise){.loss = 0.1, .duplicate = 0.1};
    send_packets(&fixture, PACKETS, 0);
    tear_down(&fixture);
    uint64_t lost = fixture.network.medium.counts.lost[SIM_LOST_NOISE],
             twice = fixture.network.medium.counts.duplicated;
    CHECK(lost > 60 && lost < 140);
    CHECK(twice > 50 && twice < 130);
    CHECK_EQ(fixture.arrivals.count, PACKETS - lost + twice);
    for (uint32_t i = 1; i < fixture.arrivals.count; i++) /* nothing overtakes where nothing reorders */
        CHECK(fixture.arrivals.order[i] >= fixture.arrivals.order[i - 1]);

    set_up(&fixture, false);
    fixture.network.ingress[1].noise = (struct sim_noise){.reorder = 0.1, .reorder_ns = 10000};
    send_packets(&fixture, PACKETS, 0);
    tear_down(&fixture);
    uint32_t overtaken = 0;
    for (uint32_t i = 1; i < fixture.arrivals.count; i++)
        overtaken += fixture.arrivals.order[i] < fixture.arrivals.order[i - 1];
    CHECK_EQ(fixture.arrivals.count, PACKETS);
    CHECK(overtaken > 20);
}

TEST(test_down_and_cut)
{
    struct fixture fixture;
    set_up(&fixture, false);
    fixture.network.ingress[1].down = 1;
    send_packets(&fixture, 3, 0);
    tear_down(&fixture);
    CHECK_EQ(fixture.network.medium.counts.lost[SIM_LOST_DOWN], 3);

    set_up(&fixture, false);
    sim_network_cut(&fixture.network, 1, 0, 0, true); /* the other direction */
    send_packets(&fixture, 3, 0);
    sim_network_cut(&fixture.network, 0, 1, 0, true);
    send_packets(&fixture, 2, 0);
    sim_network_cut(&fixture.network, 0, 1, 0, false);
    send_packets(&fixture, 1, 0);
    tear_down(&fixture);
    CHECK_EQ(fixture.arrivals.count, 4);
    CHECK_EQ(fixture.network.medium.counts.lost[SIM_LOST_CUT], 2);
}
