/* Peers that are lost and live: met again, over the network of network.h. */
#include "protocol/endpoint.h"

#include "tests/transfer.h"

static uint32_t incarnation_of(const struct network *network, uint32_t host, uint16_t peer, int expected)
{
    uint32_t incarnation = UINT32_MAX;
    CHECK_EQ(cl_endpoint_incarnation(network->hosts[host].endpoint, peer, &incarnation), expected);
    return incarnation;
}

static void revive(struct network *network, uint32_t host, uint16_t peer, uint32_t incarnation)
{
    CHECK_EQ(cl_endpoint_revive_peer(network->hosts[host].endpoint, peer, incarnation), CL_OK);
    network_wake(network, host);
}

/* Two hosts that have exchanged messages; then host 1 pauses for longer than the peer timeout, and host 0 loses it. */
static struct network *one_is_lost(uint16_t paths)
{
    struct network *network = network_new(2, paths, 200, 150, ROOM, 31);
    SCOPED_TRANSFER *there = transfer_new(0, 1, 0, 300000), *back = transfer_new(1, 0, 0, 300000);
    post(network, there, 1);
    post(network, back, 1);
    CHECK(network_run_completions(network, 2, network_now_us(network) + SECOND_US));
    SCOPED_TRANSFER *waited_for = transfer_new(1, 0, 0, 1000);
    post_receive(network, waited_for, 2);
    network_sleep(network, 1, 4 * SECOND_US);
    network_run_until(network, network_now_us(network) + 5 * SECOND_US);
    CHECK_EQ(network->hosts[0].last_status, CL_EPEERLOST);
    CHECK(!network_sees(network, 0, 1));
    CHECK(network_sees(network, 1, 0));
    return network;
}

static void check_transfers(struct network *network, uint32_t sequence)
{
    for (uint16_t from = 0; from < 2; from++) {
        SCOPED_TRANSFER *transfer = transfer_new(from, !from, 0, 300000);
        uint32_t done = network->hosts[0].completed;
        post_send(network, transfer, sequence + from, 0);
        post_receive(network, transfer, sequence + from);
        uint64_t until_us = network_now_us(network) + SECOND_US;
        while (network->hosts[0].completed == done && network_step(network, until_us))
            ;
        network_run_until(network, network_now_us(network) + 10000);
        CHECK_EQ(network->hosts[0].last_status, CL_OK);
        CHECK_EQ(network->hosts[1].last_status, CL_OK);
        CHECK(intact(transfer));
    }
}

TEST(test_a_lost_peer_is_met_again)
{
    for (uint16_t paths = 1; paths <= 3; paths++) {
        SCOPED_NETWORK *network = one_is_lost(paths);
        CHECK_EQ(incarnation_of(network, 0, 1, CL_EPEERLOST), 0);
        CHECK_EQ(incarnation_of(network, 1, 0, CL_OK), 0);
        revive(network, 0, 1, 1);
        network_run_until(network, network_now_us(network) + 50000); /* the other end comes later */
        revive(network, 1, 0, 1);
        check_transfers(network, 3);
        CHECK_EQ(incarnation_of(network, 0, 1, CL_OK), 1);
        CHECK_EQ(incarnation_of(network, 1, 0, CL_OK), 1);
        revive(network, 0, 1, 1); /* it has begun: nothing changes */
        revive(network, 1, 0, 0);
        check_transfers(network, 5);
    }
}

TEST(test_a_peer_is_lost_and_met_often)
{
    SCOPED_NETWORK *network = one_is_lost(1);
    for (uint32_t incarnation = 1; incarnation < 5; incarnation++) {
        revive(network, 0, 1, incarnation);
        revive(network, 1, 0, incarnation);
        check_transfers(network, 10 * incarnation);
        cl_endpoint_peer_lost(network->hosts[incarnation % 2].endpoint, incarnation % 2 == 0);
    }
}

/* The end that has not lost the other gives up its messages, too. */
TEST(test_messages_in_flight_end_with_the_incarnation)
{
    SCOPED_NETWORK *network = one_is_lost(1);
    SCOPED_TRANSFER *unheard = transfer_new(1, 0, 0, 50000);
    uint32_t failed = network->hosts[1].failed;
    post_send(network, unheard, 7, 0);
    revive(network, 1, 0, 1);
    network_run_until(network, network_now_us(network) + 1000);
    CHECK_EQ(network->hosts[1].failed, failed + 1);
    CHECK_EQ(network->hosts[1].last_status, CL_EPEERLOST);
}

static uint8_t recorded[64][2000];
static uint32_t recorded_lengths[64], recorded_count;

static void record(struct network *network, struct sim_datagram *datagram)
{
    (void)network;
    if (datagram->to == 1 && recorded_count < 64) {
        memcpy(recorded[recorded_count], datagram->bytes, datagram->length);
        recorded_lengths[recorded_count++] = datagram->length;
    }
}

TEST(test_packets_of_a_former_incarnation_are_foreign)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 32);
    recorded_count = 0;
    network->meddle = record;
    check_transfers(network, 1);
    network->meddle = NULL;
    CHECK_EQ(recorded_count, 64);
    revive(network, 0, 1, 1);
    revive(network, 1, 0, 1);
    struct cl_endpoint *endpoint = network->hosts[1].endpoint;
    uint64_t foreign = cl_endpoint_stats(endpoint)->packets_foreign;
    for (uint32_t i = 0; i < recorded_count; i++)
        cl_endpoint_receive(endpoint, recorded[i], recorded_lengths[i], false, 0, network_now_us(network));
    CHECK_EQ(cl_endpoint_stats(endpoint)->packets_foreign, foreign + recorded_count);
    check_transfers(network, 9);
}

static struct cl_path_stats path_of(const struct network *network)
{
    struct cl_path_stats path;
    CHECK_EQ(cl_endpoint_read_paths(network->hosts[0].endpoint, 1, &path, 1), 1);
    return path;
}

TEST(test_a_new_incarnation_keeps_the_size_of_packets)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 34);
    for (uint16_t host = 0; host < 2; host++)
        CHECK_EQ(cl_endpoint_cut_peer(network->hosts[host].endpoint, !host, 800), CL_OK);
    CHECK_EQ(path_of(network).datagram_bytes, 840);
    revive(network, 0, 1, 1);
    revive(network, 1, 0, 1);
    CHECK_EQ(path_of(network).datagram_bytes, 840);
    check_transfers(network, 1);
}

static void read_paths(const struct network *network, struct cl_path_stats paths[2])
{
    CHECK_EQ(cl_endpoint_read_paths(network->hosts[0].endpoint, 1, paths, 2), 2);
}

/* Who has paused a path does not know of incarnations. */
TEST(test_a_new_incarnation_keeps_a_pause)
{
    enum { PROBES_MOST = 20 }; /* of 600,000 bytes, half of the packets would be 200 */
    struct cl_path_stats before[2], after[2];
    SCOPED_NETWORK *network = one_is_lost(2);
    CHECK_EQ(cl_endpoint_pause(network->hosts[0].endpoint, 1, 1, true), CL_OK);
    revive(network, 0, 1, 1);
    revive(network, 1, 0, 1);
    read_paths(network, before);
    check_transfers(network, 3);
    check_transfers(network, 5);
    read_paths(network, after);
    CHECK(after[0].packets_sent > before[0].packets_sent + 400);
    CHECK(after[1].packets_sent < before[1].packets_sent + PROBES_MOST);
    CHECK_EQ(cl_endpoint_pause(network->hosts[0].endpoint, 1, 1, false), CL_OK);
    check_transfers(network, 7);
    read_paths(network, after);
    CHECK(after[1].packets_sent > before[1].packets_sent + PROBES_MOST);
}

/* The counters of a path never go back. */
TEST(test_counters_go_on_in_a_new_incarnation)
{
    struct cl_path_stats before[2], after[2];
    SCOPED_NETWORK *network = one_is_lost(2);
    SCOPED_TRANSFER *lossy = transfer_new(0, 1, 0, 300000);
    revive(network, 0, 1, 1);
    revive(network, 1, 0, 1);
    network_egress(network, 0, 1)->down = 1;
    post(network, lossy, 3);
    network_run_until(network, network_now_us(network) + SECOND_US);
    network_egress(network, 0, 1)->down = 0;
    CHECK(intact(lossy));
    read_paths(network, before);
    CHECK(before[1].deaths > 0 && before[1].packets_lost > 0);
    for (uint32_t incarnation = 2; incarnation < 4; incarnation++) {
        revive(network, 0, 1, incarnation);
        revive(network, 1, 0, incarnation);
        read_paths(network, after);
        for (uint32_t path = 0; path < 2; path++) {
            CHECK_EQ(after[path].packets_sent, before[path].packets_sent);
            CHECK_EQ(after[path].packets_lost, before[path].packets_lost);
            CHECK_EQ(after[path].packets_received, before[path].packets_received);
            CHECK_EQ(after[path].deaths, before[path].deaths);
            CHECK_EQ(after[path].heard_us, before[path].heard_us);
            CHECK(!after[path].is_answered && !after[path].is_dead);
        }
    }
    check_transfers(network, 5);
    read_paths(network, after);
    CHECK(after[0].packets_sent > before[0].packets_sent && after[0].packets_received > before[0].packets_received);
}

static bool drop(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)network;
    (void)from;
    (void)datagram;
    return true;
}

/* Its first PING is lost, and the former incarnation has been asked in vain for as often as a peer is greeted. */
TEST(test_a_new_incarnation_is_greeted_anew)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 35);
    network->drops = drop;
    network_run_until(network, network_now_us(network) + 30 * SECOND_US);
    revive(network, 0, 1, 1);
    revive(network, 1, 0, 1);
    network_run_until(network, network_now_us(network) + 10000);
    network->drops = NULL;
    network_run_until(network, network_now_us(network) + 10 * SECOND_US);
    CHECK(path_of(network).is_answered);
}

TEST(test_an_unknown_peer)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 33);
    uint32_t incarnation;
    CHECK_EQ(cl_endpoint_revive_peer(network->hosts[0].endpoint, 7, 1), CL_EINVAL);
    CHECK_EQ(cl_endpoint_incarnation(network->hosts[0].endpoint, 7, &incarnation), CL_EINVAL);
}
