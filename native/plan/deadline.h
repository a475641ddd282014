/*
 * Deadline: how long an operation waits for stalled packets of partial messages, from the time that the latest runs of
 * its plan took.
 */
#pragma once

#include <stdint.h>

enum { CL_DEADLINE_RUNS = 64, CL_DEADLINE_RUNS_LEAST = 16 };

struct cl_deadline {
    uint32_t took_us[CL_DEADLINE_RUNS];
    uint32_t count; /* runs since the start */
};

void cl_deadline_add(struct cl_deadline *deadline, uint64_t took_us);
/* 1.2 times the 95th percentile of those runs; 0: too few runs to tell. The deadline cannot creep downwards, as it is
 * longer than nearly all the runs that it cuts short, and it follows when the network gets slower. */
uint64_t cl_deadline_us(const struct cl_deadline *deadline);
