/*
 * Pace: how long the latest runs of one plan took, and from that how long the next one should wait for what stalls.
 */
#ifndef CL_PLAN_DEADLINE_H
#define CL_PLAN_DEADLINE_H

#include <stdint.h>

enum { CL_DEADLINE_RUNS = 64, CL_DEADLINE_RUNS_LEAST = 16 };

struct cl_deadline {
    uint32_t took_us[CL_DEADLINE_RUNS];
    uint32_t count; /* ever */
};

void cl_deadline_add(struct cl_deadline *deadline, uint64_t took_us);
/* 1.2 times what 95 % of those runs took; 0: too few runs to tell. A deadline made of it cannot creep downwards, as it
 * is longer than nearly all the runs it cuts short, and follows when the network gets slower. */
uint64_t cl_deadline_us(const struct cl_deadline *deadline);

#endif
