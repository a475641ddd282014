#include "protocol/peer_list.h"

#include <stddef.h>

#include "protocol/packet.h"
#include "tests/check.h"

static struct cl_peer *add(struct cl_peer_list *peers, uint16_t id)
{
    static struct cl_nic nic;
    struct cl_nic *of_paths[] = {&nic};
    cl_congestion_nic_init(&nic.congestion, cl_congestion_find(NULL), 1472);
    struct cl_peer *peer = cl_peer_create(id, 1, of_paths, 1472);
    CHECK(peer != NULL && cl_peer_list_reserve(peers, id));
    cl_peer_list_add(peers, peer);
    return peer;
}

TEST(test_peers_are_found_by_id)
{
    SCOPED(cl_peer_list_free) struct cl_peer_list peers = {0};
    CHECK(cl_peer_list_find(&peers, 0) == NULL);
    struct cl_peer *five = add(&peers, 5), *two = add(&peers, 2);
    CHECK(cl_peer_list_find(&peers, 5) == five && cl_peer_list_find(&peers, 2) == two);
    CHECK(cl_peer_list_find(&peers, 3) == NULL && cl_peer_list_find(&peers, 6) == NULL);
    CHECK_EQ(peers.count, 2);
}

/* Peers that wait for an interface are released in the order in which they began to wait, each once. */
TEST(test_waiting_peers)
{
    SCOPED(cl_peer_list_free) struct cl_peer_list peers = {0};
    struct cl_peer *one = add(&peers, 1), *two = add(&peers, 2);
    CHECK(cl_peer_list_release(&peers) == NULL);
    cl_peer_list_wait(&peers, two);
    cl_peer_list_wait(&peers, one);
    cl_peer_list_wait(&peers, two);
    CHECK(cl_peer_list_release(&peers) == two);
    cl_peer_list_wait(&peers, two);
    CHECK(cl_peer_list_release(&peers) == one && cl_peer_list_release(&peers) == two);
    CHECK(cl_peer_list_release(&peers) == NULL);
}

/* Urgent peers are in the order in which they became urgent, each once; control packets make a peer urgent. */
TEST(test_urgent_peers)
{
    SCOPED(cl_peer_list_free) struct cl_peer_list peers = {0};
    struct cl_peer *one = add(&peers, 1), *two = add(&peers, 2);
    struct cl_message_id id = {1, 2, 3};
    cl_peer_list_tell(&peers, two, CL_PACKET_MISMATCH, cl_control_message(&id));
    cl_peer_list_urge(&peers, one);
    cl_peer_list_tell(&peers, two, CL_PACKET_MISMATCH, cl_control_message(&id));
    CHECK_EQ(two->controls.count, 1);
    CHECK(peers.urgent_first == two && two->urgent_next == one && peers.urgent_last == one);
    cl_peer_list_calm(&peers);
    CHECK(!two->urgent && peers.urgent_first == one);
    cl_peer_list_calm(&peers);
    CHECK(!one->urgent && peers.urgent_first == NULL && peers.urgent_last == NULL);
}
