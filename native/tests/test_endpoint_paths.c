/* Paths of an endpoint that die, come back, and leave through their interface, over the network of network.h. */
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "tests/transfer.h"

/* The path from host 0 to host 1. */
static struct cl_path_stats path_stats(const struct network *network, uint32_t path)
{
    struct cl_path_stats paths[NETWORK_PATHS_MAX];
    cl_endpoint_read_paths(network->hosts[0].endpoint, 1, paths, NETWORK_PATHS_MAX);
    return paths[path];
}

static uint64_t packets_sent(const struct network *network, uint32_t path)
{
    return path_stats(network, path).packets_sent;
}

TEST(test_path_death)
{
    SCOPED_NETWORK *network = network_new(2, 2, 200, 150, ROOM, 11);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 8 << 20);
    post(network, t, 1);
    uint64_t start_us = network_now_us(network);
    CHECK_EQ(path_stats(network, 1).heard_us, 0);
    network_run_until(network, start_us + 50000);
    network_egress(network, 0, 1)->down = 1;
    CHECK_EQ(path_stats(network, 1).deaths, 0);
    CHECK(network_run_completions(network, 1, start_us + 600000)); /* one path needs 355 ms for all of it */
    CHECK(intact(t));
    CHECK(network_sees(network, 0, 1));
    CHECK_EQ(path_stats(network, 1).deaths, 1);
    CHECK(path_stats(network, 1).heard_us > start_us);
    CHECK(path_stats(network, 0).heard_us > path_stats(network, 1).heard_us);
    CHECK_EQ(path_stats(network, 0).deaths, 0);

    /* and it is used again once it works */
    network_egress(network, 0, 1)->down = 0;
    network_run_until(network, network_now_us(network) + 200000);
    uint64_t probes = packets_sent(network, 1);
    SCOPED_TRANSFER *second = transfer_new(0, 1, 1, 1 << 20);
    post(network, second, 1);
    CHECK(network_run_completions(network, 2, network_now_us(network) + 100000));
    CHECK(packets_sent(network, 1) > probes + 165); /* what the link carries in 10 ms; all of it is 733 packets */
}

/* The interfaces of both paths carry 200 Mbit/s. */
TEST(test_paths_tell_the_capacity_of_their_interface)
{
    SCOPED_NETWORK *network = network_new(2, 2, 200, 150, ROOM, 11);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 8 << 20);
    post(network, t, 1);
    CHECK(network_run_completions(network, 1, network_now_us(network) + SECOND_US));
    uint64_t carried = 0;
    for (uint32_t path = 0; path < 2; path++) {
        struct cl_path_stats stats = path_stats(network, path);
        CHECK(stats.capacity_bytes > 22000000 && stats.capacity_bytes < 28000000);
        carried += stats.carried_bytes;
    }
    CHECK(carried > 8 << 20 && carried < 9 << 20);
}

/* A dead path is probed more often than its round trip; it must come back nevertheless. */
TEST(test_path_with_long_round_trip_revives)
{
    SCOPED_NETWORK *network = network_new(2, 2, 200, 150, ROOM, 24);
    network_set_delay(network, 60000000 / 1000);
    SCOPED_TRANSFER *first = transfer_new(0, 1, 0, 1 << 20), *second = transfer_new(0, 1, 1, 1 << 20);
    network_run_until(network, network_now_us(network) + 200000);
    network_egress(network, 0, 1)->down = 1;
    post(network, first, 1);
    CHECK(network_run_completions(network, 1, network_now_us(network) + 2 * SECOND_US));
    network_egress(network, 0, 1)->down = 0;
    network_run_until(network, network_now_us(network) + SECOND_US);
    network_egress(network, 0, 0)->down = 1;
    post(network, second, 1);
    CHECK(network_run_completions(network, 2, network_now_us(network) + 3 * SECOND_US));
    CHECK(intact(second));
}

/* A path dies with all packets in flight on it: a PING on the other path, which is idle, must show that the peer lives.
 */
TEST(test_path_death_with_everything_on_it)
{
    for (uint32_t path = 0; path < 2; path++) {
        SCOPED_NETWORK *network = network_new(2, 2, 200, 150, ROOM, 21);
        network_run_until(network, network_now_us(network) + 20000);
        SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 100);
        network_egress(network, 0, path)->down = 1;
        post(network, t, 1);
        CHECK(network_run_completions(network, 1, network_now_us(network) + 100000));
        CHECK(intact(t));
    }
}

/* All packets in flight are on the path that dies: no traffic shows that the other path works. */
TEST(test_path_death_in_lockstep)
{
    uint64_t worst_us = 0;
    for (uint32_t seed = 0; seed < 20; seed++) {
        SCOPED_NETWORK *network = network_new(2, 2, 200, 150, ROOM, 100 + seed);
        network_run_until(network, network_now_us(network) + 20000);
        uint32_t done = 0;
        for (uint32_t round = 0; round < 30; round++) {
            if (round == 10)
                network_egress(network, 0, 0)->down = network_ingress(network, 0, 0)->down =
                    1; /* and says nothing about it */
            SCOPED_TRANSFER *there = transfer_new(0, 1, round, 1000), *back = transfer_new(1, 0, round, 1000);
            uint64_t start_us = network_now_us(network);
            post_receive(network, there, 1);
            post_receive(network, back, 1);
            post_send(network, there, 1, 0);
            post_send(network, back, 1, 0);
            done += 2; /* a send and a receive on each host */
            CHECK(network_run_completions(network, done, start_us + 5000000));
            uint64_t took_us = network_now_us(network) - start_us;
            worst_us = took_us > worst_us ? took_us : worst_us;
        }
    }
    printf("   worst round %llu us\n", (unsigned long long)worst_us);
    CHECK(worst_us < 200000);
}

/* ---- paths that carry no large datagrams, and say nothing about it ---- */

static uint32_t carried; /* bytes of a datagram */

static bool is_too_large(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)network;
    (void)from;
    return datagram->path == 0 && datagram->head_length + datagram->payload_length > carried;
}

static uint32_t limit_of(const struct network *network, uint32_t host)
{
    struct cl_path_stats paths[NETWORK_PATHS_MAX];
    cl_endpoint_read_paths(network->hosts[host].endpoint, !host, paths, NETWORK_PATHS_MAX);
    return paths[0].datagram_bytes;
}

static void exchange(struct network *network, uint32_t sequence, uint32_t length, uint64_t within_us)
{
    SCOPED_TRANSFER *there = transfer_new(0, 1, sequence, length), *back = transfer_new(1, 0, sequence, length);
    uint32_t done = network->hosts[0].completed + 2;
    post_receive(network, there, 1);
    post_receive(network, back, 1);
    post_send(network, there, 1, sequence % 8);
    post_send(network, back, 1, sequence % 8);
    CHECK(network_run_completions(network, done, network_now_us(network) + within_us));
    CHECK(intact(there) && intact(back));
    CHECK_EQ(network_failures(network), 0);
}

/* The hole is there from the start or later, on the only path or on one of two. */
TEST(test_mtu_black_hole)
{
    static const uint32_t CARRIED[] = {520, 1252, 1471};
    enum { LENGTH = 60000, SEARCH = 50 };
    for (uint32_t i = 0; i < sizeof CARRIED / sizeof *CARRIED; i++)
        for (uint16_t paths = 1; paths <= 2; paths++)
            for (uint32_t sequence = 0; sequence < 5; sequence += 4) {
                SCOPED_NETWORK *network = network_new(2, paths, 200, 150, ROOM, 41 + i);
                network_run_until(network, network_now_us(network) + 20000);
                for (uint32_t before = 0; before < sequence; before++)
                    exchange(network, before, LENGTH, SECOND_US);
                carried = CARRIED[i];
                network->drops = is_too_large;
                exchange(network, sequence, 1 << 20, 5 * SECOND_US);
                for (uint32_t later = 1; later < SEARCH; later++) { /* it goes on while there is traffic */
                    exchange(network, sequence + later, LENGTH, SECOND_US);
                    network_run_until(network, network_now_us(network) + 50000);
                }
                if (paths == 1) /* else the other path may do it all */
                    CHECK(limit_of(network, 0) <= carried && limit_of(network, 1) <= carried);
                network_run_until(network, network_now_us(network) + 70 * (uint64_t)SECOND_US);
                network->drops = NULL; /* repaired */
                for (uint32_t later = SEARCH; later < SEARCH + 5; later++) {
                    exchange(network, sequence + later, LENGTH, SECOND_US);
                    network_run_until(network, network_now_us(network) + 2 * SECOND_US);
                }
                CHECK_EQ(limit_of(network, 0), NETWORK_DATAGRAM_BYTES);
                CHECK_EQ(limit_of(network, 1), NETWORK_DATAGRAM_BYTES);
            }
}

/* Neither losses nor an interruption are taken for a black hole for long. */
TEST(test_no_mtu_black_hole)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 51);
    network_set_noise(network, (struct sim_noise){.loss = 0.2});
    for (uint32_t i = 0; i < 20; i++) {
        exchange(network, i, 300000, 10 * SECOND_US);
        CHECK_EQ(limit_of(network, 0), NETWORK_DATAGRAM_BYTES);
    }
    network_set_noise(network, (struct sim_noise){0});
    for (uint32_t i = 20; i < 40; i++) {
        SCOPED_TRANSFER *t = transfer_new(0, 1, i, 300000);
        uint32_t done = network->hosts[1].completed + 1;
        post(network, t, 1);
        network_run_until(network, network_now_us(network) + 3000);
        network_egress(network, 0, 0)->down = 1;
        network_run_until(network, network_now_us(network) + i * 10000);
        network_egress(network, 0, 0)->down = 0;
        network_run_until(network, network_now_us(network) + 2 * SECOND_US);
        CHECK_EQ(network->hosts[1].completed, done);
        CHECK_EQ(limit_of(network, 0), NETWORK_DATAGRAM_BYTES);
    }
}

/* As a full queue does, behind which PINGs overtake. */
static bool loses_most_data(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)from;
    uint8_t kind = cl_packet_kind(datagram->head);
    return (kind == CL_PACKET_DATA || kind == CL_PACKET_FRAGMENT) && network_random(network) < 0.8;
}

/* Fragments would burden a full queue further: where most data is lost, but PINGs of its size come, none leaves. */
TEST(test_heavy_losses_make_no_fragments)
{
    SCOPED_NETWORK *network = network_new(2, 1, 10, 150, ROOM, 61);
    network->drops = loses_most_data;
    for (uint32_t i = 0; i < 20; i++) {
        SCOPED_TRANSFER *t = transfer_new(0, 1, i, 20000);
        uint32_t done = network->hosts[1].completed + 1, least = NETWORK_DATAGRAM_BYTES;
        uint64_t until_us = network_now_us(network) + 10 * SECOND_US;
        post(network, t, 1);
        while (network->hosts[1].completed < done && network_step(network, until_us))
            least = limit_of(network, 0) < least ? limit_of(network, 0) : least;
        CHECK_EQ(network->hosts[1].completed, done);
        CHECK_EQ(least, NETWORK_DATAGRAM_BYTES);
    }
}

/* A peer of this host is reached over loopback, others through the interfaces: first paths, but no common queue. */
TEST(test_paths_leave_through_their_interface)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 23);
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    static const uint32_t local[] = {2}, outside[] = {1, 0};
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 5, 1, local), CL_OK);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 6, 2, outside), CL_OK);
    CHECK(endpoint->peers.list[1]->paths[0].nic == &endpoint->nics.list[0]);
    CHECK(endpoint->peers.list[5]->paths[0].nic == &endpoint->nics.list[2]);
    CHECK(endpoint->peers.list[6]->paths[0].nic == &endpoint->nics.list[1]);
    CHECK(endpoint->peers.list[6]->paths[1].nic == &endpoint->nics.list[0]);
    CHECK_EQ(endpoint->nics.count, 3);
    struct cl_told told = {.capacity = 25000000};
    cl_endpoint_hear(endpoint, 3, 0, &told, 1000000); /* nobody is reached through it */
    CHECK_EQ(cl_endpoint_tell(endpoint, 3).capacity, 0);
}

TEST(test_a_ping_asks_on_each_path)
{
    SCOPED_NETWORK *network = network_new(2, 2, 0, 0, ROOM, 7);
    network_egress(network, 0, 1)->down = 1;
    network_run_until(network, network_now_us(network) + 10000);
    struct cl_path_stats paths[2];
    CHECK_EQ(cl_endpoint_read_paths(network->hosts[0].endpoint, 1, paths, 2), 2);
    CHECK(paths[0].is_answered && !paths[1].is_answered);
    network_egress(network, 0, 1)->down = 0;
    CHECK_EQ(cl_endpoint_ping(network->hosts[0].endpoint, 1), CL_OK);
    network_wake(network, 0);
    network_run_until(network, network_now_us(network) + 1000);
    uint64_t before[] = {paths[0].packets_sent, paths[1].packets_sent};
    cl_endpoint_read_paths(network->hosts[0].endpoint, 1, paths, 2);
    for (int i = 0; i < 2; i++)
        CHECK(paths[i].is_answered && paths[i].packets_sent == before[i] + 1);
    CHECK_EQ(cl_endpoint_ping(network->hosts[0].endpoint, 7), CL_EINVAL);
}
