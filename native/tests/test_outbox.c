/* Datagrams that a full port refused. */
#include "protocol/outbox.h"

#include "protocol/endpoint_state.h"
#include "protocol/packet.h"
#include "tests/transfer.h"

enum { BATCH = 64, PACKETS = 4 };

static const struct cl_datagram *keep(struct cl_outbox *outbox, uint16_t port, uint16_t number)
{
    static struct cl_datagram datagram;
    datagram = (struct cl_datagram){.port = port, .peer = number};
    CHECK(cl_outbox_keep(outbox, &datagram));
    return &datagram;
}

TEST(test_order_of_each_port)
{
    SCOPED(cl_outbox_free) struct cl_outbox outbox = {0};
    for (uint16_t i = 0; i < 20; i++)
        keep(&outbox, i % 2 ? 3 : 63, i);
    CHECK_EQ(outbox.full, UINT64_C(1) << 3 | UINT64_C(1) << 63);
    CHECK(cl_outbox_take(&outbox, 64) == NULL);
    cl_outbox_release(&outbox, 63);
    CHECK_EQ(outbox.full, UINT64_C(1) << 3);
    CHECK(cl_outbox_take(&outbox, 9) == NULL); /* not all of them would fit */
    for (uint16_t i = 0; i < 20; i += 2)
        CHECK_EQ(cl_outbox_take(&outbox, 10u - i / 2)->peer, i);
    CHECK(cl_outbox_take(&outbox, 64) == NULL);
    keep(&outbox, 63, 100); /* full again */
    CHECK(cl_outbox_take(&outbox, 64) == NULL);
    cl_outbox_release(&outbox, 63);
    cl_outbox_release(&outbox, 3);
    CHECK_EQ(cl_outbox_take(&outbox, 64)->peer, 1);
    for (int i = 0; i < 9; i++)
        CHECK(cl_outbox_take(&outbox, 64) != NULL);
    CHECK_EQ(cl_outbox_take(&outbox, 64)->peer, 100);
    CHECK_EQ(outbox.full | outbox.waiting, 0);
}

static struct cl_endpoint *make(uint16_t self)
{
    struct cl_endpoint_config config = {.auth = CL_AUTH_OFF, .self = self, .datagram_bytes = NETWORK_DATAGRAM_BYTES};
    struct cl_endpoint *endpoint = NULL;
    CHECK_EQ(cl_endpoint_create(&config, &endpoint), CL_OK);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, !self, 1, NULL), CL_OK);
    return endpoint;
}

static void post_packets(struct cl_endpoint *endpoint, uint32_t sequence, const uint8_t *data)
{
    struct cl_message_id id = {9, sequence, 0};
    CHECK_EQ(cl_endpoint_post_send(endpoint, 1, id, data, PACKETS * 1400, &RELIABLE, 1000, NULL), CL_OK);
}

/* Two messages wait for a full port and one of them ends: its packets vanish without counting as lost, those of the
 * other leave in order. */
TEST(test_a_message_ends_while_its_port_is_full)
{
    static uint8_t first[PACKETS * 1400], second[PACKETS * 1400];
    static struct cl_datagram batch[BATCH];
    struct cl_endpoint *endpoint = make(0);
    CHECK_EQ(cl_endpoint_send(endpoint, 1000, batch, BATCH), 1); /* the PING */
    post_packets(endpoint, 1, first);
    post_packets(endpoint, 2, second);
    size_t count = cl_endpoint_send(endpoint, 1000, batch, BATCH);
    CHECK_EQ(count, 2 * PACKETS);
    for (size_t i = 0; i < count; i++)
        cl_endpoint_refuse(endpoint, &batch[i]);
    CHECK_EQ(cl_endpoint_full_ports(endpoint), 1);
    CHECK_EQ(cl_endpoint_send(endpoint, 1100, batch, BATCH), 0);
    cl_endpoint_cancel(endpoint, 9, 1);
    memset(first, 0xFF, sizeof first); /* it is the caller's again */
    cl_endpoint_release_port(endpoint, 0);
    CHECK_EQ(cl_endpoint_send(endpoint, 1200, batch, BATCH), PACKETS);
    for (size_t i = 0; i < PACKETS; i++) {
        struct cl_packet packet;
        CHECK(cl_packet_decode(&packet, batch[i].head, batch[i].head_length + batch[i].payload_length));
        CHECK_EQ(packet.sequence, 2);
        CHECK(batch[i].payload >= second && batch[i].payload < second + sizeof second);
    }
    CHECK_EQ(cl_endpoint_full_ports(endpoint), 0);
    const struct cl_path *path = &endpoint->peers.list[1]->paths[0];
    CHECK_EQ(path->sent.packets - path->sent.pings, PACKETS);
    CHECK_EQ(cl_endpoint_stats(endpoint)->packets_lost, 0);
    cl_endpoint_destroy(endpoint);
}

/* The data of a message moves while its port is full: what has waited leaves from there. */
TEST(test_a_message_moves_while_its_port_is_full)
{
    static uint8_t data[PACKETS * 1400], moved[PACKETS * 1400];
    static struct cl_datagram batch[BATCH];
    struct cl_endpoint *endpoint = make(0);
    CHECK_EQ(cl_endpoint_send(endpoint, 1000, batch, BATCH), 1); /* the PING */
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 7);
    memcpy(moved, data, sizeof data);
    post_packets(endpoint, 1, data);
    post_packets(endpoint, 2, data);
    CHECK(cl_endpoint_is_sending(endpoint, 1, (struct cl_message_id){9, 1, 0}));
    CHECK(!cl_endpoint_is_sending(endpoint, 1, (struct cl_message_id){9, 3, 0}));
    size_t count = cl_endpoint_send(endpoint, 1000, batch, BATCH);
    CHECK_EQ(count, 2 * PACKETS);
    for (size_t i = 0; i < count; i++)
        cl_endpoint_refuse(endpoint, &batch[i]);
    cl_endpoint_move_send(endpoint, 1, (struct cl_message_id){9, 2, 0}, moved);
    cl_endpoint_release_port(endpoint, 0);
    CHECK_EQ(cl_endpoint_send(endpoint, 1200, batch, BATCH), 2 * PACKETS);
    for (size_t i = 0; i < 2 * PACKETS; i++) {
        const uint8_t *from = i < PACKETS ? data : moved;
        CHECK(batch[i].payload >= from && batch[i].payload < from + sizeof data);
        CHECK_EQ(batch[i].payload[0], data[batch[i].payload - from]);
    }
    cl_endpoint_cancel(endpoint, 9, 2);
    CHECK(!cl_endpoint_is_sending(endpoint, 1, (struct cl_message_id){9, 2, 0}));
    cl_endpoint_destroy(endpoint);
}

/* A packet that was declared lost has been sent again elsewhere: the copy of it that a full port refused stays. */
TEST(test_a_lost_packet_does_not_leave)
{
    static uint8_t data[PACKETS * 1400];
    static struct cl_datagram batch[BATCH];
    struct cl_endpoint *endpoint = make(0);
    cl_endpoint_send(endpoint, 1000, batch, BATCH);
    post_packets(endpoint, 1, data);
    size_t count = cl_endpoint_send(endpoint, 1000, batch, BATCH);
    for (size_t i = 0; i < count; i++)
        cl_endpoint_refuse(endpoint, &batch[i]);
    struct cl_path *path = &endpoint->peers.list[1]->paths[0];
    cl_sent_remove(&path->sent, path->sent.next - 1);
    cl_endpoint_release_port(endpoint, 0);
    CHECK_EQ(cl_endpoint_send(endpoint, 1100, batch, BATCH), PACKETS - 1);
    cl_endpoint_destroy(endpoint);
}

/* The port of one path takes nothing for a while, that of the other path works: everything gets through soon. */
TEST(test_a_stuck_port_stops_no_other)
{
    for (uint32_t path = 0; path < 2; path++)
        for (uint32_t after_us = 0; after_us < 60000; after_us += 20000) {
            SCOPED_NETWORK *network = network_new(2, 2, 200, 150, ROOM, 31);
            network_run_until(network, network_now_us(network) + 20000);
            SCOPED_TRANSFER *there = transfer_new(0, 1, 0, 4 << 20), *back = transfer_new(1, 0, 0, 4 << 20);
            uint64_t start_us = network_now_us(network);
            post_receive(network, there, 1);
            post_receive(network, back, 1);
            post_send(network, there, 1, 0);
            post_send(network, back, 1, 0);
            network_run_until(network, start_us + after_us);
            network->full[0] = 1u << path;
            CHECK(network_run_completions(network, 2, start_us + 600000)); /* one path needs 180 ms for all of it */
            CHECK(intact(there) && intact(back));
            CHECK(network_sees(network, 0, 1) && network_sees(network, 1, 0));

            network->full[0] = 0; /* and it is used again */
            network_run_until(network, network_now_us(network) + 200000);
            CHECK(!network->hosts[0].endpoint->peers.list[1]->paths[path].dead);
            CHECK_EQ(cl_endpoint_full_ports(network->hosts[0].endpoint), 0);
        }
}

/* While a port is full the host sleeps: no timer asks for a turn again and again. */
TEST(test_a_full_port_costs_no_turns)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 32);
    network_run_until(network, network_now_us(network) + 20000);
    SCOPED_TRANSFER *there = transfer_new(0, 1, 0, 1 << 20), *back = transfer_new(1, 0, 0, 1 << 20);
    network->full[0] = 1;
    post_receive(network, there, 1);
    post_receive(network, back, 1);
    post_send(network, there, 1, 0);
    post_send(network, back, 1, 0);
    uint64_t steps = 0, end_us = network_now_us(network) + SECOND_US;
    while (network_step(network, end_us))
        steps++;
    CHECK(steps < 2 * SECOND_US / SIM_FULL_US); /* a try in SIM_FULL_US, and few others */
    network->full[0] = 0;
    CHECK(network_run_completions(network, 2, network_now_us(network) + SECOND_US));
    CHECK(intact(there) && intact(back));
}
