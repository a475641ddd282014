/* NICs: the network interfaces of this process, in both directions, with the timer of their pacers. */
#pragma once

#include <stdbool.h>

#include "congestion/congestion.h"
#include "protocol/timers.h"

enum { CL_NICS_MAX = 8 };

struct cl_nic {
    struct cl_congestion_nic congestion;
    uint64_t turn;           /* smallest `turns` of a peer that waits for it: see peer.h */
    uint64_t repeats_end_us; /* when the repeated packets will have left: see repeat.h */
};

struct cl_nics {
    struct cl_nic list[CL_NICS_MAX];
    uint16_t count;        /* interfaces through which paths leave */
    struct cl_timer timer; /* when the first pacer lets packets go again */
};

/* The time when the first interface may take a packet of this class. */
uint64_t cl_nics_ready_us(struct cl_nics *nics, uint8_t class, uint64_t now_us);
/* Whether urgent packets left through an interface a moment ago. */
bool cl_nics_have_urgent(const struct cl_nics *nics, uint64_t now_us);
