/* Peers of an endpoint that die, sleep, leave or never answer, over the network of network.h. */
#include "protocol/endpoint.h"

#include "protocol/endpoint_state.h"
#include "tests/transfer.h"

TEST(test_peer_death)
{
    SCOPED_NETWORK *network = network_new(3, 1, 200, 150, ROOM, 12);
    network_run_until(network, network_now_us(network) + 1500000);
    SCOPED_TRANSFER *to_dead = transfer_new(0, 2, 0, 1 << 20), *from_dead = transfer_new(2, 0, 0, 1000);
    SCOPED_TRANSFER *alive = transfer_new(0, 1, 0, 1000);
    sim_driver_kill(&network->hosts[2].driver);
    uint64_t start_us = network_now_us(network);
    post_send(network, to_dead, 1, 0);
    post_receive(network, from_dead, 1);
    network_run_until(network, start_us + 1000000);
    CHECK_EQ(network->hosts[0].completed, 0);
    network_run_until(network, start_us + 3500000);
    CHECK_EQ(network->hosts[0].completed, 2);
    CHECK_EQ(network->hosts[0].failed, 2);
    CHECK_EQ(network->hosts[0].last_status, CL_EPEERLOST);
    CHECK(!network_sees(network, 0, 2));
    CHECK(network_sees(network, 1, 2)); /* host 1 does not wait for it: it may have left */
    CHECK(network_sees(network, 0, 1));
    struct cl_message_id id = {9, 2, 0};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[0].endpoint, 2, id, to_dead->sent, 5, &RELIABLE, 0, NULL),
             CL_EPEERLOST);
    /* silence was not for lack of trying, but not a flood either */
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent < 250);
    post(network, alive, 3);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 10000));
}

TEST(test_idle_peers_stay_alive)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 13);
    network_run_until(network, network_now_us(network) + 20 * SECOND_US);
    CHECK(network_sees(network, 0, 1));
    CHECK(network_sees(network, 1, 0));
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent < 50);
}

static uint64_t packets_of_all(const struct network *network)
{
    uint64_t packets = 0;
    for (uint32_t i = 0; i < network->host_count; i++)
        packets += cl_endpoint_stats(network->hosts[i].endpoint)->packets_sent;
    return packets;
}

/* Hosts that know each other and wait for nothing send nothing, but for a rare look at a dead path. */
TEST(test_idle_peers_are_not_asked)
{
    SCOPED_NETWORK *network = network_new(8, 2, 200, 150, ROOM, 27);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 1 << 20), *later = transfer_new(0, 1, 1, 1 << 20);
    network_run_until(network, network_now_us(network) + 20000);
    network_egress(network, 0, 1)->down = 1;
    post(network, t, 1);
    network_run_until(network, network_now_us(network) + 5 * SECOND_US);
    CHECK_EQ(network->hosts[1].completed, 1);
    CHECK(cl_peer_list_find(&network->hosts[0].endpoint->peers, 1)->paths[1].dead);
    uint64_t before = packets_of_all(network);
    network_run_until(network, network_now_us(network) + 300 * (uint64_t)SECOND_US);
    CHECK(packets_of_all(network) <= before + 31);
    before = packets_of_all(network) - cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent;
    network_run_until(network, network_now_us(network) + 300 * (uint64_t)SECOND_US);
    CHECK_EQ(packets_of_all(network) - cl_endpoint_stats(network->hosts[0].endpoint)->packets_sent, before);

    /* and all goes on as before */
    network_egress(network, 0, 1)->down = 0;
    post(network, later, 1);
    network_run_until(network, network_now_us(network) + SECOND_US);
    CHECK_EQ(network->hosts[1].completed, 2);
    CHECK(intact(later));
    CHECK(!cl_peer_list_find(&network->hosts[0].endpoint->peers, 1)->paths[1].dead);
}

/* A receive from any source waits for all peers: they are asked, however long they have been silent before. */
TEST(test_a_wanted_tag_keeps_peers_awake)
{
    SCOPED_NETWORK *network = network_new(3, 1, 200, 150, ROOM, 28);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    network_run_until(network, network_now_us(network) + 60 * SECOND_US);
    CHECK(cl_endpoint_want(endpoint, 9 | CL_GROUP_P2P, 5, network_now_us(network)));
    network_wake(network, 0);
    for (int i = 0; i < 100; i++) {
        for (uint16_t peer = 1; peer < 3; peer++)
            CHECK(!cl_endpoint_peer_silent(endpoint, peer, network_now_us(network)));
        network_run_until(network, network_now_us(network) + SECOND_US / 10);
    }
    sim_driver_kill(&network->hosts[2].driver);
    network_run_until(network, network_now_us(network) + 4 * SECOND_US);
    CHECK(!cl_endpoint_peer_silent(endpoint, 1, network_now_us(network)));
    CHECK(cl_endpoint_peer_silent(endpoint, 2, network_now_us(network)));
    cl_endpoint_unwant(endpoint, 9 | CL_GROUP_P2P, 5);
}

/* Lost packets are no silence. Nothing but PINGs tells who waits for a wanted tag that its peers live: there used to be
 * two in a timeout, and a wait at 1 % of loss ended after 40 minutes on average. */
TEST(test_a_wanted_tag_outlives_lost_pings)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 30);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    network_run_until(network, network_now_us(network) + SECOND_US);
    network_set_noise(network, (struct sim_noise){.loss = 0.1});
    CHECK(cl_endpoint_want(endpoint, 9 | CL_GROUP_P2P, 5, network_now_us(network)));
    network_wake(network, 0);
    for (int i = 0; i < 36000; i++) {
        CHECK(!cl_endpoint_peer_silent(endpoint, 1, network_now_us(network)));
        network_run_until(network, network_now_us(network) + SECOND_US / 10);
    }
    cl_endpoint_unwant(endpoint, 9 | CL_GROUP_P2P, 5);
}

/* A process that was stopped for long does not take its peers for lost: it did not hear them. */
TEST(test_own_sleep_is_no_silence)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 14);
    network_run_until(network, network_now_us(network) + 10000);
    SCOPED_TRANSFER *t = transfer_new(1, 0, 0, 1000);
    post_receive(network, t, 1);
    network_run_until(network, network_now_us(network) + 10000);
    network_sleep(network, 0, 2500000);
    network_run_until(network, network_now_us(network) + 2600000);
    CHECK(network_sees(network, 0, 1));
    post_send(network, t, 1, 0);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 10000));
}

/* A process that has no processor for 1 s of each 1.5 s still loses a dead peer: after the timeout, which begins with
 * the first PING, and as much as it stood still. */
TEST(test_own_stalls_only_add_their_time_to_silence)
{
    enum { RUN_US = 500000, STALL_US = 1000000, ROUNDS_MAX = 60 };
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 29);
    network_run_until(network, network_now_us(network) + 10000);
    SCOPED_TRANSFER *t = transfer_new(1, 0, 0, 1000);
    sim_driver_kill(&network->hosts[1].driver);
    post_receive(network, t, 1);
    uint64_t rounds = 0, patience_us = CL_PEER_TIMEOUT_US + CL_PEER_TIMEOUT_US / CL_PEER_ASK_WAITING;
    while (network_sees(network, 0, 1) && rounds++ < ROUNDS_MAX) {
        network_run_until(network, network_now_us(network) + RUN_US);
        network_sleep(network, 0, STALL_US);
        network_run_until(network, network_now_us(network) + STALL_US);
    }
    CHECK(rounds * (RUN_US + STALL_US) >= patience_us);
    CHECK((rounds - 1) * RUN_US <= patience_us); /* while it ran, silence counted */
}

/* A process that is stopped for less than the timeout, just before its next packet was due, is not lost. */
TEST(test_pause_shorter_than_the_timeout)
{
    for (uint32_t before_us = 0; before_us < 2000000; before_us += 100000) {
        SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 22);
        network_run_until(network, network_now_us(network) + 10000);
        SCOPED_TRANSFER *t = transfer_new(1, 0, 0, 1000);
        post_receive(network, t, 1);
        network_run_until(network, network_now_us(network) + before_us);
        network_sleep(network, 1, 2950000);
        network_run_until(network, network_now_us(network) + 3000000);
        CHECK(network_sees(network, 0, 1));
        post_send(network, t, 1, 0);
        CHECK(network_run_completions(network, 1, network_now_us(network) + 10000));
    }
}

/* No packet gets from 0 to 1: host 0 hears host 1 all the time, but never an answer. */
TEST(test_a_peer_that_never_answers_is_lost)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 25);
    network_run_until(network, network_now_us(network) + 10000);
    SCOPED_TRANSFER *there = transfer_new(0, 1, 0, 1000);
    network_egress(network, 0, 0)->down = 1;
    post_send(network, there, 1, 0);
    network_run_until(network, network_now_us(network) + 7 * SECOND_US);
    CHECK_EQ(network->hosts[0].last_status, CL_EPEERLOST);
}

TEST(test_late_peer)
{
    SCOPED_NETWORK *network = network_new(3, 1, 200, 150, ROOM, 19);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    uint8_t bytes[8];
    struct cl_sink sink = {bytes, NULL, NULL};
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 9, 1), UINT16_MAX);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, (struct cl_message_id){9, 1, 1}, sink, 8, &RELIABLE, 0, NULL),
             CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 2, (struct cl_message_id){9, 1, 0}, sink, 8, &RELIABLE, 0, NULL),
             CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 1, (struct cl_message_id){9, 2, 0}, sink, 8, &RELIABLE, 0, NULL),
             CL_OK);
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 9, 1), 2);
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 9, 2), 1);
    CHECK_EQ(cl_endpoint_late_peer(endpoint, 8, 1), UINT16_MAX);
}

/* Two hosts with a key of their own understand each other, and no packet made under another one. */
TEST(test_a_key_of_two_alone)
{
    static const uint8_t KEYS[2][16] = {"of one life", "of the next life"};
    SCOPED_NETWORK *network = network_new(3, 1, 200, 150, ROOM, 26);
    SCOPED_TRANSFER *paired = transfer_new(0, 1, 0, 5000), *other = transfer_new(0, 2, 0, 5000);
    CHECK_EQ(cl_endpoint_key_peer(network->hosts[0].endpoint, 7, KEYS[0]), CL_EINVAL);
    CHECK_EQ(cl_endpoint_key_peer(network->hosts[0].endpoint, 1, KEYS[0]), CL_OK);
    CHECK_EQ(cl_endpoint_key_peer(network->hosts[1].endpoint, 0, KEYS[0]), CL_OK);
    post(network, paired, 1);
    post(network, other, 1);
    network_run_until(network, network_now_us(network) + 100000);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQ(cl_endpoint_stats(network->hosts[i].endpoint)->packets_forged, 0);
    CHECK_EQ(network->hosts[0].completed, 2);
    CHECK(intact(paired) && intact(other));
    CHECK_EQ(cl_endpoint_key_peer(network->hosts[1].endpoint, 0, KEYS[1]), CL_OK);
    post_send(network, paired, 2, 0);
    network_run_until(network, network_now_us(network) + 100000);
    CHECK(cl_endpoint_stats(network->hosts[1].endpoint)->packets_forged > 0);
    CHECK_EQ(cl_endpoint_stats(network->hosts[1].endpoint)->packets_unexpected, 0);
    CHECK_EQ(network->hosts[0].completed, 2);
}
