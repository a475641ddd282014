#include "fabric/dctcp.h"
#include "tests/check.h"

enum { MTU = 4096, HOSTS = 9, RTO_NS = 1000000 };

struct fixture {
    struct sim_clock clock;
    struct sim_trace trace;
    struct sim_fabric fabric;
    struct sim_dctcp dctcp;
    uint32_t done;
    uint64_t done_ns[2 * HOSTS];
};

static struct fixture *current;

static void note(void *context)
{
    current->done_ns[(uintptr_t)context] = current->clock.now_ns;
    current->done++;
}

/* Nine hosts on one leaf, 10 Gbit/s, an empty round trip of about 13 us: a packet of 3.3 us over two links of 1 us. */
static void set_up(struct fixture *fixture, uint64_t port_bytes, uint64_t mark_us)
{
    struct sim_fabric_config config = {.leaves = 1,
                                       .hosts_per_leaf = HOSTS,
                                       .spines = 1,
                                       .host_bps = 1e10,
                                       .spine_bps = 1e10,
                                       .delay_ns = 1000,
                                       .port_bytes = port_bytes,
                                       .mark_us = mark_us};
    *fixture = (struct fixture){.trace.clock = &fixture->clock};
    sim_fabric_init(&fixture->fabric, &config, &fixture->clock, &fixture->trace, 1);
    sim_dctcp_init(&fixture->dctcp, &fixture->fabric, 0, MTU, RTO_NS);
    fixture->dctcp.flow_done = note;
    current = fixture;
}

static void run_until(struct fixture *fixture, uint64_t ns)
{
    while (sim_clock_next_ns(&fixture->clock) <= ns && fixture->clock.count > 0)
        sim_clock_step(&fixture->clock);
}

static void tear_down(struct fixture *fixture)
{
    run_until(fixture, UINT64_MAX);
    CHECK_EQ(fixture->fabric.medium.pool.used, 0);
    sim_dctcp_free(&fixture->dctcp);
    sim_fabric_free(&fixture->fabric);
    sim_clock_free(&fixture->clock);
}

/* The part of the link that payload gets, at best. */
static const double PAYLOAD = (double)(MTU - 52) / (MTU - 28 + 66);

/* Two senders to one host: alone, one would only fill its own queue. */
TEST(test_flows_fill_a_link)
{
    static struct fixture fixture;
    enum { LENGTH = 20000000 };
    set_up(&fixture, 10 << 20, 50);
    sim_dctcp_flow(&fixture.dctcp, 0, 8, 1, LENGTH, (void *)0);
    sim_dctcp_flow(&fixture.dctcp, 1, 8, 2, LENGTH, (void *)1);
    tear_down(&fixture);
    CHECK_EQ(fixture.done, 2);
    double rate = 2.0 * LENGTH * 8e9 / (double)fixture.done_ns[1] / 1e10 / PAYLOAD;
    CHECK(rate > 0.97 && rate <= 1);
    CHECK_EQ(fixture.dctcp.counts.again, 0);
    CHECK_EQ(fixture.dctcp.counts.timeouts, 0);
}

TEST(test_the_queue_stays_near_the_threshold)
{
    static struct fixture fixture;
    enum { MARK_US = 50 };
    set_up(&fixture, 10 << 20, MARK_US);
    for (uint16_t i = 0; i < 2; i++)
        sim_dctcp_flow(&fixture.dctcp, i, 8, i, 50000000, (void *)(uintptr_t)i);
    run_until(&fixture, 20000000);
    struct sim_queue *queue = &fixture.fabric.port[8].queue;
    uint64_t sum_bytes = 0;
    enum { SAMPLES = 2000 };
    for (uint64_t i = 0; i < SAMPLES; i++) {
        run_until(&fixture, 20000000 + i * 10000);
        sum_bytes += queue->bytes;
    }
    double mean_us = (double)sum_bytes / SAMPLES * 8 / 1e4;
    CHECK(mean_us > MARK_US / 2.0 && mean_us < MARK_US * 1.3);
    tear_down(&fixture);
}

TEST(test_flows_share_fairly)
{
    static struct fixture fixture;
    enum { FLOWS = 8, LENGTH = 10000000 };
    set_up(&fixture, 10 << 20, 50);
    for (uint16_t i = 0; i < FLOWS; i++)
        sim_dctcp_flow(&fixture.dctcp, i, 8, i, LENGTH, (void *)(uintptr_t)i);
    tear_down(&fixture);
    CHECK_EQ(fixture.done, FLOWS);
    uint64_t first_ns = UINT64_MAX, last_ns = 0;
    for (int i = 0; i < FLOWS; i++) {
        first_ns = fixture.done_ns[i] < first_ns ? fixture.done_ns[i] : first_ns;
        last_ns = fixture.done_ns[i] > last_ns ? fixture.done_ns[i] : last_ns;
    }
    CHECK((double)first_ns > 0.85 * (double)last_ns); /* all of the same length: they end together */
    CHECK((double)last_ns < 1.03 * FLOWS * LENGTH * 8 / 10 / PAYLOAD);
}

/* A port that drops and does not mark (the hosts' own queues do, or they would grow without end): losses are repaired
 * without waiting for the timer. */
TEST(test_fast_retransmission)
{
    static struct fixture fixture;
    enum { LENGTH = 20000000 };
    set_up(&fixture, 200000, 50);
    fixture.fabric.port[8].queue.mark_bytes = 0;
    for (uint16_t i = 0; i < 2; i++)
        sim_dctcp_flow(&fixture.dctcp, i, 8, i, LENGTH, (void *)(uintptr_t)i);
    tear_down(&fixture);
    CHECK_EQ(fixture.done, 2);
    CHECK(fixture.dctcp.counts.again > 0);
    CHECK(fixture.dctcp.counts.again <= fixture.fabric.medium.counts.lost[SIM_LOST_QUEUE] * 11 / 10);
    CHECK(fixture.dctcp.counts.timeouts <= 2); /* of the very last segments */
    uint64_t last_ns = fixture.done_ns[fixture.done_ns[0] < fixture.done_ns[1]];
    CHECK((double)last_ns < 1.1 * 2 * LENGTH * 8 / 10 / PAYLOAD);
}

/* What is lost at the very end waits for the RTO, and no longer. */
TEST(test_timeout)
{
    static struct fixture fixture;
    set_up(&fixture, 10 << 20, 50);
    fixture.fabric.port[8].down = 1;
    sim_dctcp_flow(&fixture.dctcp, 0, 8, 1, 5 * (MTU - 52), (void *)0);
    run_until(&fixture, RTO_NS / 2);
    fixture.fabric.port[8].down = 0;
    tear_down(&fixture);
    CHECK_EQ(fixture.done, 1);
    CHECK_EQ(fixture.dctcp.counts.timeouts, 1);
    CHECK(fixture.done_ns[0] > RTO_NS && fixture.done_ns[0] < RTO_NS + 200000);
}

static uint32_t ended;

static void count_ended(void *context, uint64_t missing)
{
    (void)context;
    CHECK_EQ(missing, 0);
    ended++;
}

/* A receive may be posted before its message comes, or after. */
TEST(test_messages)
{
    static struct fixture fixture;
    set_up(&fixture, 10 << 20, 50);
    struct sim_transport *transport = &fixture.dctcp.transport;
    transport->done = count_ended;
    ended = 0;
    struct sim_message messages[3];
    for (uint32_t i = 0; i < 3; i++)
        messages[i] = (struct sim_message){.from = 2, .to = 5, .job = 4, .index = i, .length = i * 10000};
    transport->receive(transport, &messages[1], &messages[1]);
    for (uint32_t i = 0; i < 3; i++)
        transport->send(transport, &messages[i], &messages[i]);
    run_until(&fixture, UINT64_MAX);
    CHECK_EQ(ended, 4);
    transport->receive(transport, &messages[2], &messages[2]);
    transport->receive(transport, &messages[0], &messages[0]);
    CHECK_EQ(ended, 6);
    tear_down(&fixture);
}
