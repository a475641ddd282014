#include "protocol/peer.h"

#include <string.h>

#include "tests/check.h"

static struct cl_egress egresses[2];

static struct cl_peer *start(void)
{
    static struct cl_egress *const each[] = {&egresses[0], &egresses[1]};
    for (int i = 0; i < 2; i++)
        cl_egress_init(&egresses[i], 1472);
    return cl_peer_create(3, 2, each, 1472);
}

TEST(test_held_messages)
{
    struct cl_peer *peer = start();
    struct cl_message messages[3];
    memset(messages, 0, sizeof(messages));
    for (int i = 0; i < 3; i++)
        cl_peer_hold(peer, &messages[i], 1000);
    CHECK_EQ(peer->held_us, 1000 + CL_PEER_HELD_MIN_US);
    CHECK(cl_peer_wary(peer, &messages[0]));
    cl_peer_unhold(peer, &messages[1]);
    CHECK(!messages[1].held);
    CHECK(peer->held.first == &messages[0] && peer->held.last == &messages[2]);
    cl_peer_unhold(peer, &messages[0]);
    cl_peer_unhold(peer, &messages[2]);
    CHECK(!peer->held.first && !peer->held.last);
    CHECK(!cl_peer_wary(peer, &messages[0]));
    messages[0].probing = true;
    CHECK(cl_peer_wary(peer, &messages[0]));
    messages[0].accepted = true;
    CHECK(!cl_peer_wary(peer, &messages[0]));
    cl_peer_destroy(peer);
}

TEST(test_ready_and_refusal_cross)
{
    struct cl_peer *peer = start();
    struct cl_message_id id = {1, 2, 3}, other = {1, 3, 3};
    cl_peer_note_ready(peer, 1, 2, 5000);
    CHECK(cl_peer_ready_since(peer, &id, 4000));
    CHECK(!cl_peer_ready_since(peer, &id, 6000));
    CHECK(!cl_peer_ready_since(peer, &other, 4000));
    for (uint32_t i = 0; i < CL_PEER_READIES; i++)
        cl_peer_note_ready(peer, 1, 100 + i, 7000);
    CHECK(!cl_peer_ready_since(peer, &id, 4000)); /* forgotten: the timer helps */
    cl_peer_destroy(peer);
}

TEST(test_delivers_elsewhere)
{
    struct cl_peer *peer = start();
    struct cl_sent_packet packet = {.bytes = 100, .sent_us = 2000};
    CHECK(!cl_peer_delivers_elsewhere(peer, &peer->paths[0]));
    cl_sent_push(&peer->paths[0].sent, &packet);
    peer->paths[1].delivered_us = 1500;
    CHECK(!cl_peer_delivers_elsewhere(peer, &peer->paths[0]));
    peer->paths[1].delivered_us = 2500;
    CHECK(cl_peer_delivers_elsewhere(peer, &peer->paths[0]));
    peer->paths[1].dead = true;
    CHECK(!cl_peer_delivers_elsewhere(peer, &peer->paths[0]));
    cl_peer_destroy(peer);
}

TEST(test_deadline)
{
    struct cl_peer *peer = start();
    struct cl_message message;
    memset(&message, 0, sizeof(message));
    peer->next_ping_us = 900000;
    CHECK_EQ(cl_peer_deadline_us(peer), 900000);
    peer->pacer_us = 800000;
    CHECK_EQ(cl_peer_deadline_us(peer), 800000);
    cl_peer_hold(peer, &message, 700000);
    CHECK_EQ(cl_peer_deadline_us(peer), 700000 + CL_PEER_HELD_MIN_US);
    peer->alive = false;
    CHECK_EQ(cl_peer_deadline_us(peer), UINT64_MAX);
    cl_peer_destroy(peer);
}
