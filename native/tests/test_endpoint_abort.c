/* Aborted groups: which peers learn of it, and from whom, over the network of network.h. */
#include "protocol/endpoint.h"

#include "sim/scarcity.h"
#include "tests/transfer.h"

static void note_status(struct network_host *host, const struct cl_completion *completion)
{
    int *statuses = host->argument;
    statuses[-completion->status]++;
}

TEST(test_abort)
{
    SCOPED_NETWORK *network = network_new(3, 1, 200, 150, ROOM, 16);
    network_set_noise(network, (struct sim_noise){.loss = 0.1});
    int statuses[2][16] = {{0}};
    for (uint32_t i = 0; i < 2; i++) {
        network->hosts[i + 1].on_completion = note_status;
        network->hosts[i + 1].argument = statuses[i];
    }
    SCOPED_TRANSFER *waits = transfer_new(0, 1, 0, 1000), *sends = transfer_new(1, 2, 0, 1 << 20);
    post_receive(network, waits, 1);
    post(network, sends, 1);
    network_run_until(network, network_now_us(network) + 5000);
    static const uint16_t PEERS[] = {1, 2};
    cl_endpoint_abort(network->hosts[0].endpoint, 9, PEERS, 2, CL_ETIMEDOUT, 7);
    network_wake(network, 0);
    network_run_until(network, network_now_us(network) + 50000);
    CHECK_EQ(statuses[0][-CL_EABORTED], 2);
    CHECK_EQ(statuses[1][-CL_EABORTED], 1);
    for (uint32_t i = 1; i <= 2; i++) {
        struct cl_closed_group aborted;
        CHECK(cl_endpoint_next_abort(network->hosts[i].endpoint, &aborted));
        CHECK_EQ(aborted.group, 9);
        CHECK_EQ(aborted.culprit, 7); /* as host 0 said */
        CHECK_EQ(aborted.reason, CL_ETIMEDOUT);
        CHECK(!cl_endpoint_next_abort(network->hosts[i].endpoint, &aborted));
    }
    /* the group is over for good */
    struct cl_message_id id = {9, 2, 0};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[1].endpoint, 2, id, sends->sent, 5, &RELIABLE, 0, NULL), CL_EABORTED);
}

/* No packet gets from 1 to 0, all get from 0 to 1. Host 0 gives up first and tells host 1, which would wait twice as
 * long. */
TEST(test_abort_reaches_a_lost_peer)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 23);
    network_run_until(network, network_now_us(network) + 10000);
    SCOPED_TRANSFER *there = transfer_new(0, 1, 0, 1000), *back = transfer_new(1, 0, 0, 1000);
    network_egress(network, 1, 0)->down = 1;
    post_send(network, there, 1, 0);
    post(network, back, 1);
    network_run_until(network, network_now_us(network) + 3400000);
    CHECK(!network_sees(network, 0, 1));
    CHECK(network_sees(network, 1, 0));
    uint16_t lost = 1;
    cl_endpoint_abort(network->hosts[0].endpoint, 9, &lost, 1, CL_EPEERLOST, UINT16_MAX);
    network_wake(network, 0);
    network_run_until(network, network_now_us(network) + 10000);
    struct cl_closed_group aborted;
    CHECK(cl_endpoint_next_abort(network->hosts[1].endpoint, &aborted));
    CHECK_EQ(aborted.group, 9);
    CHECK_EQ(aborted.reason, CL_EPEERLOST);
    CHECK_EQ(network->hosts[1].last_status, CL_EABORTED);
}

/* Host 0 aborts without telling host 1, which learns it as soon as it sends. */
TEST(test_abort_answers_data)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 17);
    int statuses[16] = {0};
    network->hosts[1].on_completion = note_status;
    network->hosts[1].argument = statuses;
    cl_endpoint_abort(network->hosts[0].endpoint, 9, NULL, 0, CL_EABORTED, UINT16_MAX);
    SCOPED_TRANSFER *t = transfer_new(1, 0, 0, 100000);
    post_send(network, t, 1, 0);
    CHECK(network_run_completions(network, 0, 0));
    network_run_until(network, network_now_us(network) + 20000);
    CHECK_EQ(statuses[-CL_EABORTED], 1);
}

/* Host 0 has no memory when it aborts: it knows that host 1 has not been told, and tells it later. */
TEST(test_abort_without_memory)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 29);
    struct sim_scarcity scarcity = {.failed = 0};
    struct cl_closed_group aborted;
    static const uint16_t PEER = 1;
    struct cl_endpoint *endpoint = network->hosts[0].endpoint;
    sim_scarcity_set(&scarcity, 1);
    bool told = cl_endpoint_abort(endpoint, 9, &PEER, 1, CL_ENOMEM, 0);
    sim_scarcity_set(NULL, 0);
    CHECK(scarcity.failed > 0);
    CHECK(!told);
    CHECK(cl_endpoint_abort(endpoint, 9, &PEER, 1, CL_ENOMEM, 0));
    network_wake(network, 0);
    network_run_until(network, network_now_us(network) + 10000);
    CHECK(cl_endpoint_next_abort(network->hosts[1].endpoint, &aborted));
    CHECK_EQ(aborted.reason, CL_ENOMEM);
    CHECK_EQ(aborted.culprit, 0);
}

/* A host that has no memory when a peer aborts remembers and reports it. */
TEST(test_abort_is_heard_without_memory)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 31);
    struct sim_scarcity scarcity = {.failed = 0};
    struct cl_closed_group aborted;
    struct cl_endpoint *endpoint = network->hosts[1].endpoint;
    sim_scarcity_set(&scarcity, 1);
    cl_endpoint_fail_group(endpoint, 9, CL_ETIMEDOUT, 0);
    sim_scarcity_set(NULL, 0);
    CHECK(cl_endpoint_next_abort(endpoint, &aborted));
    CHECK_EQ(aborted.group, 9);
    CHECK_EQ(aborted.reason, CL_ETIMEDOUT);
    SCOPED_TRANSFER *t = transfer_new(1, 0, 0, 1000);
    struct cl_message_id id = {9, 2, 0};
    CHECK_EQ(cl_endpoint_post_send(endpoint, 0, id, t->sent, 5, &RELIABLE, 0, NULL), CL_EABORTED);
}
