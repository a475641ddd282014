/*
 * Delay: the rate control of the product. Queueing delay first, losses and marks second, decide how fast packets leave:
 * the pacer of an interface (egress.h), the window of a path (cc.h) and the report of a receiver's port (ingress.h).
 * docs/congestion.md tells which signal has which effect.
 */
#pragma once

#include "congestion/cc.h"
#include "congestion/contest.h"
#include "congestion/egress.h"
#include "congestion/ingress.h"
#include "congestion/pacer.h"
#include "congestion/rate_control.h"
#include "congestion/scavenger.h"

enum {
    CL_DELAY_URGENT_PACKETS = 16, /* urgent packets that may leave beside less urgent ones, whatever the window */
};

struct cl_delay_nic {
    struct cl_rate_control_nic nic; /* the first member */
    struct cl_egress egress;
    struct cl_ingress ingress;
};

struct cl_delay {
    struct cl_rate_control control; /* the first member */
    struct cl_cc cc;
    struct cl_contest contest;
    uint64_t crowd_us;             /* when the peer last had several senders */
    struct cl_scavenger scavenger; /* of CL_CLASS_YIELDS, beside the others */
    struct cl_pacer pacer;
    struct cl_egress_view view;
    struct cl_active_set_member sender;   /* the peer's place among the senders to this interface */
    struct cl_active_set_member receiver; /* its place among the receivers from this interface */
};

extern const struct cl_rate_control_type cl_rate_control_delay;
