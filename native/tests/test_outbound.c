/* Outbound: how many packets to one peer leave in a row. */
#include "protocol/queue.h"
#include "tests/transfer.h"

enum {
    PEERS = 3,
    SHALLOW_PACKETS = 8, /* in a row to one peer: what finds room in a shallow port. With more, short batches fit. */
    BYTES = 4 << 20,
    MESSAGES = 4,
    URGENT = 40,
    URGENT_BYTES = 500,
    URGENT_US = 300
};

/* Packets of full size that leave host 0. */
struct runs {
    uint32_t packets, runs, longest, run;
    bool shallow; /* the port's buffer is too short for a batch */
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
    return runs->shallow && runs->run > SHALLOW_PACKETS;
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

enum beside { NOTHING, URGENT_MESSAGES /* only while small ones leave, too */, SHALLOW_PORT };

/* sleep_us: the longest sleep of a host. */
static struct runs measure(double mbit_per_s, uint64_t sleep_us, enum beside beside)
{
    struct runs runs = {.shallow = beside == SHALLOW_PORT};
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
    if (beside == SHALLOW_PORT) {
        network_run_until(network, network_now_us(network) + 100000); /* batches are given up */
        runs = (struct runs){.shallow = true};
    } else if (beside == URGENT_MESSAGES) {
        interfere(network);
    }
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
    struct runs slow = measure(100, 0, NOTHING), middle = measure(1000, 0, NOTHING), fast = measure(10000, 0, NOTHING);
    CHECK(slow.packets > 500 && middle.packets > 500 && fast.packets > 500);
    CHECK(slow.packets < 5 * slow.runs);
    CHECK(middle.packets > 20 * middle.runs);
    CHECK(fast.packets > 15 * fast.runs);
    CHECK(fast.longest >= CL_QUEUE_TURN_MOST);
}

/* Urgent messages would wait for long turns. */
TEST(test_turns_are_short_beside_urgent_messages)
{
    struct runs urgent = measure(1000, 500, URGENT_MESSAGES);
    CHECK(urgent.packets > 200);
    CHECK(urgent.packets < 5 * urgent.runs);
}

/* Where a port has no room for batches, a host that comes seldom still hands over much at once. */
TEST(test_turns_follow_the_pauses_of_the_host)
{
    struct runs awake = measure(1000, 0, SHALLOW_PORT), sleepy = measure(1000, 500, SHALLOW_PORT);
    CHECK(awake.packets > 500 && sleepy.packets > 500);
    CHECK(awake.packets < 7 * awake.runs);
    CHECK(sleepy.packets > 9 * sleepy.runs);
}
