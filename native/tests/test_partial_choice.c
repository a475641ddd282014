/* Messages that may lose packets, where a test chooses which are lost, late or never sent: when such a message ends. */
#include "protocol/packet.h"
#include "tests/partial_transfer.h"

struct choice {
    uint32_t first, last; /* packets of DATA that are lost on their first transmission */
    bool every_time;
    bool lost[1024]; /* once */
    uint64_t delay_us;
    uint64_t late_ns;          /* not 0: they are not lost but come then, all at once */
    uint64_t control_until_us; /* PROBE and STOP are lost until then */
    uint32_t probes, stops;
};

static void enter_port(struct sim_event *event)
{
    struct sim_datagram *datagram = (struct sim_datagram *)(void *)event; /* the event is its first member */
    sim_link_send(datagram->route[0], datagram);
}

/* Packets about to be sent arrive at this time. */
static void put_off(struct network *network, const struct cl_datagram *datagram, uint64_t at_ns)
{
    struct sim_datagram *late = network_datagram(network, 0, datagram);
    late->route[late->hops++] = network_ingress(network, late->to, late->path);
    late->event.fire = enter_port;
    sim_clock_schedule(&network->clock, &late->event, at_ns);
}

static bool by_choice(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    struct choice *choice = network->argument;
    struct cl_packet packet;
    (void)from;
    uint8_t bytes[CL_PACKET_HEAD_BYTES];
    memcpy(bytes, datagram->head, sizeof(bytes));
    cl_store_u16(bytes + 6, 0);
    CHECK(cl_packet_decode(&packet, bytes, sizeof(bytes)));
    if (packet.kind == CL_PACKET_DATA) {
        uint32_t number = packet.offset / PAYLOAD;
        bool lost = number >= choice->first && number < choice->last && (choice->every_time || !choice->lost[number]);
        choice->lost[number] |= lost;
        if (lost && choice->late_ns)
            put_off(network, datagram, choice->late_ns);
        return lost;
    }
    choice->probes += packet.kind == CL_PACKET_PROBE;
    choice->stops += packet.kind == CL_PACKET_STOP;
    return (packet.kind == CL_PACKET_PROBE || packet.kind == CL_PACKET_STOP) &&
           network_now_us(network) < choice->control_until_us;
}

static uint64_t lose(struct choice *choice, uint32_t packets, struct cl_qos qos, uint32_t expected)
{
    SCOPED_NETWORK *network = open_network(2, 1, 1000, ROOM, 8);
    network_set_delay(network, 100 + choice->delay_us);
    network_run_until(network, network_now_us(network) + SECOND_US);
    network->drops = by_choice;
    network->argument = choice;
    choice->control_until_us += network_now_us(network);
    choice->late_ns += choice->late_ns ? network->clock.now_ns : 0;
    SCOPED_TRANSFER *t = make(network, 0, 1, 0, packets * PAYLOAD - 8, qos);
    uint64_t start_us = network_now_us(network);
    post_send(t);
    post_receive(t);
    CHECK(run_until_done(&t, 1, 10 * SECOND_US));
    uint32_t missing = check_ended(t);
    CHECK_EQ(missing, expected);
    CHECK(t->sender.at_us <= start_us + 5 * SECOND_US);
    uint64_t took_us = t->receiver.at_us - start_us;
    return took_us;
}

/* One way takes 20 ms: an additional round trip would show. */
TEST(test_no_round_trip_for_what_is_within_the_bound)
{
    struct choice none = {.delay_us = 20000}, some = {.first = 990, .last = 995, .delay_us = 20000}, same = some;
    uint64_t clean_us = lose(&none, 1000, may_lose(0), 0);
    CHECK(lose(&some, 1000, may_lose(0.01), 5) < clean_us + 40000 / 4 + 2000); /* a quarter of it, for reordering */
    CHECK(lose(&same, 1000, may_lose(0), 0) > clean_us + 40000);
}

TEST(test_the_last_packets_are_lost)
{
    struct choice one = {.first = 99, .last = 100}, many = {.first = 90, .last = 100},
                  most = {.first = 50, .last = 100};
    CHECK(lose(&one, 100, may_lose(0.1), 1) < 20000);
    CHECK(one.probes > 0);
    CHECK(lose(&many, 100, may_lose(0.1), 10) < 20000);
    CHECK(lose(&most, 100, may_lose(0.1), 10) < 60000); /* 40 of them are sent again */
}

TEST(test_everything_is_lost)
{
    struct choice all = {.first = 0, .last = 100};
    CHECK(lose(&all, 100, may_lose(0.5), 50) < 100000);
}

TEST(test_all_control_packets_are_lost)
{
    struct choice stop = {.first = 10, .last = 15, .control_until_us = 300000};
    CHECK(lose(&stop, 100, may_lose(0.1), 5) < 20000); /* the receiver needs none */
    CHECK(stop.stops > 1);
    struct choice probe = {.first = 95, .last = 100, .control_until_us = 300000};
    lose(&probe, 100, may_lose(0.1), 5);
    CHECK(probe.probes > 1);
}

/* More packets than the loss detection remembers come after all, and complete the message: only the receiver can tell.
 * Either it has the PROBE by then, or gets it when the message is over. */
TEST(test_what_was_given_up_arrives_late)
{
    struct choice before = {.first = 40, .last = 100, .late_ns = 30000000, .every_time = true};
    lose(&before, 100, may_lose(0.4), 0);
    struct choice after = {
        .first = 40, .last = 100, .late_ns = 30000000, .every_time = true, .control_until_us = 200000};
    lose(&after, 100, may_lose(0.5), 0);
    CHECK(after.probes > 0);
}

/* Every tenth packet is lost, and the others take a millisecond longer than control packets. */
static bool slowly(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)from;
    if (datagram->payload_length == 0)
        return false;
    if (cl_load_u32(datagram->head + 20) / PAYLOAD % 10 != 3)
        put_off(network, datagram, network->clock.now_ns + 1000000);
    return true;
}

TEST(test_a_probe_overtakes_its_message)
{
    SCOPED_NETWORK *network = open_network(2, 1, 1000, ROOM, 8);
    network_run_until(network, network_now_us(network) + SECOND_US);
    network->drops = slowly;
    SCOPED_TRANSFER *t = make(network, 0, 1, 0, 10 * PAYLOAD, (struct cl_qos){.loss_bound = 0.2, .protect_first = 1});
    post_send(t); /* the receiver does not know the message when the PROBE comes */
    network_run_until(network, network_now_us(network) + 20000);
    post_receive(t);
    CHECK(run_until_done(&t, 1, SECOND_US));
    CHECK_EQ(check_ended(t), 1);
}

/* The sender falls silent with most of the message sent, and wakes up later. Returns when the receive ended; 0: not
 * before. */
static uint64_t outlast(struct cl_qos qos)
{
    SCOPED_NETWORK *network = open_network(2, 1, 100, ROOM, 9);
    qos.loss_bound = 0.5;
    qos.deadline_us = qos.deadline_us ? qos.deadline_us : 60000;
    SCOPED_TRANSFER *t = make(network, 0, 1, 0, 600 * PAYLOAD, qos);
    uint64_t start_us = network_now_us(network);
    post_send(t);
    post_receive(t);
    network_run_until(network, start_us + 40000);
    sim_driver_kill(&network->hosts[0].driver);
    network_run_until(network, start_us + SECOND_US);
    uint64_t ended_us = t->receiver.done ? t->receiver.at_us - start_us : 0;
    CHECK(!t->sender.done);
    network->hosts[0].driver.dead = false;
    network_wake(network, 0);
    CHECK(run_until_done(&t, 1, SECOND_US));
    CHECK_EQ(check_ended(t) > 0, ended_us > 0);
    return ended_us;
}

TEST(test_deadline)
{
    uint64_t plain_us = outlast((struct cl_qos){0});
    CHECK(plain_us >= 60000 && plain_us < 70000);
    /* A deadline that passes while too much is missing ends the message as soon as little enough is. */
    uint64_t early_us = outlast((struct cl_qos){.deadline_us = 5000});
    CHECK(early_us >= 40000 && early_us < 100000);
    /* Protected packets that are there already do not hold it up; one that is not, does. */
    CHECK_EQ(outlast((struct cl_qos){.protect_first = 2}), plain_us);
    CHECK_EQ(outlast((struct cl_qos){.protect_last = 1}), 0);
    /* A deadline is no reason to exceed the loss bound ... */
    struct choice more = {.first = 60, .last = 100};
    CHECK(lose(&more, 100, (struct cl_qos){.loss_bound = 0.1, .deadline_us = 1000}, 10) < 60000);
    /* ... nor to end a message whose packets come steadily, however late. */
    SCOPED_NETWORK *network = open_network(2, 1, 10, ROOM, 9);
    SCOPED_TRANSFER *t = make(network, 0, 1, 0, 200 * PAYLOAD, (struct cl_qos){.loss_bound = 0.5, .deadline_us = 1000});
    post_send(t);
    post_receive(t);
    CHECK(run_until_done(&t, 1, 5 * SECOND_US));
    CHECK_EQ(check_ended(t), 0);
}

TEST(test_protected_packets_arrive)
{
    uint64_t map[4] = {0x00FF00000000F000u, 0, 0x10, 0};
    for (uint64_t seed = 0; seed < 10; seed++) {
        SCOPED_NETWORK *network = open_network(2, 1 + seed % 2, 500, ROOM, 200 + seed);
        network_set_noise(network, (struct sim_noise){.loss = 0.3});
        struct cl_qos qos = {.loss_bound = 0.4,
                             .deadline_us = seed % 2 ? 2000 : 0,
                             .protect_first = 2,
                             .protect_last = 1,
                             .protect = map,
                             .protect_bytes = 2048,
                             .protect_offset = 1024};
        SCOPED_TRANSFER *t = make(network, 0, 1, 0, 200 * PAYLOAD, qos);
        post_send(t);
        post_receive(t);
        CHECK(run_until_done(&t, 1, 5 * SECOND_US));
        CHECK(check_ended(t) > 0);
        for (uint32_t i = 0; i < t->receiver.count; i++)
            for (uint64_t at = t->receiver.missing[i].start; at < t->receiver.missing[i].end; at++) {
                uint64_t bit = (at + 1024) / 2048;
                CHECK(!(map[bit / 64] >> (bit % 64) & 1));
                CHECK(at >= 2 * PAYLOAD && at < 199 * PAYLOAD);
            }
    }
}

/* The map is of the values: a packet of 11 blocks stands for 11 x 1024 bytes of them. */
TEST(test_protected_values_arrive_encoded)
{
    enum { BLOCK = 130, VALUES = 1024, BLOCKS = 2200, PACKET_BLOCKS = PAYLOAD / BLOCK };
    uint64_t map[40] = {0x00FF00000000F000u, 0, 0x10};
    for (uint64_t seed = 0; seed < 4; seed++) {
        SCOPED_NETWORK *network = open_network(2, 1, 500, ROOM, 250 + seed);
        network_set_noise(network, (struct sim_noise){.loss = 0.3});
        struct cl_qos qos = {.loss_bound = 0.4, .protect = map, .protect_bytes = VALUES, .protect_offset = 512};
        qos.blocks = (struct cl_blocks){BLOCK, VALUES, BLOCKS * VALUES - 100};
        SCOPED_TRANSFER *t = make(network, 0, 1, 0, BLOCKS * BLOCK, qos);
        post_send(t);
        post_receive(t);
        CHECK(run_until_done(&t, 1, 5 * SECOND_US));
        CHECK(check_ended(t) > 0);
        for (uint32_t i = 0; i < t->receiver.count; i++) {
            uint64_t first = t->receiver.missing[i].start / BLOCK, last = t->receiver.missing[i].end / BLOCK;
            for (uint64_t bit = (first * VALUES + 512) / VALUES; bit < last; bit++)
                CHECK(!(map[bit / 64] >> (bit % 64) & 1));
        }
    }
}

TEST(test_more_is_protected_than_the_bound_leaves)
{
    uint64_t all[4] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    struct choice choice = {.first = 20, .last = 40};
    lose(&choice, 100, (struct cl_qos){.loss_bound = 0.5, .protect = all, .protect_bytes = PAYLOAD}, 0);
}

/* No packet of a message fits into the memory for unexpected packets: it is refused, sent again, and must not be cut
 * off meanwhile. */

/* The last tenth is lost, and before the sender says so the receiver's group has failed, or closed. */
TEST(test_a_probe_for_a_group_that_is_gone)
{
    for (int failed = 0; failed < 2; failed++) {
        struct choice choice = {.first = 90, .last = 100, .every_time = true};
        SCOPED_NETWORK *network = open_network(2, 1, 1000, ROOM, 8);
        network_set_delay(network, 20000);
        network_run_until(network, network_now_us(network) + SECOND_US);
        network->drops = by_choice;
        network->argument = &choice;
        SCOPED_TRANSFER *t = make(network, 0, 1, 0, 100 * PAYLOAD, may_lose(0.1));
        post_send(t);
        post_receive(t);
        network_run_until(network, network_now_us(network) + 30000);
        CHECK(!t->receiver.done && !t->sender.done && !choice.probes);
        if (failed) /* without telling the sender */
            cl_endpoint_abort(network->hosts[1].endpoint, 9, NULL, 0, CL_ETIMEDOUT, UINT16_MAX);
        else
            cl_endpoint_cancel(network->hosts[1].endpoint, 9, UINT32_MAX);
        network_run_until(network, network_now_us(network) + 2 * SECOND_US);
        CHECK(failed || choice.probes > 0); /* there the answer to data may come first */
        CHECK(t->sender.done);
        CHECK_EQ(t->sender.status, failed ? CL_EABORTED : CL_OK); /* as with data for such groups */
        CHECK_EQ(t->sender.count, 0);
        CHECK_EQ(t->receiver.done, failed);
    }
}
