/*
 * Overflow: whether losses mean that a buffer is full. Some links lose packets whatever we do: up to CL_LOSS_TRIAL_LOSS
 * nobody slows down. More than that may be either, and buffers can be too shallow for their delay to tell. So it is
 * tried: when more is lost, the caller cuts what it sends. At a full buffer the losses are then gone, or nearly; at a
 * lossy link they stay as they were, and the caller undoes the cut. From then on as much is tolerated, as long as it
 * lasts. More than CL_LOSS_TRIAL_LOSS_MOST is never put down to the link, for there a cut does not tell one from the
 * other.
 */
#ifndef CL_CONGESTION_LOSS_TRIAL_H
#define CL_CONGESTION_LOSS_TRIAL_H

#include <stdbool.h>
#include <stdint.h>

#define CL_LOSS_TRIAL_LOSS 0.08
#define CL_LOSS_TRIAL_LOSS_MOST 0.35
#define CL_LOSS_TRIAL_CUT 0.3 /* what the caller should cut */

enum cl_loss_trial_verdict {
    CL_LOSS_TRIAL_NONE,
    CL_LOSS_TRIAL_FULL,  /* send less */
    CL_LOSS_TRIAL_LOSSY, /* the last cut did not help: undo it */
};

struct cl_loss_trial {
    uint32_t acked, lost; /* packets since it was last judged */
    bool trial;           /* these were sent after a cut */
    double before;        /* the part that was lost before it */
    double tolerated;     /* beyond CL_LOSS_TRIAL_LOSS */
};

static inline void cl_loss_trial_count(struct cl_loss_trial *trial, uint32_t acked, uint32_t lost)
{
    trial->acked += acked;
    trial->lost += lost;
}

/* At the end of a round trip or so. queued: something else shows a queue, so losses are no mystery, and nothing is
 * tried. */
enum cl_loss_trial_verdict cl_loss_trial_judge(struct cl_loss_trial *trial, bool queued);
/* Forgets what was counted: it was sent before the cut. */
void cl_loss_trial_skip(struct cl_loss_trial *trial);

#endif
