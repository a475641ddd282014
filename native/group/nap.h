/*
 * Nap: how long the engine's thread sleeps without looking at its sockets.
 *
 * In a bulk transfer every packet would wake the thread. So while packets come steadily, it sleeps until a batch of
 * them is there, or nearly the rest of what a peer is expected to send: somebody waits for its end. On fast networks
 * that is no time at all. With few packets the thread does not nap, nor where it expects none: the next one may be an
 * answer. Acknowledgements and pacing are made for batches of this size.
 *
 * The spacing of packets is that of the last batch, by their times of arrival. The end of what is expected ends a
 * batch: where messages and answers alternate, the mean rate over both directions would be too low, and a nap would
 * last past the end of a message. A pause ends a batch, too: naps that count the pauses of a sender which waits for
 * acknowledgements would make these pauses longer. But where ranks share an interface, a pause of one of them is the
 * turn of another.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum {
    CL_NAP_BATCH = 16,       /* packets that a nap waits for */
    CL_NAP_SPARE = 2,        /* packets before the end of a message that wake the thread one by one */
    CL_NAP_SPACING_US = 125, /* packets further apart than this are no bulk transfer */
    CL_NAP_PAUSE_US = 500,   /* a pause between two packets is longer than this */
    /* the same where ranks of a host share an interface: they send in turns, and hosts are mostly alike */
    CL_NAP_SPACING_SHARED_US = 250,
    CL_NAP_PAUSE_SHARED_US = 2000,
    CL_NAP_STEADY_US = 4000, /* how long the spacing of a batch holds */
    CL_NAP_LEAST_US = 60,    /* a shorter nap is not worth a system call */
    CL_NAP_MOST_US = 1000,
    CL_NAP_MOST_URGENT_US = 200, /* while urgent packets are sent or expected */
};

struct cl_nap {
    bool shared;                /* another rank of this host sends now */
    bool begun;                 /* the running batch has a first packet, from which its time counts */
    uint64_t start_us, last_us; /* when the running batch began; arrival of the latest packet */
    uint32_t packets;           /* packets of the running batch */
    uint64_t batched_us;        /* when the last batch ended; 0: there was none, or it was no bulk transfer */
    double spacing_us;          /* the mean spacing in that batch */
};

/* Notes a packet that arrived at this time. */
void cl_nap_arrived(struct cl_nap *nap, uint64_t at_us);
/* The time to nap from now on, asked after each turn; 0: none. `lacking`: packets that a peer has still to send;
 * UINT64_MAX: none came that was expected. */
uint64_t cl_nap_us(struct cl_nap *nap, uint64_t lacking, bool urgent, uint64_t now_us);
