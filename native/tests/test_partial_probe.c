/* Partial messages: a sender that gave packets up asks the receiver with a PROBE until it has an answer. These tests
 * carry every datagram by hand, so that they choose the order of all events. */
#include "protocol/packet.h"
#include "tests/partial_transfer.h"

enum { BYTES = 200, PART = BYTES - CL_PACKET_HEAD_BYTES, PACKETS_MAX = 31, LETTERS = 64, STEP_US = 100 };

struct letter {
    uint8_t bytes[BYTES + CL_HEAD_BYTES_MAX];
    size_t length;
    struct cl_packet packet;
};

/* Two endpoints, the sender 0 and the receiver 1, with one partial message between them. */
struct pair {
    struct cl_endpoint *endpoints[2];
    uint64_t now_us;
    uint8_t data[PACKETS_MAX * PART], target[PACKETS_MAX * PART];
    uint32_t packets;
    struct cl_qos qos;
    struct end ends[2];
};

static const struct cl_message_id ID = {9, 1, 0};

static void pair_leave(struct pair *pair)
{
    for (int self = 0; self < 2; self++)
        cl_endpoint_destroy(pair->endpoints[self]);
}

#define SCOPED_PAIR SCOPED(pair_leave) struct pair

/* Takes up to `most` of the datagrams that leave; returns how many. */
static uint32_t collect_some(struct pair *pair, int self, struct letter *letters, size_t most)
{
    static struct cl_datagram batch[LETTERS];
    uint32_t count = (uint32_t)cl_endpoint_send(pair->endpoints[self], pair->now_us, batch, most);
    for (uint32_t i = 0; i < count; i++) {
        letters[i].length = sim_driver_flatten(letters[i].bytes, &batch[i]);
        CHECK(cl_packet_decode(&letters[i].packet, letters[i].bytes, letters[i].length));
    }
    return count;
}

static uint32_t collect(struct pair *pair, int self, struct letter *letters)
{
    return collect_some(pair, self, letters, LETTERS);
}

static void hand_over(struct pair *pair, int to, const struct letter *letter)
{
    cl_endpoint_receive(pair->endpoints[to], letter->bytes, letter->length, false, pair->now_us, pair->now_us);
}

/* Hands a packet to the receiver and returns the acknowledgement. */
static struct letter acknowledge(struct pair *pair, const struct letter *letter)
{
    static struct letter letters[LETTERS];
    hand_over(pair, 1, letter);
    CHECK_EQ(collect(pair, 1, letters), 1);
    CHECK_EQ(letters[0].packet.kind, CL_PACKET_ACK);
    return letters[0];
}

static void complete(struct pair *pair, int self)
{
    struct cl_completion completion;
    while (cl_endpoint_next_completion(pair->endpoints[self], &completion)) {
        struct end *end = completion.context;
        CHECK(!end->done);
        *end = (struct end){.done = true, .status = completion.status, .count = completion.missing_count};
    }
}

/* Delivers everything for so long, or until both ends of the message are done. */
static void run(struct pair *pair, uint64_t for_us)
{
    static struct letter letters[LETTERS];
    for (uint64_t until_us = pair->now_us + for_us; pair->now_us < until_us; pair->now_us += STEP_US)
        for (int self = 0; self < 2; self++) {
            cl_endpoint_timeout(pair->endpoints[self], pair->now_us);
            uint32_t count = collect(pair, self, letters);
            for (uint32_t i = 0; i < count; i++)
                hand_over(pair, !self, &letters[i]);
            complete(pair, self);
            if (pair->ends[0].done && pair->ends[1].done)
                return;
        }
}

static struct pair open_pair(uint32_t packets, size_t unexpected_packets)
{
    struct pair pair = {.now_us = 1000, .packets = packets, .qos = may_lose(0.5)};
    size_t room = unexpected_packets * (sizeof(struct cl_unexpected_packet) + PART);
    for (uint16_t self = 0; self < 2; self++) {
        struct cl_endpoint_config config = {
            .self = self, .epoch = 1, .datagram_bytes = BYTES, .unexpected_limit_bytes = room};
        CHECK_EQ(cl_endpoint_create(&config, &pair.endpoints[self]), CL_OK);
        CHECK_EQ(cl_endpoint_add_peer(pair.endpoints[self], !self, 1, NULL), CL_OK);
    }
    run(&pair, 10000); /* the first PINGs and their answers */
    return pair;
}

static void post_message(struct pair *pair, bool receive)
{
    uint32_t length = pair->packets * PART;
    struct cl_sink sink = {.target = pair->target};
    int status = receive ? cl_endpoint_post_receive(pair->endpoints[1], 0, ID, sink, length, &pair->qos, pair->now_us,
                                                    &pair->ends[1])
                         : cl_endpoint_post_send(pair->endpoints[0], 1, ID, pair->data, length, &pair->qos,
                                                 pair->now_us, &pair->ends[0]);
    CHECK_EQ(status, CL_OK);
}

static const struct cl_engine_stats *stats_of(const struct pair *pair, int self)
{
    return cl_endpoint_stats(pair->endpoints[self]);
}

/* A PING overtakes the message, so its acknowledgement makes the sender take packets for lost: it gives up as many as
 * it may and is about to send others again. Its PROBE overtakes the message, too, and is refused. Then all packets
 * arrive; of those taken for lost, the sender remembers CL_LOSS_RECENT. So nothing is left to send, and the sender must
 * repeat the PROBE: the receiver has not said yet that it counted the packets that were given up. */
TEST(test_lost_packets_arrive_before_they_are_sent_again)
{
    for (uint32_t packets = 20; packets < PACKETS_MAX; packets++) {
        SCOPED_PAIR pair = open_pair(packets, 0);
        struct letter sent[LETTERS], early[LETTERS], answer;
        post_message(&pair, false);
        CHECK_EQ(collect(&pair, 0, sent), packets);
        CHECK_EQ(cl_endpoint_ping(pair.endpoints[0], 1), CL_OK);
        for (int i = 0; i < 2; i++) {
            pair.now_us += STEP_US;
            CHECK_EQ(collect_some(&pair, 0, early, 1), 1);
            CHECK_EQ(early[0].packet.kind, i == 0 ? CL_PACKET_PING : CL_PACKET_PROBE);
            answer = acknowledge(&pair, &early[0]);
            hand_over(&pair, 0, &answer);
            CHECK_EQ(stats_of(&pair, 0)->packets_given_up, packets / 2);
        }
        uint64_t lost = stats_of(&pair, 0)->packets_lost;
        CHECK(lost > packets / 2);
        post_message(&pair, true);
        for (uint32_t i = 0; i < packets; i++)
            hand_over(&pair, 1, &sent[i]);
        CHECK(collect(&pair, 1, early) > 0);
        CHECK_EQ(early[0].packet.kind, CL_PACKET_ACK);
        hand_over(&pair, 0, &early[0]);
        CHECK_EQ(stats_of(&pair, 0)->packets_spurious, lost < CL_LOSS_RECENT ? lost : CL_LOSS_RECENT);
        CHECK(!pair.ends[0].done);
        run(&pair, SECOND_US);
        CHECK(pair.ends[0].done && pair.ends[1].done);
        CHECK(pair.ends[0].status == CL_OK && pair.ends[1].status == CL_OK);
        CHECK(pair.ends[0].count == 0 && pair.ends[1].count == 0);
        CHECK_EQ(stats_of(&pair, 0)->packets_retransmitted, 0);
    }
}

static uint32_t count_probes(const struct letter *letters, uint32_t count)
{
    uint32_t probes = 0;
    for (uint32_t i = 0; i < count; i++)
        probes += letters[i].packet.kind == CL_PACKET_PROBE;
    return probes;
}

/* The receiver has room for five packets of nine. The sender repeats the first one twice, as no acknowledgement has
 * come. The receiver refuses both copies: it has packet 0, but no room. The refusal of the second copy reaches the
 * sender after the sender gave the other four packets up and its PROBE was lost. No packet has to be sent again, so the
 * sender must repeat the PROBE. */
TEST(test_a_refused_copy_does_not_withdraw_the_probe)
{
    enum { PACKETS = 9 };
    static const uint32_t ARRIVE[] = {0, 1, 2, 6, 7};
    SCOPED_PAIR pair = open_pair(PACKETS, 5);
    struct letter sent[LETTERS], copies[LETTERS], lost[LETTERS], acknowledgements[3] = {0};
    post_message(&pair, false);
    CHECK_EQ(collect(&pair, 0, sent), PACKETS);
    for (size_t i = 0; i < sizeof ARRIVE / sizeof *ARRIVE; i++)
        hand_over(&pair, 1, &sent[ARRIVE[i]]);
    CHECK_EQ(collect(&pair, 1, acknowledgements), 1);
    for (int i = 1; i < 3; i++) {
        pair.now_us = cl_endpoint_next_timeout(pair.endpoints[0]);
        cl_endpoint_timeout(pair.endpoints[0], pair.now_us);
        CHECK_EQ(collect(&pair, 0, copies), 1);
        CHECK(copies[0].packet.kind == CL_PACKET_DATA && copies[0].packet.offset == 0);
        acknowledgements[i] = acknowledge(&pair, &copies[0]);
    }
    CHECK_EQ(stats_of(&pair, 1)->packets_unexpected_dropped, 2);
    hand_over(&pair, 0, &acknowledgements[0]);
    hand_over(&pair, 0, &acknowledgements[1]);
    uint32_t probes = 0;
    for (int i = 0; i < 100; i++, pair.now_us += STEP_US) {
        cl_endpoint_timeout(pair.endpoints[0], pair.now_us);
        probes += count_probes(lost, collect(&pair, 0, lost));
    }
    CHECK(probes > 0);
    CHECK_EQ(stats_of(&pair, 0)->packets_given_up, 4);
    hand_over(&pair, 0, &acknowledgements[2]);
    post_message(&pair, true);
    run(&pair, SECOND_US);
    CHECK(pair.ends[0].done && pair.ends[1].done);
    CHECK(pair.ends[0].status == CL_OK && pair.ends[1].status == CL_OK);
    CHECK(pair.ends[0].count > 0 && pair.ends[0].count == pair.ends[1].count);
}
