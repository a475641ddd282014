#include "engine/peers.h"

#include <sys/wait.h>
#include <unistd.h>

#include "protocol/endpoint_state.h"
#include "tests/check.h"

/* The number of a process that has ended. */
static pid_t end_child(void)
{
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    CHECK(waitpid(child, NULL, 0) == child);
    return child;
}

/* A job that replaces its dead meets more processes than there are places. */
TEST(test_the_dead_make_room)
{
    struct cl_peers peers = {0};
    pid_t dead = end_child();
    CHECK_EQ(cl_peers_watch(&peers, 0, getpid()), CL_OK);
    for (uint16_t peer = 1; peer < CL_WATCHED_MAX; peer++)
        CHECK_EQ(cl_peers_watch(&peers, peer, dead), CL_OK);
    CHECK(!peers.watched[0].died && peers.watched[1].died);
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX, dead), CL_ENOMEM); /* the groups know of no death yet */
    peers.watched[5].died = false;                                     /* now they do */
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX, getpid()), CL_OK);
    CHECK_EQ(peers.watched[5].peer, CL_WATCHED_MAX);
    CHECK(!peers.watched[5].died && peers.watched[5].pidfd >= 0);
    CHECK_EQ(peers.watched[0].peer, 0);
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX, getpid()), CL_OK); /* it is watched already */
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX + 1, getpid()), CL_ENOMEM);
    cl_peers_free(&peers);
}

/* Bytes of class 4. */
static void send_more(struct cl_meter_line *line, uint64_t bytes)
{
    for (uint32_t i = 4; i < CL_METER_COUNTERS; i++)
        atomic_fetch_add(&line->bytes[i], bytes);
}

/* What the meters of watched processes tell reaches the endpoint, by the addresses of the interfaces. */
TEST(test_meters)
{
    struct cl_endpoint_config config = {.job = 7, .self = 1, .datagram_bytes = 1472};
    struct cl_endpoint *endpoint;
    struct cl_peers peers = {0};
    struct cl_meter own = {0}, other = {0};
    CHECK_EQ(cl_endpoint_create(&config, &endpoint), CL_OK);
    CHECK_EQ(cl_endpoint_add_peer(endpoint, 2, 2, NULL), CL_OK); /* it uses two interfaces */
    CHECK_EQ(cl_meter_open(&own), CL_OK);
    CHECK_EQ(cl_meter_open(&other), CL_OK);
    atomic_store(&own.lines[0].key, 11);
    atomic_store(&own.lines[1].key, 12);
    atomic_store(&other.lines[0].key, 12); /* its only one */
    atomic_store(&other.lines[1].key, 12); /* twice: only the first one counts */
    send_more(&other.lines[0], 1000000);
    CHECK_EQ(cl_peers_read_meter(&peers, 3, other.fd), CL_EINVAL); /* nobody watches it */
    CHECK_EQ(cl_peers_watch(&peers, 3, getpid()), CL_OK);
    CHECK(!cl_peers_hear_neighbours(&peers, &own, endpoint, 1000000)); /* there is no meter yet */
    CHECK_EQ(cl_peers_read_meter(&peers, 3, -1), CL_ESYSTEM);
    CHECK_EQ(cl_peers_read_meter(&peers, 3, other.fd), CL_OK);
    CHECK_EQ(cl_peers_read_meter(&peers, 3, -1), CL_OK);               /* it is known already */
    CHECK(!cl_peers_hear_neighbours(&peers, &own, endpoint, 1000000)); /* what it sent before does not count */
    send_more(&other.lines[0], 20000);
    atomic_store(&other.lines[0].capacity, 25000000);
    CHECK(cl_peers_hear_neighbours(&peers, &own, endpoint, 1001000));
    const struct cl_egress *first = &endpoint->nics.list[0].congestion.delay.egress;
    const struct cl_egress *second = &endpoint->nics.list[1].congestion.delay.egress;
    CHECK_EQ(first->neighbours.active, 0);
    CHECK_EQ(second->neighbours.active, 1);
    CHECK_EQ(second->bytes[4], 20000);
    CHECK_EQ(second->bytes[3], 0);
    cl_peers_tell_neighbours(&peers, &own, endpoint);
    CHECK_EQ(atomic_load(&own.lines[0].capacity), 0);
    CHECK_EQ(atomic_load(&own.lines[1].capacity), 25000000);
    CHECK_EQ(atomic_load(&own.lines[1].bytes[CL_METER_COUNTERS - 1]), 0); /* of this process */
    cl_peers_free(&peers);
    cl_meter_close(&own);
    cl_meter_close(&other);
    cl_endpoint_destroy(endpoint);
}
