/*
 * Transport: an interface that carries messages from host to host over a fabric, so that different protocols can do the
 * same work. Implementations have it as their first member.
 */
#pragma once

#include <stdint.h>

struct sim_datagram;

/* Names a message, the same at both ends. */
struct sim_message {
    uint16_t from, to;
    uint8_t priority;
    uint32_t job, index; /* index: the n-th from this sender to this receiver in this job */
    uint32_t length;
    double loss_bound; /* share of its packets that may be missing */
};

struct sim_transport {
    void (*send)(struct sim_transport *transport, const struct sim_message *message, void *context);
    void (*receive)(struct sim_transport *transport, const struct sim_message *message, void *context);
    /* A datagram of this transport has reached its host; the transport gives it back to the pool. */
    void (*deliver)(struct sim_transport *transport, struct sim_datagram *datagram);
    /* The user sets this: a send has been acknowledged, or a receive has completed, without `missing` of its bytes. */
    void (*done)(void *context, uint64_t missing);
};
