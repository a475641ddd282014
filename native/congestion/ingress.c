#include "congestion/ingress.h"

enum {
    EPOCH_US = 4000, /* longer than engines and interrupts collect packets before they hand them over */
    EPOCH_FIRST_US = 500,
    EPOCH_PACKETS = 16,
    HALF_EPOCHS = 16,
};

static void begin_epoch(struct cl_ingress *ingress, uint64_t received_us)
{
    ingress->began_us = received_us;
    ingress->bytes = 0;
    ingress->packets = 0;
}

/* The highest rate of several epochs is the port's, even if the port was idle in some of them. */
static void end_epoch(struct cl_ingress *ingress, uint64_t received_us)
{
    double rate = (double)ingress->bytes * 1e6 / (double)(received_us - ingress->began_us);
    if (++ingress->epochs % HALF_EPOCHS == 0) {
        ingress->rate_before = ingress->rate;
        ingress->rate = 0;
    }
    ingress->rate = rate > ingress->rate ? rate : ingress->rate;
    begin_epoch(ingress, received_us);
}

void cl_ingress_on_packet(struct cl_ingress *ingress, struct cl_active_set_member *sender, uint32_t bytes,
                          uint64_t received_us)
{
    if (received_us < ingress->latest_us)
        received_us = ingress->latest_us;
    ingress->latest_us = received_us;
    if (!cl_active_set_count(&ingress->senders, CL_INGRESS_IDLE_US, received_us)) {
        begin_epoch(ingress, received_us); /* nothing came for a while */
    } else {
        ingress->bytes += bytes;
        uint64_t least_us = ingress->epochs ? EPOCH_US : EPOCH_FIRST_US;
        if (++ingress->packets >= EPOCH_PACKETS && received_us - ingress->began_us >= least_us)
            end_epoch(ingress, received_us);
    }
    cl_active_set_see(&ingress->senders, sender, received_us);
}

uint32_t cl_ingress_rate(const struct cl_ingress *ingress)
{
    double rate = (ingress->rate > ingress->rate_before ? ingress->rate : ingress->rate_before) / 1000;
    return rate < UINT32_MAX ? (uint32_t)rate : UINT32_MAX;
}
