/*
 * Pace: how long the latest runs of one plan took, and from that how long the next one should wait for what stalls.
 */
#ifndef CL_CORE_PACE_H
#define CL_CORE_PACE_H

#include <stdint.h>

enum { CL_PACE_RUNS = 64, CL_PACE_RUNS_LEAST = 16 };

struct cl_pace {
    uint32_t took_us[CL_PACE_RUNS];
    uint32_t count; /* ever */
};

void cl_pace_add(struct cl_pace *pace, uint64_t took_us);
/* 1.2 times what 95 % of those runs took; 0: too few runs to tell. A deadline made of it cannot creep downwards, as it
 * is longer than nearly all the runs it cuts short, and follows when the network gets slower. */
uint64_t cl_pace_deadline_us(const struct cl_pace *pace);

#endif
