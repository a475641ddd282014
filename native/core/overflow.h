/*
 * Overflow: whether losses mean that a buffer is full. Some links lose packets whatever we do: up to CL_OVERFLOW_LOSS
 * nobody slows down. More than that may be either, and buffers can be too shallow for their delay to tell. So it is
 * tried: when more is lost, the caller cuts what it sends. At a full buffer the losses are then gone, or nearly; at a
 * lossy link they stay as they were, and the caller undoes the cut. From then on as much is tolerated, as long as it
 * lasts. More than CL_OVERFLOW_LOSS_MOST is never put down to the link, for there a cut does not tell one from the
 * other.
 */
#ifndef CL_CORE_OVERFLOW_H
#define CL_CORE_OVERFLOW_H

#include <stdbool.h>
#include <stdint.h>

#define CL_OVERFLOW_LOSS 0.08
#define CL_OVERFLOW_LOSS_MOST 0.35
#define CL_OVERFLOW_CUT 0.3 /* what the caller should cut */

enum cl_overflow_verdict {
    CL_OVERFLOW_NONE,
    CL_OVERFLOW_FULL,  /* send less */
    CL_OVERFLOW_LOSSY, /* the last cut did not help: undo it */
};

struct cl_overflow {
    uint32_t acked, lost; /* packets since it was last judged */
    bool trial;           /* these were sent after a cut */
    double before;        /* the part that was lost before it */
    double tolerated;     /* beyond CL_OVERFLOW_LOSS */
};

static inline void cl_overflow_count(struct cl_overflow *overflow, uint32_t acked, uint32_t lost)
{
    overflow->acked += acked;
    overflow->lost += lost;
}

/* At the end of a round trip or so. queued: something else shows a queue, so losses are no mystery, and nothing is
 * tried. */
enum cl_overflow_verdict cl_overflow_judge(struct cl_overflow *overflow, bool queued);
/* Forgets what was counted: it was sent before the cut. */
void cl_overflow_skip(struct cl_overflow *overflow);

#endif
