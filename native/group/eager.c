#include "group/eager.h"

bool cl_eager_reserve(struct cl_eager *eager, uint64_t length)
{
    uint64_t cost = length + CL_EAGER_COST_BYTES;
    if (atomic_fetch_add(&eager->bytes, cost) + cost <= CL_EAGER_LIMIT_BYTES)
        return true;
    atomic_fetch_sub(&eager->bytes, cost);
    return false;
}

bool cl_eager_reserve_message(struct cl_eager *eager, uint64_t length)
{
    return length <= CL_EAGER_MESSAGE_BYTES && cl_eager_reserve(eager, length);
}

void cl_eager_release(struct cl_eager *eager, uint64_t length)
{
    atomic_fetch_sub(&eager->bytes, length + CL_EAGER_COST_BYTES);
}
