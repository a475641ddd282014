#include "protocol/upkeep.h"

#include "protocol/credit.h"
#include "protocol/ending.h"
#include "protocol/messages.h"
#include "protocol/outcome.h"
#include "protocol/partial.h"
#include "protocol/repeat.h"

enum {
    STALL_US = 500000, /* timers this late mean that this process was stopped: that time is no silence of its peers */
};

uint64_t cl_endpoint_next_timeout(const struct cl_endpoint *endpoint)
{
    return cl_timers_first_us(&endpoint->timers);
}

/* Sends PINGs over other paths, to find out whether the path is silent or the peer. A path with data in flight needs no
 * PING. */
static void ask_elsewhere(struct cl_peer *peer, const struct cl_path *silent)
{
    for (uint16_t i = 0; i < peer->path_count; i++) {
        struct cl_path *path = &peer->paths[i];
        if (path != silent && !path->dead && path->sent.packets == path->sent.pings)
            path->ping = true;
    }
}

/* Whether anything waits for the peer. */
static bool is_active(const struct cl_endpoint *endpoint, const struct cl_peer *peer)
{
    return peer->outstanding || endpoint->announcements.wanted_count;
}

void cl_endpoint_activate(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us)
{
    peer->heard_us = peer->answered_us = now_us ? now_us : 1;
    uint64_t first_us = now_us + cl_peer_ask_us(peer);
    if (peer->next_ping_us > first_us)
        peer->next_ping_us = first_us;
    for (uint16_t i = 0; i < peer->path_count; i++) {
        if (peer->paths[i].dead && peer->paths[i].next_probe_us > now_us + CL_PATH_PROBE_US)
            peer->paths[i].next_probe_us = now_us;
        cl_mtu_resume(&peer->paths[i].mtu, now_us);
    }
    cl_endpoint_arm(endpoint, peer, cl_peer_deadline_us(peer));
}

static void service_path(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint64_t now_us)
{
    struct cl_outcome outcome = {endpoint, peer, now_us};
    struct cl_path_callbacks callbacks = cl_outcome_callbacks(&outcome);
    if (path->ack.deadline_us <= now_us && !cl_path_is_full(path))
        cl_peer_list_urge(&endpoint->peers, peer);
    if (path->loss.deadline_us <= now_us) {
        cl_path_detect_losses(path, now_us, &callbacks);
        cl_queue_unblock(&endpoint->queue, &peer->node); /* lost packets have left the window */
    }
    if (cl_path_repeat_us(path) <= now_us)
        cl_repeat(endpoint, peer, path, now_us);
    if (path->mtu.next_us <= now_us) {
        cl_path_probe_mtu(path, is_active(endpoint, peer), now_us);
        cl_peer_list_urge(&endpoint->peers, peer);
    }
    if (path->dead) {
        if (path->next_probe_us <= now_us) {
            path->next_probe_us = now_us + (is_active(endpoint, peer) ? CL_PATH_PROBE_US : CL_PATH_PROBE_IDLE_US);
            path->ping = true;
            cl_peer_list_urge(&endpoint->peers, peer);
        }
    } else if (cl_path_pto_us(path) <= now_us) {
        cl_path_on_pto(path, now_us);
        if (path->loss.pto_count >= CL_PATH_DEAD_PTOS && cl_peer_delivers_elsewhere(peer, path)) {
            cl_path_give_up(path, now_us, &callbacks);
            cl_queue_unblock(&endpoint->queue, &peer->node);
        } else {
            ask_elsewhere(peer, path);
        }
        cl_peer_list_urge(&endpoint->peers, peer);
    }
}

/* Lets the first held message send one packet; the others wait for its fate. */
static void try_held(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us)
{
    struct cl_send *send = cl_message_as_send(peer->held.first);
    cl_peer_unhold(peer, send);
    send->probing = true;
    send->accepted = false;
    cl_messages_requeue(endpoint, send, true);
    peer->held_wait_us = 2 * peer->held_wait_us < CL_PEER_HELD_MAX_US ? 2 * peer->held_wait_us : CL_PEER_HELD_MAX_US;
    peer->held_us = now_us + peer->held_wait_us;
}

static bool is_measured(const struct cl_peer *peer)
{
    for (uint16_t i = 0; i < peer->path_count; i++)
        if (!peer->paths[i].rtt.any)
            return false;
    return true;
}

/* Asks a silent peer whether it lives. One that nothing waits for is not asked: otherwise a process would send packets
 * to all others of a large job all the time. But at the start, when the peer may not be there yet, every path is asked
 * until it answers once, which measures the empty network. */
static void ask(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us)
{
    uint64_t quiet_us = cl_peer_ask_us(peer);
    bool active = is_active(endpoint, peer);
    if (active && now_us < peer->answered_us + quiet_us) {
        peer->next_ping_us = peer->answered_us + quiet_us;
        return;
    }
    if (!active && (peer->greetings == CL_PEER_GREETINGS || is_measured(peer))) {
        peer->next_ping_us = UINT64_MAX;
        return;
    }
    for (uint16_t i = 0; i < peer->path_count; i++)
        if (active || !peer->paths[i].rtt.any)
            peer->paths[i].ping = true;
    peer->greetings += !active;
    /* One lost packet is no silence: until the answer comes, a peer that something waits for is asked often. */
    peer->next_ping_us = now_us + (active ? peer->timeout_us / CL_PEER_ASK_WAITING : quiet_us);
    cl_peer_list_urge(&endpoint->peers, peer);
}

static void service(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us)
{
    if (!peer->alive)
        return;
    if (!peer->heard_us) {
        peer->heard_us = peer->answered_us = now_us;
        peer->next_ping_us = now_us + cl_peer_ask_us(peer);
    }
    if (peer->outstanding && now_us >= cl_peer_lost_us(peer)) {
        cl_endpoint_peer_lost(endpoint, peer->id);
        return;
    }
    for (uint16_t i = 0; i < peer->path_count; i++)
        service_path(endpoint, peer, &peer->paths[i], now_us);
    if (peer->pacer_us <= now_us) {
        peer->pacer_us = UINT64_MAX;
        cl_queue_unblock(&endpoint->queue, &peer->node);
    }
    if (peer->held.first != NULL && peer->held_us <= now_us)
        try_held(endpoint, peer, now_us);
    if (peer->ending_us <= now_us)
        cl_partial_service(endpoint, peer, now_us);
    if (peer->next_ping_us <= now_us)
        ask(endpoint, peer, now_us);
    if (!peer->urgent) /* sending to an urgent peer arms the timer */
        cl_endpoint_arm(endpoint, peer, cl_peer_deadline_us(peer));
}

static void resume_probes(struct cl_endpoint *endpoint, struct cl_peer *peer)
{
    for (uint16_t i = 0; i < peer->path_count; i++) {
        if (peer->paths[i].probe_waits)
            cl_peer_list_urge(&endpoint->peers, peer);
        peer->paths[i].probe_waits = false;
    }
}

/* A pacer lets packets go again: unblocks the peers and probes that waited for it. */
static void release_interfaces(struct cl_endpoint *endpoint)
{
    struct cl_peer *peer;
    while ((peer = cl_peer_list_release(&endpoint->peers)) != NULL) {
        cl_queue_unblock(&endpoint->queue, &peer->node);
        resume_probes(endpoint, peer);
    }
}

/* Counts the time from `from_us` to now as no silence of the peer. The silence before it stays: where this process
 * stalls again and again, a dead peer would never be lost otherwise. */
static void forgive(struct cl_peer *peer, uint64_t from_us, uint64_t now_us)
{
    uint64_t *const since[] = {&peer->heard_us, &peer->answered_us};
    for (int i = 0; i < 2; i++)
        *since[i] = *since[i] < from_us ? *since[i] + (now_us - from_us) : now_us;
}

void cl_endpoint_timeout(struct cl_endpoint *endpoint, uint64_t now_us)
{
    /* A timer may also be late because it was armed late. */
    uint64_t expected_us = cl_timers_first_us(&endpoint->timers);
    if (expected_us < endpoint->awake_us)
        expected_us = endpoint->awake_us;
    endpoint->awake_us = now_us;
    if (expected_us > 0 && expected_us < now_us && now_us - expected_us > STALL_US)
        for (uint32_t i = 0; i < endpoint->peers.length; i++)
            if (endpoint->peers.list[i] != NULL && endpoint->peers.list[i]->heard_us)
                forgive(endpoint->peers.list[i], expected_us, now_us);
    struct cl_timer *timer;
    while ((timer = cl_timers_pop(&endpoint->timers, now_us)) != NULL) {
        if (timer == &endpoint->nics.timer)
            release_interfaces(endpoint);
        else if (timer == &endpoint->ledger.timer)
            cl_credit_expire(endpoint, now_us);
        else
            service(endpoint, timer->owner, now_us);
    }
}
