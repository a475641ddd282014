/*
 * Congestion: how fast packets leave. This header is all that the rest of the engine knows of it (tests/unit/
 * test_imports.py enforces that): a function for each event, and questions. To try another rate control, write these
 * functions anew. docs/congestion.md tells which signal has which effect.
 *
 * A cl_congestion_nic is one network interface of this host, a cl_congestion one path through it to one peer, both in
 * both directions. Their fields are private.
 */
#pragma once

#include "congestion/cc.h"
#include "congestion/class.h"
#include "congestion/egress.h"
#include "congestion/ingress.h"
#include "congestion/pacer.h"
#include "congestion/peak.h"

enum {
    CL_CONGESTION_OVERHEAD_BYTES = CL_EGRESS_OVERHEAD_BYTES, /* of a datagram, on the wire */
    CL_CONGESTION_URGENT_PACKETS = 16, /* urgent packets that may leave beside less urgent ones, whatever the window */
};

struct cl_congestion_nic {
    struct cl_egress egress;
    struct cl_ingress ingress;
    struct cl_peak delivered, arrived;
};

struct cl_congestion {
    struct cl_congestion_nic *nic;
    struct cl_cc cc;
    struct cl_pacer pacer;
    struct cl_egress_view view;
    struct cl_active_set_member sender;   /* the peer's place among the senders to this interface */
    struct cl_active_set_member receiver; /* its place among the receivers from this interface */
};

/* What is remembered of a packet in flight. */
struct cl_congestion_packet {
    struct cl_egress_snapshot egress;
};

/* An acknowledged packet whose times are known. */
struct cl_congestion_timing {
    bool known; /* false: of no packet */
    uint8_t class;
    bool overtaken; /* by a more urgent packet, in a switch */
    struct cl_congestion_packet packet;
    uint64_t sent_us;
    uint32_t clock_us; /* when it arrived, by the peer's clock */
    uint32_t queue_us; /* time it spent in queues */
    uint32_t base_us;  /* round trip of the empty network */
};

struct cl_congestion_ack {
    uint64_t bytes;        /* newly acknowledged, headers included */
    uint32_t packets;      /* newly acknowledged */
    uint32_t marked;       /* packets marked by switches (ECN), counted by the receiver since the last one */
    uint64_t largest;      /* largest packet number acknowledged */
    uint64_t next;         /* the next packet number to be sent */
    bool limited;          /* cl_congestion_has_room, and nothing else, kept the sender from sending more */
    uint32_t port_rate;    /* at which data arrives at the receiver's port, in bytes per millisecond */
    uint32_t port_senders; /* hosts that send to that port; 0: unknown */
    struct cl_congestion_timing timing;
};

/* What arrives at an interface, for a peer's acknowledgements. */
struct cl_congestion_port {
    uint32_t rate; /* bytes per millisecond; 0: not known yet */
    uint32_t senders;
};

/* The state of a path, for statistics. */
struct cl_congestion_report {
    uint64_t window_bytes;
    uint64_t rate_bytes;                     /* per second, of the path; 0: not paced */
    uint32_t queue_us;                       /* beyond the interface */
    uint64_t capacity_bytes, carried_bytes;  /* of the interface: per second; in all */
    uint64_t delivered_bytes, arrived_bytes; /* per second, of the interface: the peaks of lately; 0: unknown */
};

void cl_congestion_nic_init(struct cl_congestion_nic *nic, uint32_t datagram_bytes);
void cl_congestion_init(struct cl_congestion *congestion, struct cl_congestion_nic *nic, uint32_t datagram_bytes);
/* It must be called before a path is initialised again: its interface forgets it. */
void cl_congestion_leave(struct cl_congestion *congestion);

/* ---- events; bytes are those of datagrams, headers included ---- */

/* A packet is about to be sent: what to remember of it. */
struct cl_congestion_packet cl_congestion_remember(const struct cl_congestion *congestion, uint8_t class,
                                                   uint64_t now_us);
/* A packet of a message was sent. first_class: the most urgent class that had data to send. */
void cl_congestion_sent(struct cl_congestion *congestion, uint8_t class, uint8_t first_class, uint32_t bytes,
                        uint64_t now_us);
/* Any other packet was sent. */
void cl_congestion_sent_control(struct cl_congestion *congestion, uint32_t bytes);
/* Packets were acknowledged, at least one. */
void cl_congestion_acknowledged(struct cl_congestion *congestion, const struct cl_congestion_ack *ack, uint64_t now_us);
void cl_congestion_lost(struct cl_congestion *congestion, uint32_t packets);
/* No acknowledgement came for a probe timeout; count: timeouts in a row. */
void cl_congestion_timeout(struct cl_congestion *congestion, uint32_t count);
/* A packet of a message came. */
void cl_congestion_received(struct cl_congestion *congestion, uint32_t bytes, uint64_t received_us);
/* Nothing more is expected from the peer. */
void cl_congestion_finished(struct cl_congestion *congestion);

/* ---- may a packet leave? ---- */

/* Whether the window has room. urgent: bytes in flight of the packet's class and of all more urgent ones; in_flight: of
 * all classes. */
bool cl_congestion_has_room(const struct cl_congestion *congestion, uint64_t urgent, uint64_t in_flight,
                            uint32_t bytes);
/* The time when the path lets a packet of this class leave: now_us or later. */
uint64_t cl_congestion_ready_us(struct cl_congestion *congestion, uint8_t class, uint64_t now_us);
/* The same of an interface. */
uint64_t cl_congestion_nic_ready_us(struct cl_congestion_nic *nic, uint8_t class, uint64_t now_us);

/* ---- questions ---- */

/* How long a packet that is sent now will stand in queues. */
uint64_t cl_congestion_delay_us(const struct cl_congestion *congestion);
/* The rate of an interface as measured so far, in bytes per second. */
uint64_t cl_congestion_nic_rate(const struct cl_congestion_nic *nic);
/* Whether several classes are in use at the interface: packets may overtake others. */
bool cl_congestion_nic_is_mixed(const struct cl_congestion_nic *nic, uint64_t now_us);
/* Whether urgent packets left through it a moment ago, beside others. */
bool cl_congestion_nic_has_urgent(const struct cl_congestion_nic *nic, uint64_t now_us);
struct cl_congestion_port cl_congestion_nic_port(struct cl_congestion_nic *nic, uint64_t now_us);
struct cl_congestion_report cl_congestion_report(const struct cl_congestion *congestion);
