/*
 * Congestion: how fast packets leave. This header is all that the rest of the engine knows of it (tests/unit/
 * test_imports.py enforces that): a function for each event, and questions. Which rate control answers is chosen by its
 * name when an endpoint is opened. To add one: write its functions (rate_control.h) in a file of its own, and name it
 * in the two unions here and in the list of congestion.c.
 *
 * A cl_congestion_nic is one network interface of this host, a cl_congestion one path through it to one peer, both in
 * both directions. Their fields are private.
 */
#pragma once

#include "congestion/delay.h"
#include "congestion/fixed.h"
#include "congestion/rate_control.h"

enum { CL_CONGESTION_OVERHEAD_BYTES = CL_EGRESS_OVERHEAD_BYTES /* of a datagram, on the wire */ };

struct cl_congestion_nic {
    union {
        struct cl_rate_control_nic control; /* the first member of each */
        struct cl_delay_nic delay;
        struct cl_fixed_nic fixed;
    };
};

struct cl_congestion {
    union {
        struct cl_rate_control control; /* the first member of each */
        struct cl_delay delay;
        struct cl_fixed fixed;
    };
};

/* The rate control of that name, or NULL; name NULL: the product's, `delay`. */
const struct cl_rate_control_type *cl_congestion_find(const char *name);

void cl_congestion_nic_init(struct cl_congestion_nic *nic, const struct cl_rate_control_type *type,
                            uint32_t datagram_bytes);
void cl_congestion_init(struct cl_congestion *congestion, struct cl_congestion_nic *nic, uint32_t datagram_bytes);

/* It must be called before a path is initialised again: its interface forgets it. */
static inline void cl_congestion_leave(struct cl_congestion *congestion)
{
    congestion->control.type->leave(&congestion->control);
}

/* ---- events; bytes are those of datagrams, headers included ---- */

/* A packet is about to be sent: what to remember of it. */
static inline struct cl_congestion_packet cl_congestion_remember(const struct cl_congestion *congestion, uint8_t class,
                                                                 uint64_t now_us)
{
    return congestion->control.type->remember(&congestion->control, class, now_us);
}

/* A packet of a message was sent. first_class: the most urgent class that had data to send. */
static inline void cl_congestion_sent(struct cl_congestion *congestion, uint8_t class, uint8_t first_class,
                                      uint32_t bytes, uint64_t now_us)
{
    congestion->control.type->sent(&congestion->control, class, first_class, bytes, now_us);
}

/* Any other packet was sent. */
static inline void cl_congestion_sent_control(struct cl_congestion *congestion, uint32_t bytes)
{
    congestion->control.type->sent_control(&congestion->control, bytes);
}

/* What this process knows of the interface, for the others of this host. */
static inline struct cl_told cl_congestion_nic_tell(const struct cl_congestion_nic *nic)
{
    return nic->control.type->nic_tell(&nic->control);
}

/* What another process of this host, a number from 0 to CL_NEIGHBOURS_MAX - 1, knows of it. */
static inline void cl_congestion_nic_hear(struct cl_congestion_nic *nic, uint32_t neighbour, const struct cl_told *told,
                                          uint64_t now_us)
{
    nic->control.type->nic_hear(&nic->control, neighbour, told, now_us);
}

/* All of them have been heard. Returns whether one of them sends now. */
static inline bool cl_congestion_nic_heard(struct cl_congestion_nic *nic, uint64_t now_us)
{
    return nic->control.type->nic_heard(&nic->control, now_us);
}

/* Packets were acknowledged, at least one. */
static inline void cl_congestion_acknowledged(struct cl_congestion *congestion, const struct cl_congestion_ack *ack,
                                              uint64_t now_us)
{
    cl_peak_see(&congestion->control.nic->delivered, ack->bytes, now_us);
    congestion->control.type->acknowledged(&congestion->control, ack, now_us);
}

static inline void cl_congestion_lost(struct cl_congestion *congestion, uint32_t packets)
{
    congestion->control.type->lost(&congestion->control, packets);
}

/* No acknowledgement came for a probe timeout; count: timeouts in a row. */
static inline void cl_congestion_timeout(struct cl_congestion *congestion, uint32_t count)
{
    congestion->control.type->timeout(&congestion->control, count);
}

/* A packet of a message came. */
static inline void cl_congestion_received(struct cl_congestion *congestion, uint32_t bytes, uint64_t received_us)
{
    congestion->control.type->received(&congestion->control, bytes, received_us);
    cl_peak_see(&congestion->control.nic->arrived, bytes, received_us);
}

/* Nothing more is expected from the peer. */
static inline void cl_congestion_finished(struct cl_congestion *congestion)
{
    congestion->control.type->finished(&congestion->control);
}

/* ---- may a packet leave? ---- */

/* Whether the window has room for a packet of this class. */
static inline bool cl_congestion_has_room(const struct cl_congestion *congestion, uint8_t class,
                                          const struct cl_congestion_flight *flight, uint32_t bytes)
{
    return congestion->control.type->has_room(&congestion->control, class, flight, bytes);
}

/* The time when the path lets a packet of this class leave: now_us or later. */
static inline uint64_t cl_congestion_ready_us(struct cl_congestion *congestion, uint8_t class, uint64_t now_us)
{
    return congestion->control.type->ready_us(&congestion->control, class, now_us);
}

/* The same of an interface. */
static inline uint64_t cl_congestion_nic_ready_us(struct cl_congestion_nic *nic, uint8_t class, uint64_t now_us)
{
    return nic->control.type->nic_ready_us(&nic->control, class, now_us);
}

/* ---- questions ---- */

/* Whether others fill the buffers on the way: bursts would overflow them. */
static inline bool cl_congestion_is_contested(const struct cl_congestion *congestion)
{
    return congestion->control.type->is_contested(&congestion->control);
}

/* How long a packet that is sent now will stand in queues. */
static inline uint64_t cl_congestion_delay_us(const struct cl_congestion *congestion)
{
    return congestion->control.type->delay_us(&congestion->control);
}

/* The rate of an interface as measured so far, in bytes per second; 0: unknown. */
static inline uint64_t cl_congestion_nic_rate(const struct cl_congestion_nic *nic)
{
    return nic->control.type->nic_rate(&nic->control);
}

/* The bytes of a batch that may go to one peer; 0: packets do not leave in batches. */
static inline uint64_t cl_congestion_nic_batch(const struct cl_congestion_nic *nic, uint64_t now_us)
{
    return nic->control.type->nic_batch(&nic->control, now_us);
}

/* Whether several classes are in use at the interface: packets may overtake others. */
static inline bool cl_congestion_nic_is_mixed(const struct cl_congestion_nic *nic, uint64_t now_us)
{
    return nic->control.type->nic_is_mixed(&nic->control, now_us);
}

/* Whether urgent packets left through it a moment ago, beside others. */
static inline bool cl_congestion_nic_has_urgent(const struct cl_congestion_nic *nic, uint64_t now_us)
{
    return nic->control.type->nic_has_urgent(&nic->control, now_us);
}

static inline struct cl_congestion_port cl_congestion_nic_port(struct cl_congestion_nic *nic, uint64_t now_us)
{
    return nic->control.type->nic_port(&nic->control, now_us);
}

struct cl_congestion_report cl_congestion_report(const struct cl_congestion *congestion);
