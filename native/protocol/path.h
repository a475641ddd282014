/*
 * Path: one way to one peer, in both directions: what we sent over it and how that fares, and what came over it.
 */
#ifndef CL_PROTOCOL_PATH_H
#define CL_PROTOCOL_PATH_H

#include "congestion/cc.h"
#include "congestion/egress.h"
#include "congestion/ingress.h"
#include "congestion/pacer.h"
#include "congestion/rtt.h"
#include "protocol/ack.h"
#include "protocol/loss.h"
#include "protocol/replay.h"
#include "protocol/sent.h"

enum {
    CL_PATH_DEAD_PTOS = 2,       /* timeouts in a row, while another path delivers, that make a path dead */
    CL_PATH_PROBE_US = 50000,    /* how often a dead path is tried */
    CL_PATH_PINGS_MAX = 16,      /* unanswered ones that are remembered: the longest round trip in CL_PATH_PROBE_US */
    CL_PATH_URGENT_PACKETS = 16, /* that may go whatever the window, while less urgent ones are in flight */
    CL_PATH_ACK_EVERY_MAX = 32,  /* packets after which a sender with a large window asks for an acknowledgement */
};

struct cl_path {
    uint16_t index;
    bool dead;              /* gets probes only */
    bool probe;             /* a PTO fired: send one packet, whatever the window says */
    bool probe_waits;       /* for the interface */
    bool ping;              /* send a PING */
    uint32_t unasked;       /* packets sent since one asked for an acknowledgement */
    uint64_t asked;         /* number of that one */
    uint64_t limited_until; /* packets below this number left while the window was the limit */
    uint64_t delivered_us;  /* when an acknowledgement last said that something arrived */
    uint64_t next_probe_us; /* while dead */
    uint64_t packets_lost, packets_received;
    uint16_t marked; /* what the peer has counted of our packets: see ack.h */
    struct cl_egress *egress;
    struct cl_egress_view view;
    struct cl_ingress *ingress;           /* set by the endpoint */
    struct cl_active_set_member sender;   /* the peer's place in it */
    struct cl_active_set_member receiver; /* and in the interface's active_set of receivers */
    struct cl_sent sent;
    struct cl_rtt rtt;
    struct cl_loss loss;
    struct cl_cc cc;
    struct cl_pacer pacer;
    struct cl_ack ack;
    struct cl_replay packets, acks; /* whose numbers came */
};

void cl_path_init(struct cl_path *path, uint16_t index, struct cl_egress *egress, uint32_t datagram_bytes);
void cl_path_free(struct cl_path *path);

/* Room in the window for one more packet. What is less urgent takes none away, and waits until both fit again: so a
 * class that comes to others in flight adds one window at most. */
bool cl_path_open(const struct cl_path *path, uint8_t class, uint32_t bytes);

/* Counts the packet about to be sent; true when it should ask for an acknowledgement: several times per window. bytes:
 * of this one and the next. */
bool cl_path_asks(struct cl_path *path, uint8_t class, uint32_t bytes);

/* What an acknowledgement changed in this path; the packets themselves went to the callbacks. */
struct cl_path_callbacks {
    cl_loss_fn acked, refused, lost, late;
    void *argument;
};
/* False, and nothing changed, when the frame is malformed. */
bool cl_path_on_ack(struct cl_path *path, const struct cl_packet *packet, const uint8_t *payload, uint64_t received_us,
                    uint64_t now_us, const struct cl_path_callbacks *callbacks);
/* The loss timer fired. */
void cl_path_on_loss_timer(struct cl_path *path, uint64_t now_us, const struct cl_path_callbacks *callbacks);
/* The probe timer fired. */
void cl_path_on_pto(struct cl_path *path);

/* All that its statistics say but the port. */
void cl_path_read(const struct cl_path *path, struct cl_path_stats *stats);

/* The earliest of this path's timers; UINT64_MAX: none. */
uint64_t cl_path_deadline_us(const struct cl_path *path);

#endif
