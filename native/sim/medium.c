#include "sim/medium.h"

#include <stdio.h>

const char *sim_loss_name(enum sim_loss loss)
{
    static const char *const NAMES[SIM_LOSSES] = {"noise", "queue", "checksum", "down",
                                                  "size",  "cut",   "socket",   "dead"};
    return NAMES[loss];
}

void sim_medium_lose(struct sim_medium *medium, struct sim_datagram *datagram, enum sim_loss why, const char *where)
{
    medium->counts.lost[why]++;
    sim_trace_mark(medium->trace, why);
    if (sim_trace_on(medium->trace)) {
        char text[64];
        snprintf(text, sizeof text, "lost: %s, %s", sim_loss_name(why), where);
        sim_trace_datagram(medium->trace, "lost", text, datagram->from, datagram->to, datagram->bytes,
                           datagram->length);
    }
    sim_pool_give(&medium->pool, datagram);
}
