#include <string.h>

#include "fabric/fabric.h"
#include "sim/memory.h"
#include "tests/check.h"

enum { BYTES = 934, TAKEN = 1000 /* with the overhead of a fabric */ };

/* ---- one port ---- */

static struct sim_queue port_of(uint64_t limit_bytes, uint64_t mark_bytes)
{
    return (struct sim_queue){.type = &sim_queue_type_switch,
                              .limit_bytes = limit_bytes,
                              .overhead_bytes = TAKEN - BYTES,
                              .mark_bytes = mark_bytes,
                              .drops = true};
}

static bool offer(struct sim_queue *queue, struct sim_pool *pool, uint8_t priority, uint8_t ecn)
{
    struct sim_datagram *datagram = sim_pool_take(pool);
    datagram->length = BYTES;
    datagram->priority = priority;
    datagram->ecn = ecn;
    bool entered = sim_queue_push(queue, datagram);
    if (!entered)
        sim_pool_give(pool, datagram);
    return entered;
}

/* The priority of the next one; 99: there is none. */
static uint32_t next_of(struct sim_queue *queue, struct sim_pool *pool)
{
    struct sim_datagram *datagram = sim_queue_pop(queue);
    if (datagram == NULL)
        return 99;
    uint32_t priority = datagram->priority;
    sim_pool_give(pool, datagram);
    return priority;
}

TEST(test_above_the_threshold_it_marks_or_drops)
{
    SCOPED(sim_pool_free) struct sim_pool pool = {.datagram_bytes = BYTES};
    struct sim_queue queue = port_of(100 * TAKEN, 2 * TAKEN);
    for (int i = 0; i < 2; i++)
        CHECK(offer(&queue, &pool, 3, SIM_NOT_ECT));
    CHECK(!offer(&queue, &pool, 3, SIM_NOT_ECT));
    CHECK(offer(&queue, &pool, 3, SIM_ECT));
    CHECK(offer(&queue, &pool, 2, SIM_NOT_ECT)); /* another class has a queue of its own */
    CHECK_EQ(queue.selected, 1);
    CHECK_EQ(queue.marked, 1);
    queue.drops = false; /* a host drops nothing of its own */
    CHECK(offer(&queue, &pool, 3, SIM_NOT_ECT));
    CHECK_EQ(queue.overflowed, 0);
}

TEST(test_job_and_others_have_half_each)
{
    SCOPED(sim_pool_free) struct sim_pool pool = {.datagram_bytes = BYTES};
    struct sim_queue queue = port_of(4 * TAKEN, 0);
    for (int i = 0; i < 2; i++) {
        CHECK(offer(&queue, &pool, 5, SIM_ECT));
        CHECK(offer(&queue, &pool, 1, SIM_ECT));
    }
    CHECK(!offer(&queue, &pool, 1, SIM_ECT)); /* the job's room is used up, the others' is not */
    CHECK_EQ(queue.overflowed, 1);
    for (int i = 0; i < 3; i++)
        CHECK(offer(&queue, &pool, SIM_CLASS_OTHERS, SIM_ECT));
    static const uint32_t ORDER[] = {1, SIM_CLASS_OTHERS, 1, SIM_CLASS_OTHERS, 5, SIM_CLASS_OTHERS, 5, 99};
    for (size_t i = 0; i < sizeof ORDER / sizeof *ORDER; i++)
        CHECK_EQ(next_of(&queue, &pool), ORDER[i]);
    CHECK_EQ(queue.bytes, 0);
}

/* A class that waits cannot shut out a class that goes first; a class alone has all room. */
TEST(test_classes_leave_room_for_each_other)
{
    SCOPED(sim_pool_free) struct sim_pool pool = {.datagram_bytes = BYTES};
    struct sim_queue queue = port_of(72 * TAKEN, 0);
    uint32_t taken[2] = {0};
    for (uint8_t class = 2; class -- > 0;)
        while (offer(&queue, &pool, class, SIM_ECT))
            taken[class]++;
    CHECK_EQ(taken[1], 72);
    CHECK_EQ(taken[0], 8);
    while (next_of(&queue, &pool) != 99) {
    }
}

/* One queue may take half of an empty buffer, and a second queue half of the rest. */
TEST(test_shared_buffer)
{
    SCOPED(sim_pool_free) struct sim_pool pool = {.datagram_bytes = BYTES};
    struct sim_buffer buffer = {.limit_bytes = 16 * TAKEN};
    struct sim_queue one = port_of(1000 * TAKEN, 0), two = one;
    one.buffer = two.buffer = &buffer;
    uint32_t taken[2] = {0};
    while (offer(&one, &pool, 0, SIM_ECT))
        taken[0]++;
    while (offer(&two, &pool, 0, SIM_ECT))
        taken[1]++;
    CHECK_EQ(taken[0], 8);
    CHECK_EQ(taken[1], 4);
    while (next_of(&one, &pool) != 99 || next_of(&two, &pool) != 99) {
    }
    CHECK_EQ(buffer.bytes, 0);
}

/* ---- the fabric ---- */

struct fixture {
    struct sim_transport transport; /* the first member */
    struct sim_clock clock;
    struct sim_trace trace;
    struct sim_fabric fabric;
    uint32_t arrived;
    uint64_t last_ns;
    bool in_order;
};

static void arrive(struct sim_transport *transport, struct sim_datagram *datagram)
{
    struct fixture *fixture = (struct fixture *)(void *)transport;
    uint32_t number;
    memcpy(&number, datagram->bytes, sizeof number);
    fixture->in_order &= number == fixture->arrived++;
    fixture->last_ns = fixture->clock.now_ns;
    sim_pool_give(&fixture->fabric.medium.pool, datagram);
}

/* Two leaves of two hosts; 1000 bytes take 1000 ns to a host and 500 ns to a spine. */
static void set_up(struct fixture *fixture)
{
    static const struct sim_fabric_config CONFIG = {.leaves = 2,
                                                    .hosts_per_leaf = 2,
                                                    .others_per_leaf = 1,
                                                    .spines = 4,
                                                    .host_bps = 8e9,
                                                    .spine_bps = 16e9,
                                                    .delay_ns = 100,
                                                    .port_bytes = 1 << 30};
    *fixture = (struct fixture){.transport.deliver = arrive, .in_order = true};
    fixture->trace.clock = &fixture->clock;
    sim_fabric_init(&fixture->fabric, &CONFIG, &fixture->clock, &fixture->trace, 1);
    fixture->fabric.transports[0] = &fixture->transport;
}

static void send_packets(struct fixture *fixture, uint16_t from, uint16_t to, uint32_t count, bool spray)
{
    for (uint32_t i = 0; i < count; i++) {
        struct sim_datagram *datagram = sim_fabric_take(&fixture->fabric);
        datagram->from = from;
        datagram->to = to;
        datagram->length = BYTES;
        memcpy(datagram->bytes, &i, sizeof i);
        sim_fabric_send(&fixture->fabric, datagram, spray ? i : 7);
    }
}

static uint32_t finish(struct fixture *fixture)
{
    while (sim_clock_step(&fixture->clock)) {
    }
    CHECK_EQ(fixture->fabric.medium.pool.used, 0);
    uint32_t spines = 0; /* that were used */
    for (uint32_t i = 0; i < 2 * fixture->fabric.config.spines; i++)
        spines += fixture->fabric.up[i].queue.most_bytes > 0;
    sim_fabric_free(&fixture->fabric);
    sim_clock_free(&fixture->clock);
    return spines;
}

TEST(test_times_of_routes)
{
    static const struct {
        uint16_t from, to;
        uint64_t ns;
    } ROUTES[] = {{0, 1, 2 * 1000 + 2 * 100},
                  {0, 3, 2 * 1000 + 2 * 500 + 4 * 100},
                  {4, 0, 2 * 1000 + 2 * 100},
                  {5, 0, 2 * 1000 + 2 * 500 + 4 * 100}}; /* 4 and 5 are not the job's */
    struct fixture fixture;
    for (size_t i = 0; i < sizeof ROUTES / sizeof *ROUTES; i++) {
        set_up(&fixture);
        send_packets(&fixture, ROUTES[i].from, ROUTES[i].to, 1, false);
        finish(&fixture);
        CHECK_EQ(fixture.arrived, 1);
        CHECK_EQ(fixture.last_ns, ROUTES[i].ns);
    }
}

TEST(test_one_spine_by_flow_all_by_packet)
{
    struct fixture fixture;
    for (int spray = 0; spray < 2; spray++) {
        set_up(&fixture);
        send_packets(&fixture, 0, 3, 100, spray);
        uint32_t spines = finish(&fixture);
        CHECK_EQ(fixture.arrived, 100);
        CHECK_EQ(spines, spray ? 4 : 1);
        CHECK(spray || fixture.in_order);
        CHECK(fixture.last_ns < 100 * 1000 + 5000); /* the hosts' links are the limit */
    }
}
