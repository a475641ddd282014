#include "protocol/nics.h"

uint64_t cl_nics_ready_us(struct cl_nics *nics, uint8_t class, uint64_t now_us)
{
    uint64_t first_us = UINT64_MAX;
    for (uint16_t i = 0; i < nics->count; i++) {
        uint64_t ready_us = cl_congestion_nic_ready_us(&nics->list[i].congestion, class, now_us);
        if (ready_us <= now_us)
            return now_us;
        if (ready_us < first_us)
            first_us = ready_us;
    }
    return first_us;
}

bool cl_nics_have_urgent(const struct cl_nics *nics, uint64_t now_us)
{
    for (uint16_t i = 0; i < nics->count; i++)
        if (cl_congestion_nic_has_urgent(&nics->list[i].congestion, now_us))
            return true;
    return false;
}
