/*
 * Peer list: all peers of an endpoint by id, the list of the urgent ones, which have something to send before any data
 * (an acknowledgement, a control packet, a probe or a PING), and the list of those that wait for an interface.
 */
#pragma once

#include "protocol/peer.h"

struct cl_peer_list {
    struct cl_peer **list; /* by id; NULL where there is none */
    uint32_t length;
    uint32_t count;
    struct cl_peer *urgent_first, *urgent_last;
    struct cl_peer *waiting_first, *waiting_last;
};

/* NULL when there is no such peer. */
static inline struct cl_peer *cl_peer_list_find(const struct cl_peer_list *peers, uint16_t id)
{
    return id < peers->length ? peers->list[id] : NULL;
}
/* Makes room for a peer of this id. False when there is no memory. */
bool cl_peer_list_reserve(struct cl_peer_list *peers, uint16_t id);
/* Takes ownership of a peer for which there is room. */
void cl_peer_list_add(struct cl_peer_list *peers, struct cl_peer *peer);
void cl_peer_list_free(struct cl_peer_list *peers);

/* The peer has something to send before any data. */
void cl_peer_list_urge(struct cl_peer_list *peers, struct cl_peer *peer);
/* The first urgent peer has nothing more to send. */
void cl_peer_list_calm(struct cl_peer_list *peers);
/* The peer has something to send, and its interfaces take nothing now. */
void cl_peer_list_wait(struct cl_peer_list *peers, struct cl_peer *peer);
/* Takes the peer that has waited longest from the list; NULL: none waits. */
struct cl_peer *cl_peer_list_release(struct cl_peer_list *peers);
/* Queues a control packet to the peer. False when there is no memory. */
bool cl_peer_list_tell(struct cl_peer_list *peers, struct cl_peer *peer, uint8_t kind, struct cl_control control);
