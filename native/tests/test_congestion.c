/* Whole endpoints on long, lossy and shallow paths, in virtual time: the cost of congestion control. */
#include "congestion/congestion.h"

#include "protocol/endpoint.h"

#include "tests/check.h"
#include "tests/network.h"

/* The interface of the control, without a network: what was sent and lost shows in its answers. */
TEST(test_events_and_questions)
{
    enum { BYTES = 1472 };
    static struct cl_congestion_nic nic;
    static struct cl_congestion congestion;
    cl_congestion_nic_init(&nic, cl_congestion_find(NULL), BYTES);
    cl_congestion_init(&congestion, &nic, BYTES);
    uint64_t window = cl_congestion_report(&congestion).window_bytes;
    CHECK(cl_congestion_has_room(&congestion, 4, &(struct cl_congestion_flight){0, 0, 0}, BYTES));
    CHECK(!cl_congestion_has_room(&congestion, 4, &(struct cl_congestion_flight){window, window, window}, BYTES));
    CHECK_EQ(cl_congestion_delay_us(&congestion), 0);
    uint32_t sent = 0;
    while (cl_congestion_nic_ready_us(&nic, 4, 0) == 0 && sent < 1000) {
        cl_congestion_sent(&congestion, 4, 4, BYTES, 0);
        sent++;
    }
    CHECK(sent > 1 && sent < 1000);
    CHECK_EQ(cl_congestion_report(&congestion).carried_bytes, sent * (BYTES + CL_CONGESTION_OVERHEAD_BYTES));
    CHECK(cl_congestion_delay_us(&congestion) > 0);
    CHECK(!cl_congestion_nic_is_mixed(&nic, 0) && !cl_congestion_nic_has_urgent(&nic, 0));
    cl_congestion_sent(&congestion, 1, 1, BYTES, 0);
    CHECK(cl_congestion_nic_is_mixed(&nic, 0) && cl_congestion_nic_has_urgent(&nic, 0));
    for (uint32_t count = 1; count < 10; count++)
        cl_congestion_timeout(&congestion, count);
    CHECK(cl_congestion_report(&congestion).window_bytes < window);
    CHECK_EQ(cl_congestion_nic_port(&nic, 1).senders, 0);
    cl_congestion_received(&congestion, BYTES, 1);
    CHECK_EQ(cl_congestion_nic_port(&nic, 1).senders, 1);
    cl_congestion_leave(&congestion);
    CHECK_EQ(cl_congestion_nic_port(&nic, 1).senders, 0);
}

/* One packet of a path leaves and is acknowledged: `number`, after so long in queues. */
static void acknowledge(struct cl_congestion *congestion, uint64_t number, uint32_t queue_us, uint64_t now_us)
{
    enum { BYTES = 1472, ROUND = 20 };
    struct cl_congestion_packet packet = cl_congestion_remember(congestion, 4, now_us);
    cl_congestion_sent(congestion, 4, 4, BYTES, now_us);
    cl_congestion_acknowledged(congestion,
                               &(struct cl_congestion_ack){.bytes = BYTES,
                                                           .packets = 1,
                                                           .largest = number,
                                                           .next = number + ROUND,
                                                           .timing = {.known = true,
                                                                      .class = 4,
                                                                      .packet = packet,
                                                                      .sent_us = now_us,
                                                                      .clock_us = (uint32_t)now_us + queue_us,
                                                                      .queue_us = queue_us,
                                                                      .base_us = 1000}},
                               now_us + 1000 + queue_us);
}

/* A queue that stays begins a contest, losses while there is none end it as if it had not been: the window is the one
 * before. */
TEST(test_a_contest_that_is_undone)
{
    enum { BYTES = 1472, ROUND = 20, LOSES_FROM = 100, ACKS = 4000, FULL_US = 50000 };
    static struct cl_congestion_nic nic;
    static struct cl_congestion congestion;
    cl_congestion_nic_init(&nic, cl_congestion_find(NULL), BYTES);
    cl_congestion_init(&congestion, &nic, BYTES);
    uint64_t window = cl_congestion_report(&congestion).window_bytes, now_us = 1000000;
    uint32_t contested = 0;
    for (uint64_t number = 0; number < ACKS; number++, now_us += 1000) {
        acknowledge(&congestion, number, contested < LOSES_FROM ? FULL_US : 0, now_us);
        if (cl_congestion_is_contested(&congestion))
            contested++;
        else if (contested >= LOSES_FROM)
            break;
        else
            CHECK_EQ(cl_congestion_report(&congestion).window_bytes, window);
        if (contested >= LOSES_FROM && number % ROUND == 0)
            cl_congestion_lost(&congestion, 1);
    }
    CHECK(contested >= LOSES_FROM);
    CHECK(!cl_congestion_is_contested(&congestion));
    CHECK_EQ(cl_congestion_report(&congestion).window_bytes, window);
}

/* How long a queue has to stay before it begins a contest, in microseconds, where another process of the host sends
 * something every so often; 0: never. */
static uint64_t contest_us(uint64_t others_us)
{
    enum {
        BYTES = 1472,
        LAST = CL_CLASSES_BETWEEN_HOSTS - 1,
        START_US = 10000000,
        MOST_US = 10000000,
        GAP_US = 100,
        FULL_US = 50000
    };
    struct cl_congestion_nic nic;
    struct cl_congestion congestion;
    cl_congestion_nic_init(&nic, cl_congestion_find(NULL), BYTES);
    cl_congestion_init(&congestion, &nic, BYTES);
    uint64_t past_us = 0;
    struct cl_told told = {0};
    cl_congestion_nic_hear(&nic, 0, &told, START_US - 1);
    while (!cl_congestion_is_contested(&congestion) && past_us < MOST_US) {
        told.bytes[LAST] += others_us > 0 && past_us % others_us == 0 ? others_us * 10 : 0;
        cl_congestion_nic_hear(&nic, 0, &told, START_US + past_us);
        cl_congestion_nic_heard(&nic, START_US + past_us);
        acknowledge(&congestion, past_us / GAP_US, FULL_US, START_US + past_us);
        past_us += GAP_US;
    }
    return past_us;
}

/* Processes of a host that begin or end have a queue together for a while. But a flow of others that stays begins a
 * contest there, too. */
TEST(test_processes_of_a_host_wait_longer_for_a_contest)
{
    uint64_t alone_us = contest_us(0), others_us = contest_us(1000);
    CHECK(alone_us > 0 && others_us >= 3 * alone_us);
    CHECK(others_us < 1000000);
    CHECK(contest_us(50000) < 1000000); /* they come and go */
}

/* What a process tells of an interface: what has left, and the link's rate once it knows it. */
TEST(test_processes_of_a_host_tell_each_other)
{
    enum { BYTES = 1472, ON_WIRE = BYTES + CL_CONGESTION_OVERHEAD_BYTES };
    struct cl_congestion_nic nic, other;
    struct cl_congestion congestion;
    cl_congestion_nic_init(&nic, cl_congestion_find(NULL), BYTES);
    cl_congestion_init(&congestion, &nic, BYTES);
    CHECK_EQ(cl_congestion_nic_tell(&nic).bytes[8], 0);
    for (uint64_t i = 0; i < 100; i++)
        acknowledge(&congestion, i, i > 10 ? 2000 : 0, 1000000 + 60 * i);
    struct cl_told told = cl_congestion_nic_tell(&nic);
    CHECK_EQ(told.bytes[4], 100 * ON_WIRE);
    CHECK_EQ(told.bytes[3], 0);
    CHECK_EQ(told.lost, 0);
    CHECK(told.capacity > 0 && told.depth_us > 0);
    cl_congestion_lost(&congestion, 3);
    CHECK_EQ(cl_congestion_nic_tell(&nic).lost, 3 * ON_WIRE);
    cl_congestion_nic_init(&other, cl_congestion_find(NULL), BYTES); /* it need not search for the rate */
    CHECK_EQ(cl_congestion_nic_tell(&other).capacity, 0);
    cl_congestion_nic_hear(&other, 0, &told, 1000000);
    CHECK_EQ(cl_congestion_nic_tell(&other).capacity, told.capacity);
    CHECK_EQ(cl_congestion_nic_tell(&other).bytes[8], 0);
    static const uint64_t ABSURD[] = {1, UINT64_MAX}; /* of a process with a defect */
    for (int i = 0; i < 2; i++) {
        cl_congestion_nic_init(&other, cl_congestion_find(NULL), BYTES);
        struct cl_told absurd = {.capacity = ABSURD[i], .depth_us = 1, .lost = UINT64_MAX / 2};
        cl_congestion_nic_hear(&other, 0, &(struct cl_told){0}, 1000000);
        for (int j = 0; j < CL_CLASSES_BETWEEN_HOSTS; j++)
            absurd.bytes[j] = UINT64_MAX / 2;
        cl_congestion_nic_hear(&other, 0, &absurd, 1000001);
        cl_congestion_nic_heard(&other, 1000001);
        CHECK_EQ(cl_congestion_nic_tell(&other).capacity, 0);
        CHECK_EQ(cl_congestion_nic_tell(&other).bytes[8], 0);
        CHECK(cl_congestion_nic_rate(&other) > 1000000);
        absurd = (struct cl_told){.capacity = ABSURD[i], .depth_us = 1};
        cl_congestion_nic_init(&other, cl_congestion_find(NULL), BYTES);
        cl_congestion_nic_hear(&other, 0, &absurd, 1000000);
        absurd.bytes[0] = UINT64_MAX / 2; /* with no bytes in all */
        cl_congestion_nic_hear(&other, 0, &absurd, 1000001);
        CHECK_EQ(cl_congestion_nic_tell(&other).capacity, 0);
        CHECK_EQ(other.delay.egress.bytes[0], 0);
    }
    const char *const fixed = "fixed";
    cl_congestion_nic_init(&other, cl_congestion_find(fixed), BYTES);
    cl_congestion_nic_hear(&other, 0, &told, 1000000);
    CHECK_EQ(cl_congestion_nic_tell(&other).capacity, 0);
}

/* An acknowledgement without timing, as of a late packet, does not end the pacing of a long path. */
TEST(test_a_late_packet_leaves_the_pace)
{
    enum { BYTES = 1472, ROUND_TRIP_US = 100000 };
    static struct cl_congestion_nic nic;
    static struct cl_congestion congestion;
    cl_congestion_nic_init(&nic, cl_congestion_find(NULL), BYTES);
    cl_congestion_init(&congestion, &nic, BYTES);
    for (uint64_t number = 0, now_us = 1000000; number < 100; number++, now_us += 1000) {
        struct cl_congestion_ack ack = {.bytes = BYTES, .packets = 1, .largest = number, .next = number + 100};
        struct cl_congestion_packet packet = cl_congestion_remember(&congestion, 4, now_us);
        cl_congestion_sent(&congestion, 4, 4, BYTES, now_us);
        if (number % 2 == 0)
            ack.timing = (struct cl_congestion_timing){.known = true,
                                                       .class = 4,
                                                       .packet = packet,
                                                       .sent_us = now_us,
                                                       .clock_us = (uint32_t)now_us,
                                                       .base_us = ROUND_TRIP_US};
        cl_congestion_acknowledged(&congestion, &ack, now_us + ROUND_TRIP_US);
        CHECK(cl_congestion_report(&congestion).rate_bytes > 0);
    }
}

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
        CHECK(exchange(hosts_apart(4, 100, 150, 0.15, seed), 0.2) < 1.2 * link_us(3));
        CHECK(exchange(hosts_apart(2, 5000, 150, 0.15, seed), 0) < 3 * link_us(1));
    }
}

/* The same between hosts that sleep for milliseconds, whose queues are never short: a window that a trial has cut must
 * not take that queue for the cause of all further losses. */
TEST(test_random_loss_between_hosts_that_sleep)
{
    double mean_us = 0;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct network *network = hosts_apart(4, 20, 500, 0.03, seed);
        network->sleep_ns = 3000000;
        mean_us += exchange(network, 0) / 3;
    }
    printf("   3 %% random loss, hosts that sleep up to 3 ms: %.1f %% of the links\n", 100 * link_us(3) / mean_us);
    CHECK(mean_us < 1.26 * link_us(3));
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

/* ---- one sender, for some time ---- */

struct link {
    double nic_mbit, port_mbit;
    uint32_t buffer_packets; /* of the port */
    double loss;
    uint64_t delay_us, sleep_us;
};

struct outcome {
    double used;       /* share of the port's rate */
    double overflowed; /* share of the packets */
};

/* Host 0 sends to host 1 through a switch, once it has found its rate. */
static struct outcome stream_over(struct link link, uint64_t us)
{
    enum { MESSAGES = 400, WARM_UP_US = 100000 };
    SCOPED_NETWORK *network = network_new(2, 1, link.nic_mbit, 2000, 64 << 20, 1);
    for (uint32_t i = 0; i < 2; i++)
        network_set_link(network_ingress(network, i, 0), link.port_mbit, link.buffer_packets);
    network_set_delay(network, link.delay_us);
    network_set_noise(network, (struct sim_noise){.loss = link.loss});
    network->sleep_ns = link.sleep_us * 1000;
    for (uint32_t sequence = 1; sequence <= MESSAGES; sequence++)
        network_post(network, (struct network_message){0, 1, {1, sequence, 0}, data, target, MIB, {0}});
    const struct cl_engine_stats *sent = cl_endpoint_stats(network->hosts[0].endpoint);
    const struct cl_engine_stats *received = cl_endpoint_stats(network->hosts[1].endpoint);
    uint64_t start_us = network_now_us(network) + WARM_UP_US + 20 * link.delay_us;
    network_run_until(network, start_us);
    uint64_t bytes = received->payload_bytes_received, packets = sent->packets_sent;
    uint64_t overflows = network_overflows(network);
    network_run_until(network, start_us + us);
    CHECK(network->hosts[1].completed < MESSAGES);
    double carried = link.port_mbit * (double)us / 8 * 1432 / 1514;
    return (struct outcome){.used = (double)(received->payload_bytes_received - bytes) / carried,
                            .overflowed = (double)(network_overflows(network) - overflows) /
                                          (double)(sent->packets_sent - packets)};
}

/* A sender alone fills the link, whose buffer is too short to show a delay, and does not overflow it all the time. */
TEST(test_shallow_buffers_alone)
{
    static const struct link LINKS[] = {
        {10000, 1000, 64, 0, 100, 0}, {10000, 1000, 64, 0, 100, 500}, {10000, 1000, 16, 0, 100, 0},
        {10000, 1000, 8, 0, 100, 0},  {20000, 10000, 64, 0, 100, 0},
    };
    for (size_t i = 0; i < sizeof LINKS / sizeof *LINKS; i++) {
        struct outcome outcome = stream_over(LINKS[i], LINKS[i].port_mbit > 5000 ? 60000 : 400000);
        printf("   %5.0f Mbit/s, %2u packets: %5.1f %% used, %4.1f %% lost\n", LINKS[i].port_mbit,
               LINKS[i].buffer_packets, 100 * outcome.used, 100 * outcome.overflowed);
        CHECK(outcome.used > 0.9);
        CHECK(outcome.overflowed < (LINKS[i].buffer_packets < 16 ? 0.03 : 0.01));
    }
}

/* Random losses cost what is lost, even if the hosts sleep longer than the least bucket of the pacer lasts. */
TEST(test_random_loss_alone)
{
    static const double LOSSES[] = {0.01, 0.03, 0.12};
    for (size_t i = 0; i < sizeof LOSSES / sizeof *LOSSES; i++) {
        struct outcome near = stream_over((struct link){1000, 1000, 150, LOSSES[i], 100, 500}, 400000);
        struct outcome far = stream_over((struct link){200, 200, 500, LOSSES[i], 10000, 0}, 2000000);
        printf("   %2.0f %% random loss: %5.1f %% used, over 20 ms %5.1f %%\n", 100 * LOSSES[i], 100 * near.used,
               100 * far.used);
        CHECK(near.used > 0.85 * (1 - LOSSES[i]));
        CHECK(far.used > 0.9 * (1 - LOSSES[i]));
    }
}
