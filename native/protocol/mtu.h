/*
 * MTU: the largest datagram that one path carries. A path is taken to carry full packets until it turns out to be a
 * black hole: large packets are lost, small ones that leave after them arrive, and nothing says why (no ICMP message
 * gets through). Then the limit falls to a size that practically every network carries, packets above it leave in
 * fragments (fragments.h), and padded PINGs look for the largest size that arrives (RFC 8899).
 *
 * Suspicion takes CL_MTU_ROUNDS rounds in a row, without a packet of the lost size arriving: a large packet that left
 * in this round is lost, and a smaller one that left after it has come. One round proves nothing: the path may have
 * been down for a moment. Nor do several: a full queue loses many packets, and fragments would fill it further. So
 * padded PINGs of the lost size follow, and only if CL_MTU_TRIES of them are lost, too, does the limit fall.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum {
    CL_MTU_BASE = 1200, /* bytes of a datagram (RFC 8899: BASE_PLPMTU) */
    CL_MTU_LEAST = 512,
    CL_MTU_STEP = 16,          /* the search ends at this distance */
    CL_MTU_FRAGMENTS_MAX = 60, /* most fragments of a packet; raises the least size for very large packets */
    CL_MTU_ROUNDS = 3,
    CL_MTU_TRIES = 3,             /* lost PINGs of a size in a row that show that it does not pass */
    CL_MTU_TRY_US = 50000,        /* least time between two PINGs */
    CL_MTU_POSTPONE_US = 1000000, /* while the path is dead or its port full */
    CL_MTU_AGAIN_US = 60000000,   /* time from a search to the next: the network may have been repaired */
};

struct cl_mtu {
    uint32_t full;  /* the largest datagram that this process sends to the peer */
    uint32_t least; /* smallest limit */
    uint32_t limit; /* larger datagrams leave in fragments; `full`: the path carries all */
    /* the round */
    uint64_t lost_us;    /* when the latest lost packet left; 0: none is lost */
    uint64_t came_us;    /* when the latest packet that came left */
    uint64_t round_us;   /* packets that left before do not count */
    uint32_t lost_bytes; /* the largest lost datagram of these rounds */
    uint32_t came_bytes;
    uint32_t rounds;
    uint32_t suspect; /* the lost size: PINGs are to tell whether it passes; 0: none */
    /* the search */
    bool begins;      /* the next PING has the full size */
    uint32_t beyond;  /* the smallest size known not to pass */
    uint32_t probe;   /* the size on trial; 0: none */
    uint32_t tries;   /* PINGs of this size, or of the suspect one */
    uint64_t next_us; /* when the next one is due; UINT64_MAX: none, or it waits for traffic */
};

void cl_mtu_init(struct cl_mtu *mtu, uint32_t full);

/* A packet came, or is lost. bytes: of the datagram, or of its largest fragment. */
void cl_mtu_on_came(struct cl_mtu *mtu, uint64_t sent_us, uint32_t bytes);
void cl_mtu_on_lost(struct cl_mtu *mtu, uint64_t sent_us, uint32_t bytes);
/* The caller judges after these. */
void cl_mtu_judge(struct cl_mtu *mtu, uint64_t now_us);

/* next_us has come: returns the size of the PING to be sent, 0: none. wait_us: time for its acknowledgement. */
uint32_t cl_mtu_probe(struct cl_mtu *mtu, uint64_t wait_us, uint64_t now_us);
/* The same, but no PING can be sent until next_us; UINT64_MAX: until cl_mtu_resume. */
void cl_mtu_postpone(struct cl_mtu *mtu, uint64_t next_us);
/* Traffic begins anew: so does a search that had to wait for it. */
void cl_mtu_resume(struct cl_mtu *mtu, uint64_t now_us);
