/*
 * Host: what the ranks of one host share in one group: their counters and two halves of staging each (wire/host.h).
 */
#ifndef CL_SIM_HOST_H
#define CL_SIM_HOST_H

#include <stdatomic.h>
#include <stdint.h>

struct sim_host {
    uint32_t local_count;
    uint32_t *local; /* group ranks, ascending */
    _Atomic uint32_t *counters;
    _Atomic uint64_t *calls; /* of each rank, two: which operation runs, by parity */
    uint64_t staging_bytes;
    uint8_t *staging; /* of each rank, two halves */
    int aborted;      /* the first reason stays */
};

void sim_host_init(struct sim_host *host, uint32_t local_count, uint64_t staging_bytes);
void sim_host_free(struct sim_host *host);

static inline uint8_t *sim_host_staging(struct sim_host *host, uint32_t index, uint32_t parity)
{
    return host->staging + (2 * (uint64_t)index + parity) * host->staging_bytes;
}

static inline void sim_host_abort(struct sim_host *host, int reason)
{
    if (host->aborted == 0)
        host->aborted = reason;
}

#endif
