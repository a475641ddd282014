#include "protocol/peer_list.h"

#include <stdlib.h>
#include <string.h>

bool cl_peer_list_reserve(struct cl_peer_list *peers, uint16_t id)
{
    if (id < peers->length)
        return true;
    uint32_t length = (uint32_t)id + 1;
    struct cl_peer **list = realloc(peers->list, length * sizeof(struct cl_peer *));
    if (list == NULL)
        return false;
    memset(list + peers->length, 0, (length - peers->length) * sizeof(struct cl_peer *));
    peers->list = list;
    peers->length = length;
    return true;
}

void cl_peer_list_add(struct cl_peer_list *peers, struct cl_peer *peer)
{
    peers->list[peer->id] = peer;
    peers->count++;
}

void cl_peer_list_free(struct cl_peer_list *peers)
{
    for (uint32_t i = 0; i < peers->length; i++)
        if (peers->list[i] != NULL)
            cl_peer_destroy(peers->list[i]);
    free(peers->list);
    *peers = (struct cl_peer_list){0};
}

void cl_peer_list_urge(struct cl_peer_list *peers, struct cl_peer *peer)
{
    if (peer->urgent)
        return;
    peer->urgent = true;
    peer->urgent_next = NULL;
    *(peers->urgent_last != NULL ? &peers->urgent_last->urgent_next : &peers->urgent_first) = peer;
    peers->urgent_last = peer;
}

void cl_peer_list_calm(struct cl_peer_list *peers)
{
    struct cl_peer *peer = peers->urgent_first;
    peers->urgent_first = peer->urgent_next;
    if (peers->urgent_first == NULL)
        peers->urgent_last = NULL;
    peer->urgent = false;
}

void cl_peer_list_wait(struct cl_peer_list *peers, struct cl_peer *peer)
{
    if (peer->waiting)
        return;
    peer->waiting = true;
    peer->waiting_next = NULL;
    *(peers->waiting_first != NULL ? &peers->waiting_last->waiting_next : &peers->waiting_first) = peer;
    peers->waiting_last = peer;
}

struct cl_peer *cl_peer_list_release(struct cl_peer_list *peers)
{
    struct cl_peer *peer = peers->waiting_first;
    if (peer != NULL) {
        peers->waiting_first = peer->waiting_next;
        peer->waiting = false;
    }
    return peer;
}

bool cl_peer_list_tell(struct cl_peer_list *peers, struct cl_peer *peer, uint8_t kind, struct cl_control control)
{
    bool told = cl_controls_push(&peer->controls, kind, &control);
    if (told)
        cl_peer_list_urge(peers, peer);
    return told;
}
