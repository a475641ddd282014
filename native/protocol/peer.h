/*
 * Peer: another process: its paths, its finished messages, the control packets that wait for it, and whether it is
 * alive.
 */
#pragma once

#include "protocol/control.h"
#include "protocol/history.h"
#include "protocol/path.h"
#include "protocol/queue.h"
#include "protocol/stop.h"
#include "protocol/timers.h"

enum {
    CL_PEER_PATHS_MAX = 8,
    CL_PEER_TIMEOUT_US = 3000000, /* default: a peer that does not answer a PING for so long is lost */
    CL_PEER_ASK_WAITING = 10,     /* after timeout / 10 of silence, a peer that is waited for gets a PING ... */
    CL_PEER_ASK_IDLE = 3,         /* ... and after timeout / 3 one that a receive from any source may wait for, or that
                                     has not answered yet; the former then gets one every timeout / 10 */
    CL_PEER_GREETINGS = 10,       /* how often one that nothing waits for is asked until all its paths have answered */
    CL_PEER_HELD_MIN_US = 10000,  /* a held message is tried after this time even without a READY: a safety net */
    CL_PEER_HELD_MAX_US = 200000,
    CL_PEER_REFUSED_US = 5000000, /* for so long after a refusal, posted receives are announced with READY */
    CL_PEER_READIES = 16,
};

/* A READY that came. It is remembered for refusals that were on their way at the same time. */
struct cl_peer_ready {
    uint32_t group, sequence;
    uint64_t us;
};

struct cl_peer {
    struct cl_queue_node node;
    uint16_t id;
    uint16_t path_count;
    bool alive;
    uint32_t incarnation; /* see revival.h */
    bool keyed;           /* has a seal of its own */
    struct cl_seal seal;
    uint32_t payload_bytes;     /* payload of a full DATA packet to or from it: the smaller of the two sizes */
    bool grants;                /* it sends credit for what this process sends to it: see credit.h ... */
    uint32_t unscheduled_bytes; /* ... but for so many bytes of each message */
    uint64_t timeout_us;        /* longest wait for an answer while a message is outstanding: see cl_peer_lost_us */
    bool heard;                 /* it has sent a packet to this process */
    bool urgent;                /* in the list of peers with something to send at once: see peer_list.h */
    struct cl_peer *urgent_next;
    bool waiting; /* in the list of peers that wait for an interface */
    struct cl_peer *waiting_next;
    struct cl_timer timer;

    uint32_t outstanding;  /* posted messages, both sides */
    uint32_t expected;     /* receives among those */
    uint64_t lacking;      /* packets that these still lack */
    uint64_t heard_us;     /* since when it is silent; 0: not known yet */
    uint64_t answered_us;  /* since when it has acknowledged nothing: it may send packets and not hear this process */
    uint64_t next_ping_us; /* UINT64_MAX: not asked */
    uint32_t greetings;    /* how often it was asked while nothing waited for it */
    uint64_t pacer_us;     /* when a pacer that blocks the peer lets go; UINT64_MAX: no pacer does */

    /* sends that it refused as a receiver, first in, first out */
    struct cl_message_list held;
    struct cl_index held_operations; /* the same by operation */
    uint64_t held_us;                /* when to try the first */
    uint32_t held_wait_us;
    struct cl_peer_ready readies[CL_PEER_READIES];
    uint32_t ready_count;

    /* as a sender */
    uint64_t refused_us;           /* when this process last refused a packet of it; 0: never */
    struct cl_message_list ending; /* partial receives with a time to end, in no order */
    uint64_t ending_us;            /* the first of these times, or earlier; UINT64_MAX: none */
    uint64_t reordering_us;        /* lateness of packets that came for messages ended without them */
    struct cl_stops stops;
    struct cl_history history;

    uint16_t turn_path;                /* path of its packets until its turn ends */
    uint64_t turns[CL_PEER_PATHS_MAX]; /* bytes sent to it through each interface, see turn_of in outbound.c */

    struct cl_controls controls;
    struct cl_path paths[];
};

/* nics[i]: the interface of path i. NULL when there is no memory. */
struct cl_peer *cl_peer_create(uint16_t id, uint16_t path_count, struct cl_nic *const *nics, uint32_t datagram_bytes);
void cl_peer_destroy(struct cl_peer *peer);

/* The peer is lost: forgets packets on their way. */
void cl_peer_lose(struct cl_peer *peer);
/* Begins an incarnation of a lost peer: alive, with new paths, numbers and timers. */
void cl_peer_revive(struct cl_peer *peer, uint32_t incarnation, uint32_t datagram_bytes);

void cl_peer_hold(struct cl_peer *peer, struct cl_send *send, uint64_t now_us);
void cl_peer_unhold(struct cl_peer *peer, struct cl_send *send);
/* Whether the receiver announced room for the message's operation after a packet left at sent_us. */
bool cl_peer_ready_since(const struct cl_peer *peer, const struct cl_message_id *id, uint64_t sent_us);
void cl_peer_note_ready(struct cl_peer *peer, uint32_t group, uint32_t sequence, uint64_t now_us);

/* Whether only one packet of the message may be in flight: the receiver refuses other messages and has accepted no
 * packet of this one. */
bool cl_peer_wary(const struct cl_peer *peer, const struct cl_send *send);

/* Whether another path has delivered a packet since the oldest packet on `path` was sent: then the path has failed, not
 * the peer. */
bool cl_peer_delivers_elsewhere(const struct cl_peer *peer, const struct cl_path *path);

/* The time of silence after which the peer gets a PING. */
uint64_t cl_peer_ask_us(const struct cl_peer *peer);
/* The time when a silent peer that is waited for is lost: a timeout after its first PING. So a process that was stopped
 * for less than the timeout is never lost, however long it had been silent before. A peer that sends packets but
 * acknowledges none gets twice the time. */
uint64_t cl_peer_lost_us(const struct cl_peer *peer);

/* The earliest of the peer's timers; UINT64_MAX: none. */
uint64_t cl_peer_deadline_us(const struct cl_peer *peer);
