/* Credit, over the network of network.h: a receiver's budget, lost REQUESTs and GRANTs, stalled senders. */
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "protocol/packet.h"

#include "tests/check.h"
#include "tests/network.h"

enum { SENDERS = 7, BYTES = 256 << 10, BUDGET = 64 << 10, LINK_MBIT = 1000 };

static uint8_t data[BYTES], target[SENDERS + 1][BYTES];

static void grant_all(struct network *network, uint64_t budget)
{
    for (uint32_t i = 0; budget > 0 && i < network->host_count; i++) {
        cl_budget_init(&network->hosts[i].endpoint->budget, budget);
        for (uint16_t peer = 0; peer < network->host_count; peer++)
            if (peer != i)
                CHECK_EQ(cl_endpoint_credit_peer(network->hosts[i].endpoint, peer, 0), CL_OK);
    }
}

static struct network *start_on(uint64_t budget, uint16_t paths)
{
    struct network *network = network_new(SENDERS + 1, paths, LINK_MBIT, 2000, 64 << 20, 1);
    grant_all(network, budget);
    for (uint32_t i = 0; i < BYTES; i++)
        data[i] = (uint8_t)(i * 31 + i / 251);
    return network;
}

static struct network *start(uint64_t budget)
{
    return start_on(budget, 1);
}

static const struct cl_ledger *ledger(const struct network *network)
{
    return &network->hosts[0].endpoint->ledger;
}

static void post(struct network *network, uint16_t from, uint32_t group, uint32_t index, uint32_t length)
{
    struct cl_message_id id = {group, 1, index};
    network_post(network, (struct network_message){from, 0, id, data, target[from], length, {.priority = 4}});
}

/* The packets that did not fit into the port's buffer when all sent to it. */
static uint64_t overflows(uint64_t budget)
{
    SCOPED_NETWORK *network = start(budget);
    network_set_link(network_ingress(network, 0, 0), LINK_MBIT, 64);
    for (uint16_t from = 1; from <= SENDERS; from++)
        post(network, from, 1, 0, BYTES);
    uint64_t most_bytes = 0;
    while (network->hosts[0].completed < SENDERS && network_step(network, network_now_us(network) + 10000000))
        most_bytes = ledger(network)->owed_bytes > most_bytes ? ledger(network)->owed_bytes : most_bytes;
    CHECK_EQ(network->hosts[0].completed, SENDERS);
    for (uint16_t from = 1; from <= SENDERS; from++)
        CHECK(memcmp(target[from], data, BYTES) == 0);
    CHECK(most_bytes <= budget);
    CHECK(budget == 0 || most_bytes > budget / 2);
    CHECK_EQ(ledger(network)->owed_bytes, 0);
    CHECK(ledger(network)->first == NULL);
    return network_overflows(network);
}

TEST(test_a_budget_keeps_the_port_short)
{
    CHECK(overflows(0) > 0);
    CHECK_EQ(overflows(BUDGET), 0);
}

/* Four ranks of one host are sent to by those of three others. Gives the most that they were owed together. */
static uint64_t owed_together(bool told, uint64_t *lost)
{
    enum { RANKS = 4, HOSTS = 4 };
    static uint8_t targets[HOSTS * RANKS][BYTES];
    SCOPED_NETWORK *network = network_new(HOSTS * RANKS, 1, LINK_MBIT, 2000, 64 << 20, 1);
    network->ranks = told ? RANKS : 1;
    grant_all(network, BUDGET);
    for (uint16_t from = RANKS; from < HOSTS * RANKS; from++) {
        struct cl_message_id id = {1, 1, from};
        struct network_message message = {from, from % RANKS, id, data, targets[from], BYTES, {.priority = 4}};
        network_post(network, message);
    }
    uint64_t most = 0, completed = 0;
    while (completed < (HOSTS - 1) * RANKS && network_step(network, network_now_us(network) + 10000000)) {
        uint64_t owed = completed = 0;
        for (uint32_t i = 0; i < RANKS; i++) {
            owed += network->hosts[i].endpoint->ledger.owed_bytes;
            completed += network->hosts[i].completed;
        }
        most = owed > most ? owed : most;
    }
    CHECK_EQ(completed, (HOSTS - 1) * RANKS);
    *lost = network_overflows(network);
    return most;
}

TEST(test_the_ranks_of_a_host_share_its_budget)
{
    uint64_t lost;
    uint64_t alone = owed_together(false, &lost), together = owed_together(true, &lost);
    printf("   owed together: %u bytes, of hosts of their own %u\n", (unsigned)together, (unsigned)alone);
    CHECK(alone > 3 * BUDGET);
    CHECK(together <= 2 * BUDGET); /* all began at once, when none knew of others */
}

static uint8_t kind_of(const struct cl_datagram *datagram)
{
    return cl_packet_kind(datagram->head);
}

/* Loses three of four REQUESTs and GRANTs. */
static bool drop_most(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)from;
    bool credit = kind_of(datagram) == CL_PACKET_REQUEST || kind_of(datagram) == CL_PACKET_GRANT;
    return credit && network_random(network) < 0.75;
}

TEST(test_lost_requests_and_grants_are_sent_again)
{
    SCOPED_NETWORK *network = start(BUDGET);
    network->drops = drop_most;
    for (uint16_t from = 1; from <= SENDERS; from++)
        post(network, from, 1, 0, BYTES);
    uint64_t limit_us = network_now_us(network) + 5000000;
    while (network->hosts[0].completed < SENDERS && network_step(network, limit_us))
        ;
    CHECK_EQ(network->hosts[0].completed, SENDERS);
    CHECK_EQ(ledger(network)->owed_bytes, 0);
}

static bool drop_grants(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)network, (void)from;
    return kind_of(datagram) == CL_PACKET_GRANT;
}

/* It looks like a receive that is posted late: the peer lives, and the operation's own timeout ends it, with an error.
 */
TEST(test_a_receiver_that_never_grants)
{
    SCOPED_NETWORK *network = start(BUDGET);
    network->drops = drop_grants;
    post(network, 1, 1, 0, BYTES);
    network_run_until(network, network_now_us(network) + 10000000);
    CHECK_EQ(network->hosts[1].completed + network->hosts[1].failed, 0);
    CHECK(network_sees(network, 1, 0));
    static const uint16_t PEERS[] = {0};
    cl_endpoint_abort(network->hosts[1].endpoint, 1, PEERS, 1, CL_ETIMEDOUT, UINT16_MAX);
    network_wake(network, 1);
    network_run_until(network, network_now_us(network) + 1000000);
    CHECK_EQ(network->hosts[1].last_status, CL_EABORTED);
    CHECK_EQ(network->hosts[0].last_status, CL_EABORTED);
    CHECK_EQ(ledger(network)->owed_bytes, 0);
}

/* A sender stops with all the credit that there is. */
TEST(test_credit_of_a_stalled_sender_is_written_off)
{
    SCOPED_NETWORK *network = start(BUDGET);
    post(network, 1, 1, 0, BYTES);
    while (ledger(network)->owed_bytes < BUDGET * 3 / 4)
        CHECK(network_step(network, network_now_us(network) + 100000));
    network_sleep(network, 1, 1000000);
    network_run_until(network, network_now_us(network) + 1000);
    CHECK(ledger(network)->owed_bytes > BUDGET / 2);
    uint64_t start_us = network_now_us(network);
    post(network, 2, 1, 0, BYTES);
    while (network->hosts[2].completed == 0 && network_step(network, start_us + 1000000))
        ;
    CHECK(network_now_us(network) < start_us + 100000); /* 2 ms on the link */
    while (network->hosts[1].completed == 0 && network_step(network, start_us + 3000000))
        ;
    CHECK_EQ(network->hosts[1].completed, 1);
    CHECK(memcmp(target[1], data, BYTES) == 0);
}

static bool drop_data(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)from;
    return kind_of(datagram) == CL_PACKET_DATA && network_random(network) < 0.01;
}

/* The time of a message of each sender, where 1 % of the packets are lost. */
static uint64_t lossy_us(double loss_bound)
{
    SCOPED_NETWORK *network = start(BUDGET / 4);
    network->drops = drop_data;
    uint64_t start_us = network_now_us(network);
    for (uint16_t from = 1; from <= SENDERS; from++) {
        struct network_message message = {
            from, 0, {1, 1, 0}, data, target[from], BYTES, {.priority = 4, .loss_bound = loss_bound}};
        network_post(network, message);
    }
    while (network->hosts[0].completed < SENDERS && network_step(network, start_us + 10000000))
        ;
    CHECK_EQ(network->hosts[0].completed, SENDERS);
    CHECK_EQ(ledger(network)->owed_bytes, 0);
    return network_now_us(network) - start_us;
}

/* Packets that the sender may give up do not keep a message from its next grant. */
TEST(test_credit_beside_a_loss_bound)
{
    uint64_t reliable_us = lossy_us(0), partial_us = lossy_us(0.05);
    printf("   with a loss bound %llu us, without %llu us\n", (unsigned long long)partial_us,
           (unsigned long long)reliable_us);
    CHECK(partial_us < reliable_us * 5 / 4);
}

TEST(test_urgent_messages_and_early_ones_are_granted_first)
{
    SCOPED_NETWORK *network = start(BUDGET / 2); /* two grants at a time */
    for (uint16_t from = 1; from <= 6; from++) {
        struct cl_message_id id = {1, 1, from <= 2 ? 5 : 2};
        network_post(network,
                     (struct network_message){from, 0, id, data, target[from], BYTES, {.priority = from >= 5 ? 0 : 4}});
    }
    uint64_t limit_us = network_now_us(network) + 1000000;
    while (network->hosts[0].completed < 6 && network_step(network, limit_us))
        ;
    network_run_until(network, network_now_us(network) + 10000); /* the last acknowledgement */
    for (uint32_t from = 1; from <= 4; from++)
        for (uint32_t earlier = from <= 2 ? 3 : 5; earlier <= 6; earlier++)
            CHECK(network->hosts[earlier].last_completed_us < network->hosts[from].last_completed_us);
}

/* A host sends a contribution, and then, before that has gone, results to six others. The contribution gets its credit
 * in parts. It ends before the results, although these have credit all the time. */
static void check_contribution(uint64_t budget, uint16_t paths)
{
    SCOPED_NETWORK *network = start_on(budget, paths);
    struct cl_message_id id = {1, 1, 0};
    network_post(network, (struct network_message){0, SENDERS, id, data, target[SENDERS], BYTES, {.priority = 4}});
    network_run_until(network, network_now_us(network) + 500);
    CHECK(!network->hosts[SENDERS].completed);
    for (uint16_t to = 1; to < SENDERS; to++)
        network_post(network, (struct network_message){0, to, id, data, target[to], BYTES, {.priority = 4}});
    uint64_t start_us = network_now_us(network), limit_us = start_us + 1000000;
    while (network->hosts[0].completed < SENDERS && network_step(network, limit_us))
        ;
    CHECK_EQ(network->hosts[0].completed, SENDERS);
    uint64_t first_us = network->hosts[SENDERS].last_completed_us - start_us, others_us = UINT64_MAX;
    for (uint32_t to = 1; to < SENDERS; to++)
        if (network->hosts[to].last_completed_us - start_us < others_us)
            others_us = network->hosts[to].last_completed_us - start_us;
    printf("   %u KiB, %u paths: %llu us, results %llu us\n", (unsigned)(budget >> 10), paths,
           (unsigned long long)first_us, (unsigned long long)others_us);
    CHECK(first_us < others_us * 3 / 4);
}

TEST(test_a_contribution_does_not_wait_for_results)
{
    for (uint64_t budget = BUDGET / 2; budget <= 4 * BUDGET; budget *= 2)
        for (uint16_t paths = 1; paths <= 2; paths++)
            check_contribution(budget, paths);
}

static bool count_requests(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)from;
    *(uint32_t *)network->argument += kind_of(datagram) == CL_PACKET_REQUEST;
    return false;
}

TEST(test_what_needs_no_credit)
{
    SCOPED_NETWORK *network = start(BUDGET);
    uint32_t requests = 0;
    network->argument = &requests;
    network->drops = count_requests;
    cl_endpoint_credit_peer(network->hosts[2].endpoint, 0, 20000);
    post(network, 1, 1, 0, 1000);                 /* one packet */
    post(network, 1, 1 | CL_GROUP_P2P, 0, BYTES); /* point-to-point */
    post(network, 2, 1, 0, 20000);                /* all of it unscheduled */
    uint64_t limit_us = network_now_us(network) + 1000000;
    while (network->hosts[0].completed < 3 && network_step(network, limit_us))
        ;
    CHECK_EQ(network->hosts[0].completed, 3);
    CHECK_EQ(requests, 0);
    post(network, 2, 1, 1, 30000);
    while (network->hosts[0].completed < 4 && network_step(network, limit_us))
        ;
    CHECK_EQ(network->hosts[0].completed, 4);
    CHECK_EQ(requests, 1);
}

static bool drop_first_data(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)network;
    return from != 0 && kind_of(datagram) == CL_PACKET_DATA && datagram->head[20] + datagram->head[21] > 0;
}

/* The sender dies with credit out: the ledger is level again, and the receive ends with an error. */
TEST(test_credit_of_the_dead_is_free)
{
    SCOPED_NETWORK *network = start(BUDGET);
    network->drops = drop_first_data;
    post(network, 1, 1, 0, BYTES);
    while (ledger(network)->owed_bytes < BUDGET * 3 / 4)
        CHECK(network_step(network, network_now_us(network) + 100000));
    network->hosts[1].driver.dead = true;
    cl_endpoint_peer_lost(network->hosts[0].endpoint, 1);
    CHECK_EQ(ledger(network)->owed_bytes, 0);
    network_wake(network, 0);
    network_run_until(network, network_now_us(network) + 10000);
    CHECK_EQ(network->hosts[0].last_status, CL_EPEERLOST);
}

TEST(test_a_process_without_a_budget_takes_no_requests)
{
    SCOPED_NETWORK *network = start(0);
    CHECK_EQ(cl_endpoint_credit_peer(network->hosts[1].endpoint, 0, 0), CL_OK);
    post(network, 1, 1, 0, BYTES);
    network_run_until(network, network_now_us(network) + 100000);
    CHECK_EQ(network->hosts[0].completed, 0);
    CHECK(cl_endpoint_stats(network->hosts[0].endpoint)->packets_foreign > 0);
}
