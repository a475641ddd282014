/* Messages that may lose packets: on clean, rough and lossy networks, with peers and groups that end.
 */
#include "protocol/packet.h"
#include "tests/partial_transfer.h"

TEST(test_clean_network_is_exact)
{
    static const double BOUNDS[] = {0.01, 0.5};
    for (size_t i = 0; i < 2; i++) {
        SCOPED_NETWORK *reliable = open_network(3, 1, 1000, ROOM, 1), *network = open_network(3, 1, 1000, ROOM, 1);
        CHECK_EQ(exchange(reliable, 5, 300000, may_lose(0)), 0);
        CHECK_EQ(exchange(network, 5, 300000, may_lose(BOUNDS[i])), 0);
        CHECK_EQ(network->links.medium.counts.sent, reliable->links.medium.counts.sent); /* no PROBE, no STOP */
        CHECK_EQ(stats(network, 0)->packets_retransmitted, 0);
        CHECK_EQ(stats(network, 0)->messages_stopped, 0);
    }
}

/* Several paths and hosts that sleep: no packet is lost, so none may be missing. */
TEST(test_clean_but_rough)
{
    SCOPED_NETWORK *network = open_network(3, 2, 200, ROOM, 2);
    for (uint32_t i = 0; i < 3; i++) {
        network_set_link(network_egress(network, i, 1), 50, 1000);
        network_set_link(network_ingress(network, i, 0), 200, 1000);
        network_set_link(network_ingress(network, i, 1), 200, 1000);
    }
    network->sleep_ns = 2000000;
    CHECK_EQ(exchange(network, 6, 300000, may_lose(0.1)), 0);
    CHECK_EQ(network_overflows(network), 0);
}

TEST(test_losses)
{
    static const double LOSSES[] = {0.01, 0.05, 0.3};
    static const double BOUNDS[] = {0.001, 0.01, 0.1, 0.5};
    for (uint64_t seed = 0; seed < 3; seed++)
        for (size_t l = 0; l < 3; l++)
            for (size_t b = 0; b < 4; b++) {
                SCOPED_NETWORK *network = open_network(3, 1 + seed % 2, 500, ROOM, 40 + seed);
                network_set_noise(network, (struct sim_noise){.loss = LOSSES[l]});
                uint32_t missing = exchange(network, 4, 250000, may_lose(BOUNDS[b]));
                CHECK((missing > 0) == (BOUNDS[b] >= 0.01)); /* 175 packets: 0.1 % of them is none */
            }
}

TEST(test_packets_hold_whole_blocks)
{
    static const uint32_t BLOCKS[] = {18, 66, 130, 1000, PAYLOAD};
    for (size_t i = 0; i < sizeof BLOCKS / sizeof *BLOCKS; i++) {
        SCOPED_NETWORK *network = open_network(3, 2, 500, ROOM, 60 + i);
        network_set_noise(network, (struct sim_noise){.loss = 0.02, .duplicate = 0.05, .reorder = 0.05});
        struct cl_qos qos = {.blocks = {.encoded_bytes = BLOCKS[i], .value_bytes = 256, .length = 1}};
        CHECK_EQ(exchange(network, 2, 200000, qos), 0);
    }
    for (size_t i = 0; i < sizeof BLOCKS / sizeof *BLOCKS; i++) {
        SCOPED_NETWORK *network = open_network(3, 2, 500, ROOM, 70 + i);
        network_set_noise(network, (struct sim_noise){.loss = 0.02});
        struct cl_qos qos = may_lose(0.05);
        qos.blocks = (struct cl_blocks){.encoded_bytes = BLOCKS[i], .value_bytes = 256, .length = 1};
        CHECK(exchange(network, 4, 200000, qos) > 0);
    }
}

TEST(test_everything_at_once)
{
    for (uint64_t i = 0; i <= 20; i++) {
        uint64_t seed = i < 20 ? i : 1245; /* this seed once hung: the first packet to a wary receiver was given up */
        SCOPED_NETWORK *network = open_network(3, 1 + seed % 2, 200, seed % 3 ? ROOM : 60000, 100 + seed);
        network_set_noise(network,
                          (struct sim_noise){.loss = 0.03, .reorder = 0.1, .reorder_ns = 2000000, .duplicate = 0.1});
        network->sleep_ns = seed % 4 ? 0 : 3000000;
        exchange(network, 5, 150000, may_lose(0.05));
    }
}

/* The network keeps a part of the packets back until long after their messages were ended without them. */
TEST(test_late_packets_are_not_counted)
{
    uint64_t late = 0; /* none to three on a host, by chance */
    for (uint64_t seed = 1; seed <= 4; seed++) {
        SCOPED_NETWORK *network = open_network(2, 1, 1000, ROOM, seed);
        network_set_noise(network, (struct sim_noise){.reorder = 0.02, .reorder_ns = 100000000});
        CHECK(exchange(network, 10, 300000, may_lose(0.1)) > 0);
        late += stats(network, 0)->packets_late;
    }
    CHECK(late > 0);
}

static uint8_t late_packet[2000];
static size_t late_length;

/* Keeps the sixth packet of a message back, and loses every STOP. */
static bool keep_one_and_lose_stops(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)network;
    uint8_t kind = cl_packet_kind(datagram->head);
    if (from == 0 && kind == CL_PACKET_DATA && cl_load_u32(datagram->head + 20) == 5 * PAYLOAD) {
        if (!late_length)
            late_length = sim_driver_flatten(late_packet, datagram);
        return true;
    }
    return kind == CL_PACKET_STOP;
}

/* A packet comes after its message was ended without it and its group was closed, and before the sender knows: to
 * acknowledge it would tell the sender that it counts. */
TEST(test_late_packets_of_closed_groups_are_not_counted)
{
    SCOPED_NETWORK *network = open_network(2, 1, 1000, ROOM, 8);
    SCOPED_TRANSFER *t = make(network, 0, 1, 0, 200 * PAYLOAD, may_lose(0.1));
    late_length = 0;
    network->drops = keep_one_and_lose_stops;
    post_send(t);
    post_receive(t);
    uint64_t until_us = network_now_us(network) + SECOND_US;
    while (!t->receiver.done && network_step(network, until_us))
        ;
    CHECK(t->receiver.done && !t->sender.done);
    CHECK_EQ(t->receiver.count, 1);
    CHECK(late_length > 0);
    cl_endpoint_cancel(network->hosts[1].endpoint, 9, UINT32_MAX);
    cl_endpoint_receive(network->hosts[1].endpoint, late_packet, late_length, false, 0, network_now_us(network));
    CHECK_EQ(stats(network, 1)->packets_late, 1);
    network_wake(network, 1);
    network_run_until(network, network_now_us(network) + 10000);
    network->drops = NULL;
    CHECK(run_until_done(&t, 1, SECOND_US));
    CHECK_EQ(check_ended(t), 1);
}

TEST(test_small_messages_lose_nothing)
{
    SCOPED_NETWORK *network = open_network(3, 1, 1000, ROOM, 6);
    network_set_noise(network, (struct sim_noise){.loss = 0.2});
    CHECK_EQ(exchange(network, 20, 9 * PAYLOAD - 30, may_lose(0.1)), 0); /* 9 packets */
}

TEST(test_long_messages)
{
    for (uint64_t seed = 0; seed < 6; seed++) { /* three STOP packets each, and many of them lost */
        SCOPED_NETWORK *network = open_network(2, 1, 0, ROOM, seed);
        network_set_noise(network, (struct sim_noise){.loss = 0.3});
        CHECK(exchange(network, 1, 7500 * PAYLOAD, may_lose(0.4)) > 0);
    }
}

TEST(test_a_late_receiver_loses_nothing)
{
    static const size_t STASHES[] = {0, 30000, 200000};
    for (size_t i = 0; i < 3; i++)
        for (uint32_t late_us = 1; late_us < 100000; late_us *= 7) {
            SCOPED_NETWORK *network = open_network(2, 1, 100, STASHES[i], 11);
            SCOPED_TRANSFER *t = make(network, 0, 1, 0, 100 * PAYLOAD, may_lose(0.5));
            post_send(t);
            network_run_until(network, network_now_us(network) + late_us);
            post_receive(t);
            CHECK(run_until_done(&t, 1, 5 * SECOND_US));
            CHECK_EQ(check_ended(t), 0);
        }
}

/* The receive is posted at any moment of the arrival, also between a TAIL and packets refused before it. */
TEST(test_a_receive_posted_in_between)
{
    for (uint32_t late_us = 100; late_us < 4500; late_us += 40)
        for (size_t lossy = 0; lossy < 2; lossy++) {
            SCOPED_NETWORK *network = open_network(2, 1, 100, late_us % 3 ? 0 : 20000, 17 + late_us);
            network_set_noise(network, (struct sim_noise){.loss = lossy ? 0.3 : 0});
            SCOPED_TRANSFER *t = make(network, 0, 1, 0, 30 * PAYLOAD, may_lose(0.5));
            post_send(t);
            network_run_until(network, network_now_us(network) + late_us);
            post_receive(t);
            CHECK(run_until_done(&t, 1, 10 * SECOND_US));
            uint32_t missing = check_ended(t);
            CHECK(lossy || missing == 0);
        }
}

TEST(test_a_path_dies)
{
    SCOPED_NETWORK *network = open_network(2, 2, 200, ROOM, 13);
    network_run_until(network, network_now_us(network) + 100000);
    SCOPED_TRANSFER *t = make(network, 0, 1, 0, 1000 * PAYLOAD, may_lose(0.1));
    post_send(t);
    post_receive(t);
    network_run_until(network, network_now_us(network) + 10000);
    network_egress(network, 0, 1)->down = network_ingress(network, 0, 1)->down = 1;
    CHECK(run_until_done(&t, 1, 5 * SECOND_US));
    CHECK(check_ended(t) > 0);
}

TEST(test_bounds_that_differ)
{
    static const double PAIRS[][2] = {{0.1, 0}, {0.1, 0.2}, {0.2, 0.1}};
    for (size_t i = 0; i < 3; i++) {
        SCOPED_NETWORK *network = open_network(2, 1, 1000, ROOM, 14);
        network_set_noise(network, (struct sim_noise){.loss = 0.3});
        SCOPED_TRANSFER *t = make(network, 0, 1, 0, 200 * PAYLOAD, may_lose(PAIRS[i][0]));
        post_send(t);
        t->qos = may_lose(PAIRS[i][1]);
        post_receive(t);
        CHECK(run_until_done(&t, 1, 5 * SECOND_US));
        CHECK(t->sender.status == CL_EMISMATCH || t->receiver.status == CL_EMISMATCH);
    }
}

TEST(test_what_is_refused)
{
    SCOPED_NETWORK *network = open_network(2, 1, 1000, ROOM, 15);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    struct cl_message_id id = {9, 1, 0};
    uint64_t map = 0;
    uint8_t byte = 0;
    struct cl_qos too_much = {.loss_bound = CL_LOSS_BOUND_MAX + 1e-6},
                  no_grain = {.loss_bound = 1e-06, .protect = &map}, none = {.priority = CL_CLASS_YIELDS + 1};
    struct cl_qos wide = {.blocks = {.encoded_bytes = PAYLOAD + 1}}; /* no packet holds a block */
    const struct cl_qos *const BAD[] = {&too_much, &no_grain, &none, &wide};
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(cl_endpoint_post_send(endpoint, 1, id, &byte, 1, BAD[i], 0, NULL), CL_EINVAL);
        CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, id, (struct cl_sink){.target = &byte}, 1, BAD[i], 0, NULL),
                 CL_EINVAL);
    }
}

/* A peer that ends in the middle takes its messages with it, and the sanitizer finds no leak. */
TEST(test_peers_and_groups_go)
{
    SCOPED_NETWORK *network = open_network(3, 1, 100, ROOM, 16);
    network_set_noise(network, (struct sim_noise){.loss = 0.1});
    SCOPED_TRANSFER *t = make(network, 0, 1, 0, 500 * PAYLOAD, may_lose(0.2));
    SCOPED_TRANSFER *u = make(network, 2, 1, 0, 500 * PAYLOAD, (struct cl_qos){.loss_bound = 0.001, .deadline_us = 10});
    post_send(t);
    post_receive(t);
    post_send(u);
    post_receive(u);
    network_run_until(network, network_now_us(network) + 20000);
    cl_endpoint_peer_lost(network->hosts[1].endpoint, 0);
    cl_endpoint_cancel(network->hosts[1].endpoint, 9, UINT32_MAX);
    network_run_until(network, network_now_us(network) + SECOND_US);
}

/* With small datagrams a message is told about in several STOP packets, none of them longer than the others. */
TEST(test_no_datagram_is_too_long)
{
    enum { BYTES = 200, SMALL_PAYLOAD = BYTES - CL_PACKET_HEAD_BYTES, PACKETS = 3000 };
    struct cl_endpoint *endpoints[2];
    struct cl_datagram batch[32];
    struct cl_completion completion;
    struct end ends[2] = {0};
    static uint8_t data[PACKETS * SMALL_PAYLOAD], target[PACKETS * SMALL_PAYLOAD], bytes[2 * BYTES + CL_HEAD_BYTES_MAX];
    uint32_t sent = 0, stops = 0;
    for (uint16_t self = 0; self < 2; self++) {
        struct cl_endpoint_config config = {
            .self = self, .epoch = 1, .datagram_bytes = BYTES, .unexpected_limit_bytes = ROOM};
        CHECK_EQ(cl_endpoint_create(&config, &endpoints[self]), CL_OK);
        CHECK_EQ(cl_endpoint_add_peer(endpoints[self], !self, 1, NULL), CL_OK);
    }
    struct cl_qos qos = may_lose(0.2);
    struct cl_message_id id = {9, 1, 0};
    cl_endpoint_post_send(endpoints[0], 1, id, data, sizeof data, &qos, 1, &ends[0]);
    cl_endpoint_post_receive(endpoints[1], 0, id, (struct cl_sink){.target = target}, sizeof data, &qos, 1, &ends[1]);
    for (uint64_t now_us = 100; now_us < 5 * SECOND_US && !(ends[0].done && ends[1].done); now_us += 100)
        for (int self = 0; self < 2; self++) {
            cl_endpoint_timeout(endpoints[self], now_us);
            size_t count = cl_endpoint_send(endpoints[self], now_us, batch, 32);
            for (size_t i = 0; i < count; i++) {
                struct cl_packet packet;
                size_t length = sim_driver_flatten(bytes, &batch[i]);
                CHECK(length <= BYTES);
                CHECK(cl_packet_decode(&packet, bytes, length));
                stops += packet.kind == CL_PACKET_STOP;
                if (packet.kind != CL_PACKET_DATA || ++sent % 20)
                    cl_endpoint_receive(endpoints[!self], bytes, length, false, now_us, now_us);
            }
            while (cl_endpoint_next_completion(endpoints[self], &completion)) {
                struct end *end = completion.context;
                *end = (struct end){.done = true, .status = completion.status, .count = completion.missing_count};
            }
        }
    CHECK(ends[0].done && ends[1].done);
    CHECK_EQ(ends[0].status, CL_OK);
    CHECK_EQ(ends[0].count, ends[1].count);
    CHECK(ends[0].count > 100);
    CHECK(stops >= 3);
    for (int self = 0; self < 2; self++)
        cl_endpoint_destroy(endpoints[self]);
}
