/*
 * Fixed: a rate control that controls nothing, for tests and comparisons: CL_FIXED_WINDOW_PACKETS of a path may be in
 * flight, and they leave at once, whatever happens to them. It shows what the other control gains and costs.
 */
#pragma once

#include "congestion/rate_control.h"

enum { CL_FIXED_WINDOW_PACKETS = 32 };

struct cl_fixed_nic {
    struct cl_rate_control_nic nic; /* the first member */
    uint64_t carried_bytes;
};

struct cl_fixed {
    struct cl_rate_control control; /* the first member */
    uint64_t window_bytes;
};

extern const struct cl_rate_control_type cl_rate_control_fixed;
