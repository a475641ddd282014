/*
 * Peer: another process: its paths, what of it is finished, what waits to be said to it, and whether it is alive.
 */
#ifndef CL_PROTOCOL_PEER_H
#define CL_PROTOCOL_PEER_H

#include "protocol/control.h"
#include "protocol/history.h"
#include "protocol/path.h"
#include "protocol/queue.h"
#include "protocol/stop.h"
#include "protocol/timers.h"

enum {
    CL_PEER_PATHS_MAX = 8,
    CL_PEER_TIMEOUT_US = 3000000, /* of a question: the peer is lost after so long without a word, by default */
    CL_PEER_ASK_WAITING = 10,     /* a peer that is waited for is asked after this part of the timeout in silence ... */
    CL_PEER_ASK_IDLE = 3,         /* ... and any other one after this */
    CL_PEER_HELD_MIN_US = 10000,  /* how soon a held message is tried without a READY: only a safety net */
    CL_PEER_HELD_MAX_US = 200000,
    CL_PEER_REFUSED_US = 5000000, /* how long after a refusal posted receives are announced with READY */
    CL_PEER_READIES = 16,
};

/* A READY that came, for refusals that overtake it or are overtaken. */
struct cl_peer_ready {
    uint32_t group, sequence;
    uint64_t us;
};

struct cl_peer {
    struct cl_queue_node node;
    uint16_t id;
    uint16_t path_count;
    bool alive;
    bool keyed; /* has a seal of its own */
    struct cl_seal seal;
    uint32_t payload_bytes; /* of a full DATA packet to or from it: the smaller one of what either can send */
    uint64_t timeout_us;    /* of an unanswered question, if anybody waits for the peer: see cl_peer_lost_us */
    bool heard;             /* it has ever sent us something */
    bool urgent;            /* in the endpoint's list of peers with something to send at once */
    struct cl_peer *urgent_next;
    struct cl_timer timer;

    uint32_t outstanding; /* posted messages, both sides */
    uint32_t expected;    /* of those, what it is to send us */
    uint64_t heard_us;    /* since when it is silent; 0: not known yet */
    uint64_t answered_us; /* since when it has not acknowledged anything: it may speak and not hear us */
    uint64_t next_ping_us;
    uint64_t pacer_us; /* when a pacer that blocks the peer lets go; UINT64_MAX: none does */

    /* as a receiver of ours: messages it refused, first in, first out */
    struct cl_message_list held;
    uint64_t held_us; /* when to try the first */
    uint32_t held_wait_us;
    struct cl_peer_ready readies[CL_PEER_READIES];
    uint32_t ready_count;

    /* as a sender to us */
    uint64_t refused_us;           /* when we last refused a packet of it; 0: never */
    struct cl_message_list ending; /* partial receives with a time to end, in no order */
    uint64_t ending_us;            /* the first of those times, or earlier; UINT64_MAX: none */
    uint64_t reordering_us;        /* how late packets have come for messages ended without them */
    struct cl_stops stops;
    struct cl_history history;

    uint16_t turn_path;                /* what its packets leave by until its turn ends */
    uint64_t turns[CL_PEER_PATHS_MAX]; /* by interface: bytes it was sent, or would have been had it waited for them */

    struct cl_controls controls;
    struct cl_path paths[];
};

/* `egresses`: of each path. NULL when there is no memory. */
struct cl_peer *cl_peer_create(uint16_t id, uint16_t path_count, struct cl_egress *const *egresses,
                               uint32_t datagram_bytes);
void cl_peer_destroy(struct cl_peer *peer);

void cl_peer_hold(struct cl_peer *peer, struct cl_message *message, uint64_t now_us);
void cl_peer_unhold(struct cl_peer *peer, struct cl_message *message);
/* Whether a packet sent at sent_us was on its way when the receiver announced room for its operation. */
bool cl_peer_ready_since(const struct cl_peer *peer, const struct cl_message_id *id, uint64_t sent_us);
void cl_peer_note_ready(struct cl_peer *peer, uint32_t group, uint32_t sequence, uint64_t now_us);

/* A receiver that refuses others gets one packet of a message first, until it has taken some of it. */
bool cl_peer_wary(const struct cl_peer *peer, const struct cl_message *message);

/* Another path than `path` has delivered something since the oldest packet on `path` was sent: so the path is what does
 * not work, not the peer. */
bool cl_peer_delivers_elsewhere(const struct cl_peer *peer, const struct cl_path *path);

/* How long a silent peer is left in peace. */
uint64_t cl_peer_ask_us(const struct cl_peer *peer);
/* When a peer that is waited for and stays silent is lost: the timeout after it was first asked. So a process that was
 * stopped for less than the timeout is never lost, however long it had been silent before. One that speaks but never
 * answers gets twice that. */
uint64_t cl_peer_lost_us(const struct cl_peer *peer);

/* The earliest of the peer's timers; UINT64_MAX: none. */
uint64_t cl_peer_deadline_us(const struct cl_peer *peer);

#endif
