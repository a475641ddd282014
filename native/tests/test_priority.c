/* A small urgent all-reduce beside bulk traffic of the same hosts, in virtual time: its time divided by the time it
 * takes alone. */
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"

#include "tests/check.h"
#include "tests/network.h"

enum {
    HOSTS = 4,
    LINK_MBIT = 200,
    BUFFER_PACKETS = 256,
    SHARD_BYTES = 16 << 10, /* of 64 KiB */
    BULK_BYTES = 64 << 20,  /* between two hosts: more than there is time for */
    WARM_RUNS = 20,         /* the first ones find the queue that bulk has had for itself */
    RUNS = 120,
    PAUSE_US = 300,
    SLEEP_US = 500,
    BULK = 3, /* the class */
};

enum { SENT, SCATTERED, GATHERED };

static uint8_t shard[SHARD_BYTES], sum[SHARD_BYTES], bulk[BULK_BYTES], bulk_sum[BULK_BYTES];
static struct network *network;

/* A host's part of the current run. */
static struct host {
    uint32_t run, scattered, gathered;
    uint64_t took_us[RUNS];
} hosts[HOSTS];
static uint64_t began_us; /* by the first host */

static void post(uint32_t host, uint32_t half)
{
    static const intptr_t AWAITED[] = {SCATTERED, GATHERED};
    struct cl_endpoint *endpoint = network->hosts[host].endpoint;
    struct cl_message_id id = {1, hosts[host].run, half};
    struct cl_sink sink = {.target = sum};
    uint64_t now_us = network_now_us(network);
    for (uint16_t peer = 0; peer < HOSTS; peer++) {
        if (peer == host)
            continue;
        CHECK_EQ(cl_endpoint_post_send(endpoint, peer, id, shard, SHARD_BYTES, &RELIABLE, now_us, (void *)SENT), CL_OK);
        CHECK_EQ(
            cl_endpoint_post_receive(endpoint, peer, id, sink, SHARD_BYTES, &RELIABLE, now_us, (void *)AWAITED[half]),
            CL_OK);
    }
    network_wake(network, host);
}

static void on_completion(struct network_host *from, const struct cl_completion *completion)
{
    uint32_t index = (uint32_t)(from - network->hosts);
    struct host *host = &hosts[index];
    CHECK_EQ(completion->status, CL_OK);
    host->scattered += completion->context == (void *)SCATTERED;
    host->gathered += completion->context == (void *)GATHERED;
    if (completion->context == (void *)SCATTERED && host->scattered == HOSTS - 1)
        post(index, 1);
    if (completion->context == (void *)GATHERED && host->gathered == HOSTS - 1)
        host->took_us[host->run] = network_now_us(network) - began_us;
}

static bool ended(uint32_t run)
{
    bool all = true;
    for (uint32_t i = 0; i < HOSTS; i++)
        all = all && hosts[i].took_us[run];
    return all;
}

static void post_bulk(void)
{
    struct cl_message_id id = {2, 0, 0};
    struct cl_sink sink = {.target = bulk_sum};
    for (uint32_t i = 0; i < HOSTS; i++) {
        struct cl_endpoint *endpoint = network->hosts[i].endpoint;
        uint64_t now_us = network_now_us(network);
        for (uint16_t peer = 0; peer < HOSTS; peer++) {
            if (peer == i)
                continue;
            CHECK_EQ(cl_endpoint_post_send(endpoint, peer, id, bulk, BULK_BYTES, &(struct cl_qos){.priority = BULK},
                                           now_us, NULL),
                     CL_OK);
            CHECK_EQ(cl_endpoint_post_receive(endpoint, peer, id, sink, BULK_BYTES, &RELIABLE, now_us, NULL), CL_OK);
        }
        network_wake(network, i);
    }
}

static uint64_t received(void)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < HOSTS; i++)
        bytes += cl_endpoint_stats(network->hosts[i].endpoint)->payload_bytes_received;
    return bytes;
}

static double lost_share(void)
{
    uint64_t sent = 0, lost = 0;
    for (uint32_t i = 0; i < HOSTS; i++) {
        const struct cl_engine_stats *stats = cl_endpoint_stats(network->hosts[i].endpoint);
        sent += stats->packets_sent;
        lost += stats->packets_lost;
    }
    return (double)lost / (double)sent;
}

static int compare(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

struct figures {
    double p50_us, p99_us;
    double link_share; /* all that was received, of what the links can carry */
    double lost_share;
};

static struct figures measure(bool beside, bool priorities, uint64_t seed)
{
    network = network_new(HOSTS, 1, LINK_MBIT, BUFFER_PACKETS, 64 << 20, seed);
    network_set_delay(network, 20);
    network->sleep_ns = SLEEP_US * 1000;
    memset(hosts, 0, sizeof hosts);
    for (uint32_t i = 0; i < HOSTS; i++) {
        network->hosts[i].on_completion = on_completion;
        if (priorities)
            network_egress(network, i, 0)->queue.type = network_ingress(network, i, 0)->queue.type =
                &sim_queue_type_priority;
    }
    network_run_until(network, network_now_us(network) + 20000);
    if (beside)
        post_bulk();
    network_run_until(network, network_now_us(network) + 300000);
    uint64_t start_us = network_now_us(network), bytes = received(), took_us[RUNS];
    for (uint32_t run = 0; run < RUNS; run++) {
        began_us = network_now_us(network);
        for (uint32_t i = 0; i < HOSTS; i++) {
            hosts[i].run = run;
            hosts[i].scattered = hosts[i].gathered = 0;
            post(i, 0);
        }
        while (!ended(run) && network_step(network, began_us + 1000000))
            ;
        CHECK(ended(run));
        took_us[run] = network_now_us(network) - began_us;
        network_run_until(network, network_now_us(network) + PAUSE_US);
    }
    double seconds = (double)(network_now_us(network) - start_us) / 1e6;
    uint32_t counted = RUNS - WARM_RUNS;
    qsort(took_us + WARM_RUNS, counted, sizeof *took_us, compare);
    struct figures figures = {.p50_us = (double)took_us[WARM_RUNS + counted / 2],
                              .p99_us = (double)took_us[WARM_RUNS + counted * 99 / 100],
                              .link_share =
                                  (double)(received() - bytes) * 1514 / 1432 * 8 / HOSTS / seconds / (LINK_MBIT * 1e6),
                              .lost_share = lost_share()};
    network_free(network);
    return figures;
}

static void compare_to_idle(bool priorities, double p50_most, double p99_most)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        struct figures idle = measure(false, priorities, seed), busy = measure(true, priorities, seed);
        CHECK(busy.p50_us < p50_most * idle.p50_us);
        CHECK(busy.p99_us < p99_most * idle.p50_us);
        CHECK(busy.link_share > 0.95); /* bulk takes the rest */
        CHECK(busy.lost_share < 0.005);
    }
}

TEST(test_beside_bulk)
{
    compare_to_idle(false, 1.3, 1.6);
}

/* Urgent packets overtake others, which then count neither as lost nor as fast. */
TEST(test_switches_with_priorities)
{
    compare_to_idle(true, 1.1, 1.6);
}
