/*
 * Rate control: decides how fast packets leave. This is the form that each rate control has: a table of functions, one
 * for each event and each question, and the facts that they are given. The rest of the engine calls them through
 * congestion.h, which has the list of controls.
 *
 * A control keeps a struct for each network interface and one for each path. They begin with a cl_rate_control_nic and
 * a cl_rate_control, to which the functions get pointers.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "congestion/class.h"
#include "congestion/egress.h"
#include "congestion/peak.h"

struct cl_rate_control_type;

struct cl_rate_control_nic {
    const struct cl_rate_control_type *type;
    struct cl_peak delivered, arrived; /* what peers received from this interface; what came in through it */
};

struct cl_rate_control {
    const struct cl_rate_control_type *type; /* that of the interface */
    struct cl_rate_control_nic *nic;
};

/* Bytes in flight on a path. */
struct cl_congestion_flight {
    uint64_t own;    /* of a class */
    uint64_t urgent; /* of that class and of all more urgent ones */
    uint64_t all;
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
    uint64_t yielding;     /* of these bytes, those of CL_CLASS_YIELDS */
    uint32_t marked;       /* packets marked by switches (ECN), counted by the receiver since the last one */
    uint64_t largest;      /* largest packet number acknowledged */
    uint64_t next;         /* the next packet number to be sent */
    bool limited;          /* cl_congestion_has_room, and nothing else, kept the sender from sending more */
    bool yields_limited;   /* the same of CL_CLASS_YIELDS; `limited` is of the others */
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
    uint64_t capacity_bytes, carried_bytes;  /* of the interface: per second, 0: unknown; in all */
    uint64_t delivered_bytes, arrived_bytes; /* per second, of the interface: the peaks of lately; 0: unknown */
};

/* congestion.h tells what each function is for: `lost` is called by cl_congestion_lost, and so on. */
struct cl_rate_control_type {
    const char *name;
    /* the fields of the struct are set */
    void (*nic_init)(struct cl_rate_control_nic *nic, uint32_t datagram_bytes);
    /* type and nic are set */
    void (*init)(struct cl_rate_control *control, uint32_t datagram_bytes);
    void (*leave)(struct cl_rate_control *control);

    struct cl_congestion_packet (*remember)(const struct cl_rate_control *control, uint8_t class, uint64_t now_us);
    void (*sent)(struct cl_rate_control *control, uint8_t class, uint8_t first_class, uint32_t bytes, uint64_t now_us);
    void (*sent_control)(struct cl_rate_control *control, uint32_t bytes);
    struct cl_told (*nic_tell)(const struct cl_rate_control_nic *nic);
    void (*nic_hear)(struct cl_rate_control_nic *nic, uint32_t neighbour, const struct cl_told *told, uint64_t now_us);
    bool (*nic_heard)(struct cl_rate_control_nic *nic, uint64_t now_us);
    void (*acknowledged)(struct cl_rate_control *control, const struct cl_congestion_ack *ack, uint64_t now_us);
    void (*lost)(struct cl_rate_control *control, uint32_t packets);
    void (*timeout)(struct cl_rate_control *control, uint32_t count);
    void (*received)(struct cl_rate_control *control, uint32_t bytes, uint64_t received_us);
    void (*finished)(struct cl_rate_control *control);

    bool (*has_room)(const struct cl_rate_control *control, uint8_t class, const struct cl_congestion_flight *flight,
                     uint32_t bytes);
    uint64_t (*ready_us)(struct cl_rate_control *control, uint8_t class, uint64_t now_us);
    uint64_t (*nic_ready_us)(struct cl_rate_control_nic *nic, uint8_t class, uint64_t now_us);

    bool (*is_contested)(const struct cl_rate_control *control);
    uint64_t (*delay_us)(const struct cl_rate_control *control);
    uint64_t (*nic_rate)(const struct cl_rate_control_nic *nic);
    uint64_t (*nic_batch)(const struct cl_rate_control_nic *nic, uint64_t now_us);
    bool (*nic_is_mixed)(const struct cl_rate_control_nic *nic, uint64_t now_us);
    bool (*nic_has_urgent)(const struct cl_rate_control_nic *nic, uint64_t now_us);
    struct cl_congestion_port (*nic_port)(struct cl_rate_control_nic *nic, uint64_t now_us);
    /* All but the peaks. */
    void (*report)(const struct cl_rate_control *control, struct cl_congestion_report *report);
};
