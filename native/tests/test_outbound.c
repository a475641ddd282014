/* Outbound: how many packets to one peer leave in a row. */
#include "protocol/queue.h"
#include "tests/transfer.h"

enum { PEERS = 3, BYTES = 4 << 20, MESSAGES = 4, URGENT = 40, URGENT_BYTES = 500, URGENT_US = 300 };

/* Packets of full size that leave host 0. */
struct runs {
    uint32_t packets, runs, longest, run;
    uint16_t peer;
};

static bool see(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    struct runs *runs = network->argument;
    if (from != 0 || datagram->payload_length < 1000)
        return false;
    bool same = runs->packets++ && datagram->peer == runs->peer;
    runs->run = same ? runs->run + 1 : 1;
    runs->runs += !same;
    runs->longest = runs->run > runs->longest ? runs->run : runs->longest;
    runs->peer = datagram->peer;
    return false;
}

/* Small messages of the most urgent class, for some time. */
static void interfere(struct network *network)
{
    struct transfer *transfers[URGENT];
    for (uint32_t i = 0; i < URGENT; i++) {
        transfers[i] = transfer_new(0, 1 + i % PEERS, MESSAGES + i, URGENT_BYTES);
        post(network, transfers[i], 1);
        network_run_until(network, network_now_us(network) + URGENT_US);
    }
    network->drops = NULL;
    network_run_until(network, network_now_us(network) + SECOND_US);
    finish_transfers(transfers, URGENT);
}

/* sleep_us: the longest sleep of a host. is_urgent: only while small urgent messages leave, too. */
static struct runs measure(double mbit_per_s, uint64_t sleep_us, bool is_urgent)
{
    struct runs runs = {0};
    SCOPED_NETWORK *network = network_new(PEERS + 1, 1, mbit_per_s, 1000, 1 << 20, 1);
    struct transfer *transfers[PEERS][MESSAGES];
    network->sleep_ns = sleep_us * 1000;
    network_run_until(network, network_now_us(network) + 10000);
    for (uint32_t i = 0; i < MESSAGES; i++)
        for (uint32_t peer = 0; peer < PEERS; peer++) {
            transfers[peer][i] = transfer_new(0, peer + 1, i, BYTES);
            post_receive(network, transfers[peer][i], 1);
            post_send(network, transfers[peer][i], 1, 4);
        }
    network_run_until(network, network_now_us(network) + 20000); /* the rate is known */
    network->drops = see;
    network->argument = &runs;
    if (is_urgent)
        interfere(network);
    network_run_until(network, network_now_us(network) + 10000000);
    network->drops = NULL;
    for (uint32_t i = 0; i < PEERS * MESSAGES; i++) {
        CHECK(intact(transfers[i % PEERS][i / PEERS]));
        transfer_free(transfers[i % PEERS][i / PEERS]);
    }
    return runs;
}

/* On slow links other peers soon have their turn, as a packet takes long there. On fast ones a turn is long, for
 * super-packets. Runs end early where a window is full, or a message ends; two turns may meet at such an end. */
TEST(test_turns_follow_the_rate)
{
    struct runs slow = measure(200, 0, false), fast = measure(10000, 0, false);
    CHECK(slow.packets > 1000 && fast.packets > 500);
    CHECK(slow.packets < 5 * slow.runs);
    CHECK(fast.packets > 15 * fast.runs);
    CHECK(fast.longest >= CL_QUEUE_TURN_MOST);
}

/* A host that comes seldom hands over much at once: to each peer more, unless urgent messages would wait for it. */
TEST(test_turns_follow_the_pauses_of_the_host)
{
    struct runs awake = measure(1000, 0, false), sleepy = measure(1000, 500, false), urgent = measure(1000, 500, true);
    CHECK(awake.packets > 500 && sleepy.packets > 500 && urgent.packets > 200);
    CHECK(awake.packets < 7 * awake.runs);
    CHECK(sleepy.packets > 9 * sleepy.runs);
    CHECK(urgent.packets < 5 * urgent.runs);
}
