/*
 * Ingress: the rate at which data comes in at one interface of this host, and the number of peers that send it.
 *
 * Several senders to one port meet in the queue in front of it, and only their receiver sees all of them. The receiver
 * tells each of them both numbers in its acknowledgements. A sender that finds a queue, or losses, sends at its share
 * of that rate at once, where it would else find the rate by trial (cc.c). So the bytes in flight of all senders
 * together are limited as soon as delay or loss shows that they are too many. This is the dynamic incast of OptiReduce
 * (Warraich et al., NSDI 2025); where OptiReduce gives turns, each sender here has its share of every moment.
 *
 * A sender counts until this host expects nothing more from it, or nothing has come for CL_INGRESS_IDLE_US.
 */
#pragma once

#include "congestion/active_set.h"

enum { CL_INGRESS_IDLE_US = 50000 };

struct cl_ingress {
    struct cl_active_set senders;
    /* the current epoch, which began with an arrival */
    uint64_t began_us, latest_us, bytes;
    uint32_t packets, epochs;
    double rate, rate_before; /* bytes per second: the highest of the last HALF_EPOCHS epochs, and of those before */
};

/* A data packet came. */
void cl_ingress_on_packet(struct cl_ingress *ingress, struct cl_active_set_member *sender, uint32_t bytes,
                          uint64_t received_us);

/* The rate at which data comes in when the port is busy, in bytes per millisecond; 0: not known yet. */
uint32_t cl_ingress_rate(const struct cl_ingress *ingress);
