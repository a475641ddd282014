/*
 * All-reduces of four hosts with several interfaces each, in virtual time: each is to reach nearly what all interfaces
 * carry together.
 */
#include "protocol/queue.h"
#include "tests/all_reduce.h"

struct nics {
    const char *name;
    uint16_t count;
    double mbit_per_s[NETWORK_PATHS_MAX];
    double least_percent;
};

static struct network *start(const struct nics *nics, uint64_t sleep_us)
{
    struct network *network = network_new(HOSTS, nics->count, 1, 256, 64 << 20, 1);
    /* Where hosts answer at once, the end of an operation on four interfaces costs 1 to 2 % more at some delays (80,
     * 100 and 115 us, for example): everything happens in step. */
    network_set_delay(network, 90);
    network->sleep_ns = sleep_us * 1000;
    for (uint16_t nic = 0; nic < nics->count; nic++)
        for (uint32_t host = 0; host < HOSTS; host++) {
            network_set_link(network_egress(network, host, nic), nics->mbit_per_s[nic], 256);
            network_set_link(network_ingress(network, host, nic), nics->mbit_per_s[nic], 256);
        }
    return network;
}

/* The rest goes to acknowledgements and to the end of each operation, when the last results are on their way. */
TEST(test_goodput_of_all_interfaces)
{
    static const struct nics NICS[] = {{"200", 1, {200}, 99},
                                       {"100+100", 2, {100, 100}, 98},
                                       {"150+50", 2, {150, 50}, 98},
                                       {"50+50+50+50", 4, {50, 50, 50, 50}, 97}};
    static const uint64_t SLEEPS_US[] = {0, 1000};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            double reached = efficiency(start(&NICS[i], SLEEPS_US[j]), 8 << 20, 200);
            printf("   %s Mbit/s, hosts that sleep up to %u us: %.1f %%\n", NICS[i].name, (unsigned)SLEEPS_US[j],
                   reached);
            CHECK(reached >= NICS[i].least_percent);
        }
}

static uint32_t sent[HOSTS][NETWORK_PATHS_MAX], most_ahead;
static uint32_t packets, runs; /* packets in a row on one path to one peer, and how often */

static bool count_data(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    (void)network;
    if (from != 0 || datagram->payload_length == 0)
        return false;
    static uint32_t last_peer, last_path;
    packets++;
    runs += datagram->peer != last_peer || datagram->path != last_path;
    last_peer = datagram->peer;
    last_path = datagram->path;
    uint32_t least = UINT32_MAX, most = ++sent[datagram->peer][datagram->path];
    for (uint32_t peer = 1; peer < HOSTS; peer++)
        least = sent[peer][datagram->path] < least ? sent[peer][datagram->path] : least;
    most_ahead = most - least > most_ahead ? most - least : most_ahead;
    return false;
}

/* Each interface sends as much to each peer, at all times: so no port gets more than its link carries. And what the
 * wire can send at once comes one after the other. */
TEST(test_interfaces_divide_equally)
{
    enum { BYTES = 4 << 20 };
    static const struct nics NICS = {"130+70", 2, {130, 70}, 0};
    SCOPED_NETWORK *network = start(&NICS, 1000);
    uint8_t *data = calloc(1, BYTES), *target = malloc(BYTES);
    uint64_t start_us = network_now_us(network);
    struct cl_message_id id = {1, 1, 0};
    network->drops = count_data;
    for (uint16_t to = 1; to < HOSTS; to++)
        network_post(network, (struct network_message){0, to, id, data, target, BYTES, {0}});
    network_run_until(network, start_us + 50000); /* first, the windows decide */
    memset(sent, 0, sizeof sent);
    most_ahead = packets = runs = 0;
    network_run_until(network, start_us + 250000);
    CHECK(sent[1][0] > 300 && sent[1][1] > 300);
    printf("   a peer is at most %u packets ahead of another; %.1f packets follow each other\n", most_ahead,
           (double)packets / runs);
    CHECK(packets >= 3 * runs);
    CHECK(most_ahead <= 4 * CL_QUEUE_TURN);
    free(data);
    free(target);
}
