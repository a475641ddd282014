#include "protocol/peer.h"

#include <string.h>

#include "tests/check.h"

static struct cl_nic nics[2];

static struct cl_peer *start(void)
{
    static struct cl_nic *const each[] = {&nics[0], &nics[1]};
    for (int i = 0; i < 2; i++)
        cl_congestion_nic_init(&nics[i].congestion, cl_congestion_find(NULL), 1472);
    return cl_peer_create(3, 2, each, 1472);
}

TEST(test_held_messages)
{
    struct cl_peer *peer = start();
    struct cl_send sends[3];
    memset(sends, 0, sizeof(sends));
    for (int i = 0; i < 3; i++)
        cl_peer_hold(peer, &sends[i], 1000);
    CHECK_EQ(peer->held_us, 1000 + CL_PEER_HELD_MIN_US);
    CHECK(cl_peer_wary(peer, &sends[0]));
    cl_peer_unhold(peer, &sends[1]);
    CHECK(!sends[1].held);
    CHECK(peer->held.first == &sends[0].message && peer->held.last == &sends[2].message);
    cl_peer_unhold(peer, &sends[0]);
    cl_peer_unhold(peer, &sends[2]);
    CHECK(peer->held.first == NULL && peer->held.last == NULL);
    CHECK(!cl_peer_wary(peer, &sends[0]));
    sends[0].probing = true;
    CHECK(cl_peer_wary(peer, &sends[0]));
    sends[0].accepted = true;
    CHECK(!cl_peer_wary(peer, &sends[0]));
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
    struct cl_send send;
    memset(&send, 0, sizeof(send));
    peer->next_ping_us = 900000;
    CHECK_EQ(cl_peer_deadline_us(peer), 900000);
    peer->pacer_us = 800000;
    CHECK_EQ(cl_peer_deadline_us(peer), 800000);
    cl_peer_hold(peer, &send, 700000);
    CHECK_EQ(cl_peer_deadline_us(peer), 700000 + CL_PEER_HELD_MIN_US);
    peer->alive = false;
    CHECK_EQ(cl_peer_deadline_us(peer), UINT64_MAX);
    cl_peer_destroy(peer);
}
