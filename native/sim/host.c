#include "sim/host.h"

#include <string.h>

#include "sim/memory.h"

void sim_host_init(struct sim_host *host, uint32_t local_count, uint64_t staging_bytes)
{
    *host = (struct sim_host){.local_count = local_count, .staging_bytes = staging_bytes};
    host->local = sim_new(local_count, sizeof *host->local);
    host->counters = sim_new(local_count, sizeof *host->counters);
    host->calls = sim_new(2 * (size_t)local_count, sizeof *host->calls);
    host->staging = sim_new(2 * (size_t)local_count, staging_bytes);
    memset(host->staging, 0xA5, 2 * (size_t)local_count * staging_bytes); /* what nobody wrote must not look right */
}

void sim_host_free(struct sim_host *host)
{
    free(host->local);
    free(host->counters);
    free(host->calls);
    free(host->staging);
}
