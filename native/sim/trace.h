/*
 * Trace: the events of a run in words, with the virtual time in front, and their fingerprint, which costs little and
 * tells two runs apart. Without a file nothing is written.
 */
#ifndef CL_SIM_TRACE_H
#define CL_SIM_TRACE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "sim/clock.h"

struct sim_trace {
    FILE *file;
    const struct sim_clock *clock;
    uint64_t origin_ns; /* printed as 0 */
    uint64_t fingerprint;
};

static inline bool sim_trace_on(const struct sim_trace *trace)
{
    return trace->file != NULL;
}

/* One line. */
__attribute__((format(printf, 2, 3))) void sim_trace_say(struct sim_trace *trace, const char *format, ...);
/* One line about a datagram; `what`: its fate. */
void sim_trace_datagram(struct sim_trace *trace, const char *what, const char *where, uint32_t from, uint32_t to,
                        const uint8_t *bytes, uint32_t length);
/* Adds to the fingerprint. */
static inline void sim_trace_mark(struct sim_trace *trace, uint64_t value)
{
    trace->fingerprint = (trace->fingerprint ^ value ^ trace->clock->now_ns) * 0x9E3779B97F4A7C15u;
    trace->fingerprint ^= trace->fingerprint >> 29;
}

#endif
