#include "protocol/peer.h"

#include <stdlib.h>

struct cl_peer *cl_peer_create(uint16_t id, uint16_t path_count, struct cl_nic *const *nics, uint32_t datagram_bytes)
{
    struct cl_peer *peer = calloc(1, sizeof(*peer) + path_count * sizeof(struct cl_path));
    if (peer == NULL)
        return NULL;
    peer->id = id;
    peer->path_count = path_count;
    peer->alive = true;
    peer->timeout_us = CL_PEER_TIMEOUT_US;
    peer->pacer_us = UINT64_MAX;
    peer->ending_us = UINT64_MAX;
    peer->timer.owner = peer;
    for (uint16_t i = 0; i < path_count; i++)
        cl_path_init(&peer->paths[i], i, nics[i], datagram_bytes);
    return peer;
}

void cl_peer_destroy(struct cl_peer *peer)
{
    for (uint16_t i = 0; i < peer->path_count; i++)
        cl_path_free(&peer->paths[i]);
    cl_history_free(&peer->history);
    cl_index_free(&peer->held_operations);
    cl_controls_free(&peer->controls);
    cl_stops_free(&peer->stops);
    free(peer);
}

void cl_peer_lose(struct cl_peer *peer)
{
    peer->alive = false;
    cl_controls_free(&peer->controls);
    cl_stops_free(&peer->stops);
    for (uint16_t i = 0; i < peer->path_count; i++)
        cl_path_free(&peer->paths[i]);
}

void cl_peer_revive(struct cl_peer *peer, uint32_t incarnation, uint32_t datagram_bytes)
{
    for (uint16_t i = 0; i < peer->path_count; i++) {
        cl_path_begin_anew(&peer->paths[i], datagram_bytes);
        cl_mtu_init(&peer->paths[i].mtu, CL_PACKET_HEAD_BYTES + peer->payload_bytes);
    }
    peer->incarnation = incarnation;
    peer->alive = true;
    peer->heard = false;
    peer->heard_us = peer->answered_us = peer->next_ping_us = 0;
    peer->greetings = 0;
    peer->pacer_us = peer->ending_us = UINT64_MAX;
    peer->held_us = 0;
    peer->ready_count = 0;
    peer->refused_us = 0;
    peer->reordering_us = 0;
}

void cl_peer_hold(struct cl_peer *peer, struct cl_send *send, uint64_t now_us)
{
    if (peer->held.first == NULL) {
        peer->held_wait_us = CL_PEER_HELD_MIN_US;
        peer->held_us = now_us + peer->held_wait_us;
    }
    send->held = true;
    cl_message_list_append(&peer->held, &send->message);
    /* without memory a READY does not find it: see CL_PEER_HELD_MAX_US */
    struct cl_message_id id = send->message.id;
    (void)cl_index_add(&peer->held_operations, &send->message.operation, cl_index_operation(id.group, id.sequence));
}

void cl_peer_unhold(struct cl_peer *peer, struct cl_send *send)
{
    send->held = false;
    cl_message_list_remove(&peer->held, &send->message);
    cl_index_remove(&peer->held_operations, &send->message.operation);
}

bool cl_peer_ready_since(const struct cl_peer *peer, const struct cl_message_id *id, uint64_t sent_us)
{
    for (uint32_t i = 0; i < CL_PEER_READIES && i < peer->ready_count; i++) {
        const struct cl_peer_ready *ready = &peer->readies[i];
        if (ready->group == id->group && ready->sequence == id->sequence && ready->us >= sent_us)
            return true;
    }
    return false;
}

void cl_peer_note_ready(struct cl_peer *peer, uint32_t group, uint32_t sequence, uint64_t now_us)
{
    peer->readies[peer->ready_count++ % CL_PEER_READIES] = (struct cl_peer_ready){group, sequence, now_us};
}

bool cl_peer_wary(const struct cl_peer *peer, const struct cl_send *send)
{
    return !send->accepted && (send->probing || peer->held.first != NULL);
}

bool cl_peer_delivers_elsewhere(const struct cl_peer *peer, const struct cl_path *path)
{
    const struct cl_sent_packet *oldest = cl_sent_find(&path->sent, path->sent.low);
    if (oldest == NULL)
        return false;
    for (uint16_t i = 0; i < peer->path_count; i++)
        if (&peer->paths[i] != path && !peer->paths[i].dead && peer->paths[i].delivered_us > oldest->sent_us)
            return true;
    return false;
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint64_t cl_peer_ask_us(const struct cl_peer *peer)
{
    return peer->timeout_us / (peer->outstanding ? CL_PEER_ASK_WAITING : CL_PEER_ASK_IDLE);
}

uint64_t cl_peer_lost_us(const struct cl_peer *peer)
{
    uint64_t patience_us = peer->timeout_us / CL_PEER_ASK_WAITING + peer->timeout_us;
    return earlier(peer->heard_us + patience_us, peer->answered_us + 2 * patience_us);
}

uint64_t cl_peer_deadline_us(const struct cl_peer *peer)
{
    if (!peer->alive)
        return UINT64_MAX;
    uint64_t deadline_us = earlier(earlier(peer->next_ping_us, peer->pacer_us), peer->ending_us);
    if (peer->held.first != NULL)
        deadline_us = earlier(deadline_us, peer->held_us);
    if (peer->outstanding)
        deadline_us = earlier(deadline_us, cl_peer_lost_us(peer));
    for (uint16_t i = 0; i < peer->path_count; i++)
        deadline_us = earlier(deadline_us, cl_path_deadline_us(&peer->paths[i]));
    return deadline_us;
}
