/* Whole endpoints over the virtual network of network.h. Every scenario is deterministic. */
#include "protocol/endpoint.h"

#include "protocol/endpoint_state.h"
#include "protocol/packet.h"
#include "tests/transfer.h"

/* The retransmissions of a host, all of which have a reason. */
static struct cl_engine_stats explained(const struct network *network, uint32_t host)
{
    struct cl_engine_stats stats = *cl_endpoint_stats(network->hosts[host].endpoint);
    CHECK_EQ(stats.packets_retransmitted, stats.retransmitted_lost + stats.retransmitted_refused +
                                              stats.retransmitted_probes + stats.retransmitted_early);
    return stats;
}

/* All hosts send each other `count` messages of about `length` bytes; everything has to arrive within `limit_us`. */
static void all_to_all(struct network *network, uint32_t count, uint32_t length, uint64_t limit_us)
{
    uint32_t hosts = network->host_count, total = hosts * (hosts - 1) * count, made = 0;
    struct transfer **transfers = malloc(total * sizeof(struct transfer *));
    for (uint32_t from = 0; from < hosts; from++)
        for (uint32_t to = 0; to < hosts; to++)
            for (uint32_t index = 0; from != to && index < count; index++)
                transfers[made++] = transfer_new(from, to, index, length + index);
    for (uint32_t i = 0; i < total; i++)
        post(network, transfers[i], 1);

    uint64_t start_us = network_now_us(network);
    CHECK(network_run_completions(network, 2 * (hosts - 1) * count, start_us + limit_us));
    CHECK_EQ(network_failures(network), 0);
    finish_transfers(transfers, total);
    free(transfers);
}

TEST(test_clean_network)
{
    SCOPED_NETWORK *network = network_new(3, 1, 1000, 150, ROOM, 1);
    all_to_all(network, 5, 200000, SECOND_US);
    const struct cl_engine_stats *stats = cl_endpoint_stats(network->hosts[0].endpoint);
    CHECK_EQ(stats->packets_retransmitted, 0);
    CHECK_EQ(stats->packets_foreign, 0);
    CHECK_EQ(stats->packets_duplicate, 0);
    CHECK_EQ(stats->payload_bytes_received, stats->payload_bytes_sent);
}

TEST(test_loss)
{
    static const double LOSSES[] = {0.01, 0.1, 0.3};
    for (size_t i = 0; i < sizeof(LOSSES) / sizeof(LOSSES[0]); i++) {
        SCOPED_NETWORK *network = network_new(3, 1, 1000, 150, ROOM, 2 + i);
        network_set_noise(network, (struct sim_noise){.loss = LOSSES[i]});
        all_to_all(network, 4, 100000, 5 * SECOND_US);
        CHECK(explained(network, 0).retransmitted_lost > 0);
        CHECK_EQ(explained(network, 0).retransmitted_refused, 0);
        CHECK(explained(network, 1).retransmitted_lost <= explained(network, 1).packets_lost);
    }
}

TEST(test_reordering_and_duplication)
{
    SCOPED_NETWORK *network = network_new(3, 1, 1000, 150, ROOM, 3);
    network_set_noise(network,
                      (struct sim_noise){.reorder = 0.2, .reorder_ns = 300000, .duplicate = 0.2, .loss = 0.02});
    all_to_all(network, 4, 100000, 2 * SECOND_US);
    const struct cl_engine_stats *stats = cl_endpoint_stats(network->hosts[0].endpoint);
    CHECK(stats->packets_replayed > 0);
    CHECK_EQ(stats->packets_forged, 0);
}

enum { CUT_BYTES = 800 };

/* The largest payload between hosts 0 and 1, and between others. */
static bool measure(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    uint32_t *largest = (uint32_t *)network->argument + (from + datagram->peer != 1);
    *largest = datagram->payload_length > *largest ? datagram->payload_length : *largest;
    return false;
}

/* Two hosts of which one can send less than the other. */
TEST(test_packets_are_as_large_as_both_ends_take)
{
    SCOPED_NETWORK *network = network_new(3, 1, 1000, 150, 20000, 23); /* some packets are unexpected */
    uint32_t largest[2] = {0}, full = network->hosts[0].endpoint->payload_bytes;
    CHECK_EQ(cl_endpoint_cut_peer(network->hosts[0].endpoint, 1, CUT_BYTES), CL_OK);
    CHECK_EQ(cl_endpoint_cut_peer(network->hosts[1].endpoint, 0, CUT_BYTES), CL_OK);
    CHECK_EQ(cl_endpoint_cut_peer(network->hosts[0].endpoint, 3, CUT_BYTES), CL_EINVAL);
    CHECK_EQ(cl_endpoint_cut_peer(network->hosts[0].endpoint, 1, 0), CL_EINVAL);
    CHECK_EQ(cl_endpoint_cut_peer(network->hosts[0].endpoint, 1, CUT_BYTES + 4), CL_EINVAL);
    CHECK_EQ(cl_endpoint_cut_peer(network->hosts[0].endpoint, 1, full + 8), CL_EINVAL);
    network_set_noise(network, (struct sim_noise){.loss = 0.05});
    network->drops = measure;
    network->argument = largest;
    all_to_all(network, 4, 100000, 5 * SECOND_US);
    CHECK_EQ(largest[0], CUT_BYTES);
    CHECK_EQ(largest[1], full);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQ(cl_endpoint_stats(network->hosts[i].endpoint)->packets_foreign, 0);
}

/* After the first spurious losses the thresholds adapt: few packets are sent twice although every fifth is late. */
TEST(test_reordering_costs_little)
{
    SCOPED_NETWORK *network = network_new(2, 1, 100, 300, ROOM, 4);
    network_set_noise(network, (struct sim_noise){.reorder = 0.2, .reorder_ns = 1000000});
    all_to_all(network, 4, 1 << 20, 3 * SECOND_US);
    const struct cl_engine_stats *stats = cl_endpoint_stats(network->hosts[0].endpoint);
    CHECK(stats->packets_spurious > 0);
    CHECK(stats->packets_retransmitted * 50 < stats->packets_sent);
}

/* Packets so late that acknowledgements have no range left for them: all of that is noticed is that few losses are
 * known to have been none. Copies are not sent for ever. */
TEST(test_reordering_beyond_the_ranges)
{
    uint64_t took_us[2];
    for (int late = 0; late < 2; late++) {
        SCOPED_NETWORK *network = network_new(2, 1, 1000, 300, ROOM, 4);
        network_set_noise(network, (struct sim_noise){.reorder = late ? 0.2 : 0, .reorder_ns = 3000000});
        struct transfer *transfer = transfer_new(0, 1, 0, 16 << 20);
        uint64_t start_us = network_now_us(network);
        post(network, transfer, 1);
        CHECK(network_run_completions(network, 1, start_us + SECOND_US));
        took_us[late] = network_now_us(network) - start_us;
        finish_transfers(&transfer, 1);
        const struct cl_engine_stats *stats = cl_endpoint_stats(network->hosts[0].endpoint);
        uint64_t duplicates = cl_endpoint_stats(network->hosts[1].endpoint)->packets_duplicate;
        if (late) {
            CHECK(network->hosts[1].endpoint->peers.list[0]->paths[0].ack.floor > 0);
            CHECK(stats->packets_lost > 3 * stats->packets_spurious);
        }
        CHECK(late == (duplicates > 0));
        CHECK(duplicates * 5 < stats->packets_sent);
    }
    CHECK(took_us[1] * 4 < took_us[0] * 5);
}

TEST(test_odd_lengths)
{
    static const uint32_t LENGTHS[] = {0, 1, 7, 8, 1431, 1432, 1433, 2863, 2864, 2865, 100001};
    SCOPED_NETWORK *network = network_new(2, 1, 1000, 150, ROOM, 5);
    uint32_t count = sizeof(LENGTHS) / sizeof(LENGTHS[0]);
    struct transfer *transfers[sizeof(LENGTHS) / sizeof(LENGTHS[0])];
    for (uint32_t i = 0; i < count; i++) {
        transfers[i] = transfer_new(0, 1, i, LENGTHS[i]);
        post_send(network, transfers[i], 1, (uint8_t)(i % 8));
        post_receive(network, transfers[i], 1);
    }
    CHECK(network_run_completions(network, count, network_now_us(network) + SECOND_US));
    finish_transfers(transfers, count);
}

/* A message whose very last packet is lost is whole within milliseconds, not after some long timeout. */
TEST(test_tail_loss_recovers_fast)
{
    SCOPED_NETWORK *network = network_new(2, 1, 1000, 150, ROOM, 6);
    network_run_until(network, network_now_us(network) + 10000);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 1000);
    post_receive(network, t, 1);
    network_set_noise(network, (struct sim_noise){.loss = 1});
    post_send(network, t, 1, 0);
    uint64_t start_us = network_now_us(network);
    network_run_until(network, start_us + 500);
    network_set_noise(network, (struct sim_noise){.loss = 0});
    CHECK(network_run_completions(network, 1, start_us + 5000));
    CHECK(intact(t));
    CHECK_EQ(cl_endpoint_stats(network->hosts[0].endpoint)->packets_retransmitted, 1);
    CHECK_EQ(explained(network, 0).retransmitted_probes, 1);
}

/* So the engine's thread wakes up when the last message of a peer ends, and not later. */
TEST(test_a_receiver_knows_how_many_packets_it_lacks)
{
    enum { PACKETS = 20, MESSAGES = 3 };
    SCOPED_NETWORK *network = network_new(2, 1, 100, 150, ROOM, 29);
    struct cl_endpoint *receiver = network->hosts[1].endpoint;
    CHECK_EQ(cl_endpoint_lacking(receiver), UINT64_MAX);
    struct transfer *transfers[MESSAGES];
    for (uint32_t i = 0; i < MESSAGES; i++) {
        transfers[i] = transfer_new(0, 1, i, PACKETS * receiver->payload_bytes);
        post(network, transfers[i], 1);
    }
    CHECK_EQ(cl_endpoint_lacking(receiver), UINT64_MAX); /* no packet has come */
    uint64_t before = MESSAGES * PACKETS, asked = 0;
    for (uint64_t now_us = network_now_us(network); !network_run_completions(network, MESSAGES, now_us);) {
        uint64_t lacking = cl_endpoint_lacking(receiver);
        CHECK(lacking == UINT64_MAX || lacking < before);
        if (lacking != UINT64_MAX) {
            before = lacking;
            asked++;
        }
        now_us += 200;
    }
    finish_transfers(transfers, MESSAGES);
    CHECK(asked > MESSAGES * PACKETS / 4);
    CHECK_EQ(before, 0);
    CHECK_EQ(cl_endpoint_lacking(receiver), UINT64_MAX);
}

/* A receive that its group gives up lacks nothing any more. */
TEST(test_a_receive_that_has_failed_lacks_nothing)
{
    SCOPED_NETWORK *network = network_new(2, 1, 100, 150, ROOM, 30);
    struct cl_endpoint *receiver = network->hosts[1].endpoint;
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 50 * receiver->payload_bytes);
    post(network, t, 1);
    network_run_until(network, network_now_us(network) + 2000);
    CHECK(receiver->peers.list[0]->lacking > 0);
    CHECK(receiver->peers.list[0]->lacking < 50);
    cl_endpoint_peer_lost(receiver, 0);
    CHECK_EQ(receiver->peers.list[0]->lacking, 0);
}

/* A receiver that does not run for 50 ms costs a few probes, not a second copy of every packet. */
TEST(test_sleeping_receiver_costs_probes_only)
{
    SCOPED_NETWORK *network = network_new(2, 1, 1000, 600, ROOM, 7);
    network_run_until(network, network_now_us(network) + 10000);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 100000);
    post_receive(network, t, 1);
    network_run_until(network, network_now_us(network) + 1000);
    network_sleep(network, 1, 50000);
    post_send(network, t, 1, 0);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 60000));
    CHECK(intact(t));
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_retransmitted <= 6);
}

/* Rank 2 enters 500 ms late. Nobody fails or floods it, and its unexpected packets are there at once. */
TEST(test_late_receiver)
{
    SCOPED_NETWORK *network = network_new(3, 1, 200, 150, ROOM, 8);
    struct transfer *transfers[2];
    for (uint32_t from = 0; from < 2; from++) {
        transfers[from] = transfer_new(from, 2, 0, 1 << 20);
        post_send(network, transfers[from], 1, 0);
    }
    network_run_until(network, network_now_us(network) + 500000);
    const struct cl_engine_stats *late = cl_endpoint_stats(network->hosts[2].endpoint);
    CHECK_EQ(network->hosts[0].completed, 1); /* there is room for all unexpected packets */
    CHECK_EQ(late->packets_unexpected, 2 * 733);
    for (uint32_t from = 0; from < 2; from++)
        post_receive(network, transfers[from], 1);
    network_run_until(network, network_now_us(network) + 1);
    CHECK_EQ(network->hosts[2].completed, 2);
    CHECK_EQ(late->packets_unexpected_dropped, 0);
    finish_transfers(transfers, 2);
}

/* The same with room for 20 packets only: the senders stop, and go on as soon as the receives are posted. */
TEST(test_little_room_for_unexpected)
{
    SCOPED_NETWORK *network = network_new(3, 1, 200, 150, 30000, 9);
    enum { MESSAGES = 50 };
    struct transfer *transfers[2 * MESSAGES];
    for (uint32_t i = 0; i < 2 * MESSAGES; i++) {
        transfers[i] = transfer_new(i % 2, 2, i / 2, 20000);
        post_send(network, transfers[i], 1, 0);
    }
    network_run_until(network, network_now_us(network) + 100000);
    uint64_t sent = cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent;
    network_run_until(network, network_now_us(network) + 400000);
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent - sent < 20); /* all quiet */
    CHECK(cl_endpoint_stats(network->hosts[2].endpoint)->packets_unexpected_dropped < 300);
    for (uint32_t i = 0; i < 2 * MESSAGES; i++)
        post_receive(network, transfers[i], 1);
    uint64_t posted_us = network_now_us(network);
    CHECK(network_run_completions(network, MESSAGES, posted_us + 110000)); /* 2 MB at 200 Mbit/s take 85 ms */
    finish_transfers(transfers, 2 * MESSAGES);
}

/* No room at all, receives posted one by one, loss: refusals, READYs and data get lost and overtake each other. */
TEST(test_no_room_for_unexpected_with_loss)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, 0, 10);
    network_set_noise(network, (struct sim_noise){.loss = 0.05, .reorder = 0.1, .reorder_ns = 500000});
    enum { MESSAGES = 40 };
    struct transfer *transfers[MESSAGES];
    for (uint32_t i = 0; i < MESSAGES; i++) {
        transfers[i] = transfer_new(0, 1, i, 5000);
        post_send(network, transfers[i], i, 0);
    }
    uint64_t start_us = network_now_us(network);
    for (uint32_t i = MESSAGES; i-- > 0;) { /* last first */
        network_run_until(network, network_now_us(network) + 3000);
        post_receive(network, transfers[i], i);
    }
    CHECK(network_run_completions(network, MESSAGES, start_us + SECOND_US));
    CHECK(explained(network, 0).retransmitted_refused > 0);
    CHECK(explained(network, 0).retransmitted_lost > 0);
    finish_transfers(transfers, MESSAGES);
}

static void run_mismatch(uint32_t sent_length, uint32_t received_length, double loss)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 15);
    network_set_noise(network, (struct sim_noise){.loss = loss});
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 10000), *other = transfer_new(0, 1, 1, 5000);
    t->length = sent_length;
    post_send(network, t, 1, 0);
    t->length = received_length;
    post_receive(network, t, 1);
    post(network, other, 1);
    CHECK(network_run_completions(network, 2, network_now_us(network) + 200000));
    CHECK_EQ(network->hosts[0].failed, 1);
    CHECK_EQ(network->hosts[1].failed, 1);
    CHECK(intact(other));
}

TEST(test_mismatch)
{
    static const uint32_t LENGTHS[][2] = {{10000, 9999}, {9999, 10000}, {0, 1},       {1, 0},
                                          {1432, 1433},  {1433, 1432},  {1432, 2864}, {10000, 1432}};
    for (size_t i = 0; i < sizeof(LENGTHS) / sizeof(LENGTHS[0]); i++) {
        run_mismatch(LENGTHS[i][0], LENGTHS[i][1], 0);
        run_mismatch(LENGTHS[i][0], LENGTHS[i][1], 0.2);
    }
}

TEST(test_cancel)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 18);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 1 << 20), *next = transfer_new(0, 1, 0, 5000);
    post(network, t, 1);
    network_run_until(network, network_now_us(network) + 5000);
    cl_endpoint_cancel(network->hosts[1].endpoint, 9, 1); /* the sender goes on for a while */
    network_run_until(network, network_now_us(network) + 2000);
    cl_endpoint_cancel(network->hosts[0].endpoint, 9, 1);
    post(network, next, 2);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 100000));
    CHECK_EQ(network->hosts[1].completed, 1);
    CHECK(intact(next));
    CHECK(cl_endpoint_stats(network->hosts[1].endpoint)->packets_unexpected ==
          0); /* packets that came late were dropped */

    cl_endpoint_cancel(network->hosts[1].endpoint, 9, UINT32_MAX);
    struct cl_message_id id = {9, 3, 0};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[1].endpoint, 0, id, t->sent, 5, &RELIABLE, 0, NULL), CL_ECLOSED);
}

/* A completion that waits to be fetched is forgotten, too. */
TEST(test_cancel_drops_completions)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 19);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 100);
    post_send(network, t, 1, 0);
    network_run_until(network, network_now_us(network) + 5000);
    struct cl_endpoint *receiver = network->hosts[1].endpoint;
    struct cl_message_id id = {9, 1, 0};
    struct cl_completion completion;
    CHECK_EQ(cl_endpoint_post_receive(receiver, 0, id, (struct cl_sink){.target = t->received}, 100, &RELIABLE,
                                      network_now_us(network), t),
             CL_OK);
    CHECK(intact(t));
    cl_endpoint_cancel(receiver, 9, 1);
    CHECK(!cl_endpoint_next_completion(receiver, &completion));
}

/* A small urgent message overtakes megabytes that were posted before it. */
TEST(test_priority)
{
    SCOPED_NETWORK *network = network_new(2, 1, 100, 150, ROOM, 20);
    SCOPED_TRANSFER *bulk = transfer_new(0, 1, 0, 4 << 20), *urgent = transfer_new(0, 1, 1, 20000);
    post_receive(network, bulk, 1);
    post_receive(network, urgent, 1);
    post_send(network, bulk, 1, 5);
    network_run_until(network, network_now_us(network) + 50000);
    uint64_t start_us = network_now_us(network);
    post_send(network, urgent, 1, 1);
    CHECK(network_run_completions(network, 1, start_us + 20000)); /* the queue in the network is a few ms long */
    CHECK(intact(urgent));
    CHECK(!intact(bulk));
    CHECK(network_run_completions(network, 2, start_us + SECOND_US));
    CHECK(intact(bulk));
}

TEST(test_foreign_packets_change_nothing)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 21);
    network_run_until(network, network_now_us(network) + 10000);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    struct cl_packet good = {
        .kind = CL_PACKET_DATA, .flags = CL_PACKET_LAST, .source = 1, .epoch = 1, .group = 9, .length = 8, .number = 1};
    uint64_t now_us = network_now_us(network), foreign = 0;
    uint8_t bytes[64] = {0};
    for (int i = 0; i < 10; i++) {
        struct cl_packet packet = good;
        size_t length = 48;
        packet.number += (uint32_t)i;
        packet.source = i == 0 ? 0 : i == 1 ? 500 : 1; /* ourselves, nobody */
        packet.epoch = i == 2 ? 0 : 1;
        packet.path = i == 3 ? 7 : i == 4;
        packet.offset = i == 5 ? 8 : 0;           /* not where packets are cut */
        packet.flags = i == 6 ? 0 : packet.flags; /* empty, but not the last one */
        packet.length = i == 6 ? 0 : packet.length;
        packet.kind = i == 7 ? CL_PACKET_ACK : packet.kind;
        packet.offset = i == 7 ? 20 : packet.offset;
        length = i == 6 ? 40 : i == 8 ? 47 : i == 9 ? 39 : length;
        cl_packet_encode(&packet, bytes);
        cl_packet_seal(bytes, bytes + 40, &endpoint->seal, 0, packet.number);
        cl_endpoint_receive(endpoint, bytes, length, false, now_us, now_us);
        CHECK_EQ(cl_endpoint_stats(endpoint)->packets_foreign, ++foreign);
    }
    CHECK_EQ(cl_endpoint_stats(endpoint)->packets_unexpected, 0);
    good.number += 10;
    cl_packet_encode(&good, bytes);
    cl_packet_seal(bytes, bytes + 40, &endpoint->seal, 0, good.number);
    cl_endpoint_receive(endpoint, bytes, 48, false, now_us, now_us);
    CHECK_EQ(cl_endpoint_stats(endpoint)->packets_unexpected, 1);
}

/* Packets of a message are of one length, but for the last: its ends cut it alike. */
TEST(test_short_packets_do_not_fit)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 22);
    network_run_until(network, network_now_us(network) + 10000);
    SCOPED_TRANSFER *t = transfer_new(1, 0, 0, 5000);
    post_receive(network, t, 1);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    struct cl_packet packet = {.kind = CL_PACKET_DATA, .source = 1, .epoch = 1, .group = 9, .sequence = 1, .length = 8};
    packet.number = 100;
    uint8_t bytes[64] = {0};
    cl_packet_encode(&packet, bytes);
    cl_packet_seal(bytes, bytes + 40, &endpoint->seal, 0, packet.number);
    uint64_t now_us = network_now_us(network);
    cl_endpoint_receive(endpoint, bytes, 48, false, now_us, now_us);
    struct cl_completion completion;
    CHECK(cl_endpoint_next_completion(endpoint, &completion));
    CHECK_EQ(completion.status, CL_EMISMATCH);
    CHECK(completion.context == t);
}

static void mutate(struct network *network, struct sim_datagram *packet)
{
    if (network_random(network) > 0.2)
        return;
    for (int flips = 1 + (int)(network_random(network) * 4); flips > 0; flips--) {
        uint32_t at = (uint32_t)(network_random(network) * 32); /* all of the header but the tag */
        packet->bytes[at] = (uint8_t)(packet->bytes[at] ^ 1u << (int)(network_random(network) * 8));
    }
    cl_store_u16(packet->bytes + 6, packet->length - CL_PACKET_HEAD_BYTES); /* the sealed bytes must be there */
    cl_packet_seal(packet->bytes, packet->bytes + CL_PACKET_HEAD_BYTES, &network->hosts[packet->to].endpoint->seal,
                   packet->to, 0);
}

/* Packets with flipped bits and a valid tag break nothing. */
TEST(test_mutated_packets)
{
    SCOPED_NETWORK *network = network_new(3, 2, 200, 150, 100000, 23);
    network_set_noise(network, (struct sim_noise){.loss = 0.02});
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 1 << 20), *back = transfer_new(1, 0, 0, 1 << 20);
    post(network, t, 1);
    post_send(network, back, 1, 0); /* never received: unexpected packets, refusals, READYs */
    network->meddle = mutate;
    network_run_until(network, network_now_us(network) + 300000);
    CHECK(cl_endpoint_stats(network->hosts[1].endpoint)->packets_foreign > 0);
    CHECK(cl_endpoint_stats(network->hosts[1].endpoint)->packets_received > 100);
}

TEST(test_arguments)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 22);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint, *none = NULL;
    struct cl_message_id id = {9, 1, 0};
    uint8_t byte = 0;
    struct cl_sink sink = {.target = &byte};
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 1, 1, NULL), CL_EINVAL);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 5, 0, NULL), CL_EINVAL);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 5, 9, NULL), CL_EINVAL);
    static const uint32_t beyond[] = {8};
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 5, 1, beyond), CL_EINVAL);
    CHECK_EQ(cl_endpoint_post_send(endpoint, 7, id, &byte, 1, &RELIABLE, 0, NULL), CL_EINVAL);
    CHECK_EQ(
        cl_endpoint_post_send(endpoint, 1, id, &byte, 1, &(struct cl_qos){.priority = CL_CLASS_YIELDS + 1}, 0, NULL),
        CL_EINVAL);
    CHECK_EQ(cl_endpoint_post_send(endpoint, 1, id, &byte, 1, &RELIABLE, 0, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_post_send(endpoint, 1, id, &byte, 1, &RELIABLE, 0, NULL), CL_EINVAL);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, id, sink, 1, &RELIABLE, 0, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, id, sink, 1, &RELIABLE, 0, NULL), CL_EINVAL);
    struct cl_endpoint_config config = {.datagram_bytes = 1472, .auth = CL_AUTH_OFF + 1};
    CHECK_EQ(cl_endpoint_create(&config, &none), CL_EINVAL);
    config = (struct cl_endpoint_config){.datagram_bytes = 20};
    CHECK_EQ(cl_endpoint_create(&config, &none), CL_EINVAL);
}

/* Thousands of messages of random sizes, classes and moments, over a network with every fault at once. */
static void run_random(uint64_t seed)
{
    enum { ROUNDS = 25, BATCH = 40 };
    SCOPED_NETWORK *network = network_new(4, (uint16_t)(1 + seed % 2), 500, 100, (seed % 3) * 100000, seed);
    network_set_noise(network,
                      (struct sim_noise){.loss = 0.03, .reorder = 0.05, .reorder_ns = 400000, .duplicate = 0.02});
    network->sleep_ns = seed % 4 == 0 ? 2000000 : 0;
    static struct transfer *transfers[ROUNDS * BATCH];
    uint32_t made = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < BATCH; i++) {
            uint32_t from = (uint32_t)(network_random(network) * 4), step = 1 + (uint32_t)(network_random(network) * 3);
            double size = network_random(network);
            uint32_t length = (uint32_t)(size * size * size * 60000);
            struct transfer *t = transfer_new(from, (from + step) % 4, i, length);
            transfers[made++] = t;
            bool receive_first = network_random(network) < 0.5;
            if (receive_first)
                post_receive(network, t, round);
            post_send(network, t, round, (uint8_t)(network_random(network) * 8));
            if (network_random(network) < 0.3)
                network_run_until(network, network_now_us(network) + (uint64_t)(network_random(network) * 2000));
            if (!receive_first)
                post_receive(network, t, round);
        }
    }
    uint64_t deadline_us = network_now_us(network) + 10 * SECOND_US;
    uint32_t done = 0;
    while (network_step(network, deadline_us)) {
        done = 0;
        for (uint32_t i = 0; i < 4; i++)
            done += network->hosts[i].completed;
        if (done == 2 * made)
            break;
    }
    CHECK_EQ(done, 2 * made);
    CHECK_EQ(network_failures(network), 0);
    uint32_t broken = 0;
    for (uint32_t i = 0; i < made; i++) {
        broken += !intact(transfers[i]);
        transfer_free(transfers[i]);
    }
    if (broken || done != 2 * made)
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
    CHECK_EQ(broken, 0);
}

TEST(test_random_messages)
{
    for (uint64_t seed = 1; seed <= 12; seed++)
        run_random(seed);
}
