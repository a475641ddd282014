#include "engine/eager.h"

#include <unistd.h>

#include "commlayer.h"
#include "engine/clock.h"

enum { FLUSH_STEP_US = 200 };

bool cl_eager_reserve(struct cl_eager *eager, uint64_t length)
{
    if (length > CL_EAGER_MESSAGE_BYTES)
        return false;
    uint64_t cost = length + CL_EAGER_COST_BYTES;
    if (atomic_fetch_add(&eager->bytes, cost) + cost <= CL_EAGER_LIMIT_BYTES)
        return true;
    atomic_fetch_sub(&eager->bytes, cost);
    return false;
}

void cl_eager_release(struct cl_eager *eager, uint64_t length)
{
    atomic_fetch_sub(&eager->bytes, length + CL_EAGER_COST_BYTES);
}

void cl_eager_flush(const struct cl_eager *eager, const _Atomic int32_t *status)
{
    uint64_t end_us = cl_now_us() + CL_EAGER_FLUSH_MAX_US;
    while (atomic_load(&eager->bytes) > 0 && atomic_load(status) == CL_OK && cl_now_us() < end_us)
        usleep(FLUSH_STEP_US);
}
