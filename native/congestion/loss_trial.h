/*
 * Loss trial: decides whether losses mean that a buffer is full. Some links lose packets at any rate: up to the share
 * CL_LOSS_TRIAL_LOSS nobody slows down. More loss has one cause or the other, and a shallow buffer shows no delay. So
 * the sender tries it out: it cuts its rate. If a buffer was full, the losses stop, or nearly. If the link is lossy,
 * they go on, and the sender undoes the cut. From then on it tolerates this share of losses, as long as it lasts. A
 * share above CL_LOSS_TRIAL_LOSS_MOST always counts as a full buffer: there a cut does not tell the two apart.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define CL_LOSS_TRIAL_LOSS 0.02
#define CL_LOSS_TRIAL_LOSS_MOST 0.35
#define CL_LOSS_TRIAL_CUT 0.3 /* the share that the caller should cut */

enum cl_loss_trial_verdict {
    CL_LOSS_TRIAL_NONE,
    CL_LOSS_TRIAL_FULL,  /* a buffer is full: send less */
    CL_LOSS_TRIAL_LOSSY, /* the link is lossy: undo the last cut */
};

struct cl_loss_trial {
    uint32_t acked, lost; /* packets since it was last judged */
    bool trial;           /* they were sent after a cut */
    double before;        /* the share that was lost before the cut */
    double tolerated;     /* share of losses, where above CL_LOSS_TRIAL_LOSS */
};

static inline void cl_loss_trial_count(struct cl_loss_trial *trial, uint32_t acked, uint32_t lost)
{
    trial->acked += acked;
    trial->lost += lost;
}

/* The caller asks once a round trip or so. queued: a known queue from elsewhere explains the losses: no trial. */
enum cl_loss_trial_verdict cl_loss_trial_judge(struct cl_loss_trial *trial, bool queued);
/* Forgets the packets counted so far: they were sent before the cut. */
void cl_loss_trial_skip(struct cl_loss_trial *trial);
