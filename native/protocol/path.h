/*
 * Path: one way to one peer, in both directions: the packets sent over it with their fate, and the packets that came.
 */
#pragma once

#include "congestion/congestion.h"
#include "protocol/ack.h"
#include "protocol/fragments.h"
#include "protocol/loss.h"
#include "protocol/mtu.h"
#include "protocol/nics.h"
#include "protocol/outbox.h"
#include "protocol/replay.h"
#include "protocol/rtt.h"
#include "protocol/sent.h"

enum {
    CL_PATH_DEAD_PTOS = 2,            /* a path is dead after so many timeouts in a row, while another path delivers */
    CL_PATH_PROBE_US = 50000,         /* how often a dead path is tried */
    CL_PATH_PROBE_IDLE_US = 10000000, /* the same, while nothing waits for the peer */
    CL_PATH_PINGS_MAX = 16, /* unanswered PINGs that are remembered: the longest round trip in CL_PATH_PROBE_US */
    CL_PATH_REPEAT_ROUND_TRIP_US = 4000, /* the least round trip for copies: see repeat.h */
    CL_PATH_REPEAT_PAUSE = 8,            /* a pause is one eighth of a round trip, or longer */
    CL_PATH_ACKS = 2,                    /* how often a sender asks for an acknowledgement, per packets in flight */
    CL_PATH_ACKS_CONTESTED = 8,          /* ... beside flows that fill the buffer: what they release must be no burst */
    CL_PATH_ACK_EVERY_MAX = 32,   /* packets after which a sender with a large window asks for an acknowledgement */
    CL_PATH_ACK_EVERY_YIELDS = 4, /* the same of traffic that yields: what acknowledgements release must be no queue */
};

#define CL_PATH_REPEAT_LOSS 0.0015 /* the least cl_loss.share for copies: two losses in a short time are enough */

struct cl_path {
    uint16_t index;
    bool dead;                     /* gets probes only */
    bool paused;                   /* gets data only while no other path lives: see cl_endpoint_pause */
    bool probe;                    /* a PTO fired: send one packet, whatever the window says */
    bool probe_waits;              /* the probe waits for the interface */
    bool ping;                     /* send a PING */
    uint32_t padded_ping;          /* send a PING of this size; 0: none */
    uint32_t unasked;              /* packets sent since one asked for an acknowledgement */
    uint64_t asked;                /* number of the packet that asked */
    uint64_t limited_until;        /* packets below this number left while the window was the limit */
    uint64_t yields_limited_until; /* ... that of CL_CLASS_YIELDS */
    uint64_t delivered_us;         /* when an acknowledgement last reported an arrival */
    uint64_t next_probe_us;        /* when a dead path is probed next */
    uint64_t packets_lost, packets_received;
    uint64_t packets_before; /* sent in former incarnations of the peer: the numbers of each begin at 0 */
    uint64_t heard_us;       /* when a packet of any kind last came; 0: never */
    uint64_t repeated;       /* packets below this number have had their chance of a copy: see repeat.h */
    uint32_t deaths;
    uint16_t marked; /* the peer's count of marked packets on this path: see ack.h */
    struct cl_nic *nic;
    struct cl_congestion congestion;
    const struct cl_outbox_port *port; /* the port through which its packets leave; set by the endpoint */
    struct cl_sent sent;
    struct cl_rtt rtt;
    struct cl_loss loss;
    struct cl_mtu mtu;
    struct cl_fragments fragments; /* parts of received packets */
    struct cl_ack ack;
    struct cl_replay packets, acks; /* numbers that came */
};

void cl_path_init(struct cl_path *path, uint16_t index, struct cl_nic *nic, uint32_t datagram_bytes);
void cl_path_free(struct cl_path *path);
/* Begins a new incarnation of the peer, as cl_path_init does. What is counted since the peer is known goes on, and so
 * does a pause. */
void cl_path_begin_anew(struct cl_path *path, uint32_t datagram_bytes);

/* Whether its port takes no packets now. */
static inline bool cl_path_is_full(const struct cl_path *path)
{
    return path->port->full;
}

/* Whether the window has room for one more packet. Less urgent packets in flight take no room away, and wait until both
 * fit again: so a class that joins less urgent ones adds one window at most. */
bool cl_path_open(const struct cl_path *path, uint8_t class, uint32_t bytes);

/* Counts a packet that is about to be sent. True: it should ask for an acknowledgement, as several packets per window
 * do. bytes: of this packet and the next. */
bool cl_path_asks(struct cl_path *path, uint8_t class, uint32_t bytes);

/* The functions are called for each packet whose fate an acknowledgement or a timer decides. */
struct cl_path_callbacks {
    cl_loss_fn acked, refused, lost, late;
    void *argument;
};
/* Takes an acknowledgement in. False, and nothing changed, when it is malformed. */
bool cl_path_on_ack(struct cl_path *path, const struct cl_packet *packet, const uint8_t *payload, uint64_t received_us,
                    uint64_t now_us, const struct cl_path_callbacks *callbacks);
/* Detects lost packets. The loss timer calls it; cl_path_on_ack does so itself. */
void cl_path_detect_losses(struct cl_path *path, uint64_t now_us, const struct cl_path_callbacks *callbacks);
/* Declares the path dead, and all packets in flight on it lost. */
void cl_path_give_up(struct cl_path *path, uint64_t now_us, const struct cl_path_callbacks *callbacks);
/* The search for the largest datagram goes on: orders a PING of the next size. active: there is traffic. */
void cl_path_probe_mtu(struct cl_path *path, bool active, uint64_t now_us);
/* The time when the probe timer fires; UINT64_MAX: nothing in flight needs it. */
uint64_t cl_path_pto_us(const struct cl_path *path);
/* It fired. */
void cl_path_on_pto(struct cl_path *path, uint64_t now_us);

/* The time when cl_repeat should be called; UINT64_MAX: it need not be. */
uint64_t cl_path_repeat_us(const struct cl_path *path);

/* Fills in the statistics of the path, all but the port. */
void cl_path_read(const struct cl_path *path, struct cl_path_stats *stats);

/* The earliest of this path's timers; UINT64_MAX: none. */
uint64_t cl_path_deadline_us(const struct cl_path *path);
