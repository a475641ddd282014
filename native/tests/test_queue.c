#include "protocol/queue.h"

#include "tests/check.h"

enum { PEERS = 3, EACH = 4 };

static struct cl_queue queue;
static struct cl_queue_node nodes[PEERS];
static struct cl_send sends[PEERS][EACH];

static void start(void)
{
    queue = (struct cl_queue){0};
    for (uint16_t i = 0; i < PEERS; i++) {
        nodes[i] = (struct cl_queue_node){0};
        for (uint32_t j = 0; j < EACH; j++)
            sends[i][j] = (struct cl_send){.message = {.peer = i, .id.index = j}, .priority = 3, .granted = UINT32_MAX};
    }
}

/* The first peers have a message each. */
static void start_with(int peers, uint32_t turn_limit)
{
    start();
    for (int i = 0; i < peers; i++)
        cl_queue_push(&queue, &nodes[i], &sends[i][0], false);
    queue.turn_limit = turn_limit;
}

static int send_of(bool is_short)
{
    struct cl_send *send = cl_queue_next(&queue);
    cl_queue_sent(&queue, &nodes[send->message.peer], send, is_short);
    return send->message.peer;
}

/* Sends one packet of the next message; returns its peer. */
static int send_one(void)
{
    return send_of(false);
}

TEST(test_fifo_and_front)
{
    start();
    CHECK(cl_queue_next(&queue) == NULL);
    cl_queue_push(&queue, &nodes[0], &sends[0][0], false);
    cl_queue_push(&queue, &nodes[0], &sends[0][1], false);
    cl_queue_push(&queue, &nodes[0], &sends[0][2], true);
    CHECK(cl_queue_next(&queue) == &sends[0][2]);
    cl_queue_remove(&queue, &nodes[0], &sends[0][2]);
    CHECK(cl_queue_next(&queue) == &sends[0][0]);
    cl_queue_remove(&queue, &nodes[0], &sends[0][1]); /* from the end */
    cl_queue_remove(&queue, &nodes[0], &sends[0][0]);
    CHECK(cl_queue_next(&queue) == NULL);
    CHECK(!sends[0][0].queued);
}

static void ask(struct cl_send *send, uint64_t asked_us)
{
    send->granted = 4;
    send->asked_us = asked_us;
}

/* A message that needs credit goes before those that asked for it later. */
TEST(test_older_messages_that_need_credit_go_next)
{
    start();
    for (int i = 0; i < PEERS; i++)
        ask(&sends[i][0], i == 2 ? 10 : 20);
    cl_queue_push(&queue, &nodes[0], &sends[0][0], false);
    cl_queue_push(&queue, &nodes[1], &sends[1][0], false);
    CHECK_EQ(send_one(), 0); /* its turn has begun, and goes on */
    cl_queue_push(&queue, &nodes[2], &sends[2][0], false);
    for (int i = 1; i < CL_QUEUE_TURN; i++)
        CHECK_EQ(send_one(), 0);
    for (int i = 0; i < 3 * CL_QUEUE_TURN; i++)
        CHECK_EQ(send_one(), 2);
    cl_queue_remove(&queue, &nodes[2], &sends[2][0]); /* it waits for its next part */
    for (int i = 0; i < CL_QUEUE_TURN; i++)
        CHECK_EQ(send_one(), 1);
    cl_queue_push(&queue, &nodes[2], &sends[2][0], false); /* no turn has begun: it has this one */
    CHECK_EQ(send_one(), 2);
}

/* It does so, too, where a younger message to the same peer waits already, or the peer is unblocked later. */
TEST(test_older_messages_to_a_peer_that_waits)
{
    start();
    for (int i = 0; i < PEERS; i++)
        for (int j = 0; j < EACH; j++)
            ask(&sends[i][j], 20);
    ask(&sends[1][1], 10);
    for (int i = 0; i < PEERS; i++)
        cl_queue_push(&queue, &nodes[i], &sends[i][0], false);
    cl_queue_push(&queue, &nodes[2], &sends[2][1], false); /* as old as the others: in its turn */
    cl_queue_push(&queue, &nodes[1], &sends[1][1], false);
    CHECK(cl_queue_next(&queue) == &sends[1][1]);
    cl_queue_block(&queue, &nodes[1], 0);
    CHECK(cl_queue_next(&queue) == &sends[0][0]);
    cl_queue_unblock(&queue, &nodes[1]);
    CHECK(cl_queue_next(&queue) == &sends[1][1]);
    sends[2][2].asked_us = 5;
    cl_queue_push(&queue, &nodes[2], &sends[2][2], false);
    sends[2][3].granted = UINT32_MAX; /* it needs no credit */
    sends[2][3].asked_us = 0;
    cl_queue_push(&queue, &nodes[2], &sends[2][3], false);
    CHECK(cl_queue_next(&queue) == &sends[2][2]);
}

/* Nobody goes before a message that needs no credit, unless its turn comes first anyway. */
TEST(test_messages_that_need_no_credit_are_not_overtaken)
{
    start();
    ask(&sends[0][0], 20);
    ask(&sends[2][0], 10);
    sends[1][0].asked_us = 30; /* of no meaning */
    for (int i = 0; i < PEERS; i++)
        cl_queue_push(&queue, &nodes[i], &sends[i][0], false);
    for (int i = 0; i < 3 * PEERS * CL_QUEUE_TURN; i++)
        CHECK_EQ(send_one(), i / CL_QUEUE_TURN % PEERS);
}

/* Lost packets go first, also before an older message. */
TEST(test_lost_packets_go_before_older_messages)
{
    start();
    ask(&sends[0][0], 20);
    ask(&sends[0][1], 10);
    sends[0][0].lost.count = 1;
    cl_queue_push(&queue, &nodes[0], &sends[0][0], true);
    cl_queue_push(&queue, &nodes[0], &sends[0][1], false);
    CHECK(cl_queue_next(&queue) == &sends[0][0]);
}

/* The order that the caller gives counts more. */
TEST(test_order_counts_more_than_age)
{
    start();
    ask(&sends[0][0], 20);
    ask(&sends[0][1], 10);
    sends[0][1].order = 1;
    cl_queue_push(&queue, &nodes[0], &sends[0][0], false);
    cl_queue_push(&queue, &nodes[0], &sends[0][1], false);
    CHECK(cl_queue_next(&queue) == &sends[0][0]);
}

/* The message that is needed first goes first, though it was posted last. */
TEST(test_order_within_a_class)
{
    static const uint16_t ORDERS[EACH] = {2, 1, 2, 0}, EXPECTED[EACH] = {3, 1, 0, 2};
    start();
    for (uint32_t j = 0; j < EACH; j++) {
        sends[0][j].order = ORDERS[j];
        cl_queue_push(&queue, &nodes[0], &sends[0][j], false);
    }
    for (uint32_t j = 0; j < EACH; j++) {
        struct cl_send *next = cl_queue_next(&queue);
        CHECK_EQ(next->message.id.index, EXPECTED[j]);
        cl_queue_remove(&queue, &nodes[0], next);
    }
    CHECK(cl_queue_next(&queue) == NULL);
    cl_queue_push(&queue, &nodes[0], &sends[0][1], false);
    cl_queue_push(&queue, &nodes[0], &sends[0][0], true); /* lost packets */
    CHECK(cl_queue_next(&queue) == &sends[0][0]);
}

TEST(test_peers_take_turns)
{
    int sent[PEERS] = {0};
    start_with(PEERS, 0);
    for (int i = 0; i < PEERS * CL_QUEUE_TURN * 10; i++)
        sent[send_one()]++;
    for (int i = 0; i < PEERS; i++)
        CHECK_EQ(sent[i], CL_QUEUE_TURN * 10);
}

/* Turns are as long as the caller says, but not shorter than CL_QUEUE_TURN. A peer that is blocked gives up the rest of
 * its turn, and the next peer has a whole one. */
TEST(test_length_of_a_turn)
{
    start_with(PEERS, 10);
    for (int i = 0; i < 10; i++)
        CHECK_EQ(send_one(), 0);
    CHECK(cl_queue_turn_begins(&queue));
    for (int i = 0; i < 7; i++)
        CHECK_EQ(send_one(), 1);
    cl_queue_block(&queue, &nodes[1], 0);
    for (int i = 0; i < 10; i++)
        CHECK_EQ(send_one(), 2);
    queue.turn_limit = 1;
    for (int i = 0; i < CL_QUEUE_TURN; i++)
        CHECK_EQ(send_one(), 0);
    CHECK_EQ(send_one(), 2);
}

/* Sends a message of so many packets, the last of them a short one, but no packet after the end of a turn. Returns the
 * packets. */
static int send_message(int peer, int packets)
{
    for (int i = 1; i <= packets; i++) {
        CHECK_EQ(send_of(i == packets), peer);
        if (cl_queue_turn_begins(&queue))
            return i;
    }
    return packets;
}

/* A short packet ends a long turn of which less than half is left. The rest is not lost: it is sent in further turns.
 */
TEST(test_a_short_packet_ends_a_turn)
{
    enum { LIMIT = 10 };
    start_with(2, LIMIT);
    CHECK_EQ(send_message(0, 5), 5);
    CHECK(!cl_queue_turn_begins(&queue)); /* half is left */
    CHECK_EQ(send_message(0, 1), 1);
    CHECK(cl_queue_turn_begins(&queue)); /* 4 are left */
    CHECK_EQ(send_message(1, LIMIT), LIMIT);
    CHECK_EQ(send_message(0, 7), 7); /* 3 more */
    CHECK_EQ(send_message(1, LIMIT), LIMIT);
    CHECK_EQ(send_message(0, 7), 7); /* 3 more: as many as a turn */
    CHECK_EQ(send_message(0, LIMIT), LIMIT);
    CHECK_EQ(send_message(1, LIMIT), LIMIT); /* both have had three turns */
}

/* Whatever the length of their messages, all peers send equally much. */
TEST(test_peers_with_short_messages_send_as_much)
{
    enum { LIMIT = 32, PACKETS = 100000 };
    for (int length = 1; length <= 2 * LIMIT; length++) {
        int sent[PEERS] = {0}, lengths[PEERS] = {length, 1000, 17};
        start_with(PEERS, LIMIT);
        for (int i = 0; i < PACKETS; i++) {
            uint16_t peer = cl_queue_next(&queue)->message.peer;
            sent[peer]++;
            send_of(sent[peer] % lengths[peer] == 0);
        }
        for (int i = 0; i < PEERS; i++)
            CHECK(sent[i] > PACKETS / PEERS - 3 * LIMIT && sent[i] < PACKETS / PEERS + 3 * LIMIT);
    }
}

/* What a peer has left is forgotten once it has nothing to send. */
TEST(test_nothing_is_left_of_old_turns)
{
    enum { LIMIT = 10 };
    start_with(2, LIMIT);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(send_message(0, 6), 6);
        CHECK_EQ(send_message(1, LIMIT), LIMIT);
    }
    cl_queue_remove(&queue, &nodes[0], &sends[0][0]);
    cl_queue_push(&queue, &nodes[0], &sends[0][0], false);
    CHECK_EQ(send_message(1, LIMIT), LIMIT);
    CHECK_EQ(send_message(0, 6), 6);
    CHECK_EQ(send_message(1, LIMIT), LIMIT); /* and not 0 again, which had left 12 */
}

/* Short turns, as slow links have them, do not end earlier. */
TEST(test_a_short_packet_ends_no_short_turn)
{
    start_with(2, 0);
    for (int i = 0; i < CL_QUEUE_TURN; i++)
        CHECK_EQ(send_of(true), 0);
    CHECK_EQ(send_one(), 1);
}

TEST(test_priority_is_strict_but_for_the_guard)
{
    start();
    sends[0][0].priority = 6;
    sends[1][0].priority = 1;
    sends[2][0].priority = 4;
    for (int i = 0; i < PEERS; i++)
        cl_queue_push(&queue, &nodes[i], &sends[i][0], false);
    int sent[PEERS] = {0};
    for (int i = 0; i < 10 * CL_QUEUE_GUARD; i++)
        sent[send_one()]++;
    CHECK_EQ(sent[0], 10); /* the last class gets its share, the one between does not */
    CHECK_EQ(sent[1], 10 * CL_QUEUE_GUARD - 10);
    CHECK_EQ(sent[2], 0);
}

TEST(test_blocked_peer_holds_nobody_up)
{
    start();
    for (int i = 0; i < PEERS; i++)
        cl_queue_push(&queue, &nodes[i], &sends[i][0], false);
    cl_queue_block(&queue, &nodes[0], 0);
    cl_queue_block(&queue, &nodes[0], 0);
    cl_queue_push(&queue, &nodes[0], &sends[0][1], false); /* posting goes on */
    cl_queue_remove(&queue, &nodes[0], &sends[0][0]);
    for (int i = 0; i < 20; i++)
        CHECK(send_one() != 0);
    cl_queue_block(&queue, &nodes[1], 0);
    cl_queue_block(&queue, &nodes[2], 0);
    CHECK(cl_queue_next(&queue) == NULL);
    cl_queue_unblock(&queue, &nodes[0]);
    CHECK(cl_queue_next(&queue) == &sends[0][1]);
}

/* A peer blocked for bulk is not blocked for urgent packets. */
TEST(test_only_less_urgent_classes_are_blocked)
{
    start();
    CHECK_EQ(cl_queue_first_class(&queue), CL_CLASSES_BETWEEN_HOSTS);
    sends[0][0].priority = 6;
    sends[0][1].priority = 1;
    sends[0][2].priority = 4;
    cl_queue_push(&queue, &nodes[0], &sends[0][0], false);
    cl_queue_block(&queue, &nodes[0], 3);
    CHECK(cl_queue_next(&queue) == NULL);
    cl_queue_push(&queue, &nodes[0], &sends[0][1], false);
    cl_queue_push(&queue, &nodes[0], &sends[0][2], false);
    CHECK_EQ(cl_queue_first_class(&queue), 1);
    CHECK(cl_queue_next(&queue) == &sends[0][1]);
    cl_queue_block(&queue, &nodes[0], 1);
    CHECK(cl_queue_next(&queue) == NULL);
    cl_queue_remove(&queue, &nodes[0], &sends[0][1]);
    cl_queue_unblock(&queue, &nodes[0]);
    CHECK(cl_queue_next(&queue) == &sends[0][2]);
}
