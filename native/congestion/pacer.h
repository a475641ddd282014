/*
 * Pacer: a token bucket. In any interval of d seconds in which rate and burst do not change,
 *
 *     bytes sent <= rate * d + burst + one packet        (2 * burst with urgent ones)
 *
 * The burst is generous on purpose (milliseconds of rate): an engine thread that shares its core wakes up late and must
 * be able to catch up; and fewer timers mean larger batches for the kernel.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { CL_PACER_BURST_PACKETS = 10 /* the least burst that is in use */ };

struct cl_pacer {
    uint64_t rate;  /* bytes per second; 0: no limit */
    uint64_t burst; /* bytes */
    int64_t tokens; /* millionths of a byte; negative: in debt */
    bool batches;   /* after the bucket was empty, no packet leaves before a batch has gathered; the caller sets it */
    bool gathers;   /* the bucket was empty, and no batch has gathered since */
    uint64_t last_us;
};

/* Starts with a full bucket. */
void cl_pacer_init(struct cl_pacer *pacer, uint64_t rate, uint64_t burst, uint64_t now_us);
void cl_pacer_set(struct cl_pacer *pacer, uint64_t rate, uint64_t burst, uint64_t now_us);
/* now_us, if a packet may leave; else the time when a batch will have gathered. Without `batches` a packet may leave
 * earlier, but to ask then costs more timers. An urgent packet may leave on debt, of a burst at most, which later
 * packets pay. */
uint64_t cl_pacer_ready_us(struct cl_pacer *pacer, bool urgent, uint64_t now_us);
/* The bytes of a batch. */
uint64_t cl_pacer_batch(const struct cl_pacer *pacer);
/* Whether the bucket was full at the last cl_pacer_ready_us: the pacer had held nothing back for the time of a burst.
 */
bool cl_pacer_is_full(const struct cl_pacer *pacer);
void cl_pacer_sent(struct cl_pacer *pacer, uint32_t bytes);
