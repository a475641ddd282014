/*
 * Loss trial: decides whether losses mean that a buffer is full. Some links lose packets at any rate, one by one or in
 * bursts: up to a share nobody slows down, and a few bursts in a short time are chance. More loss has one cause or the
 * other, and a shallow buffer shows no delay. So the sender tries it out: it cuts its rate. If a buffer was full, the
 * losses stop, or nearly. If the link is lossy, they go on, and the sender undoes the cut. From then on it tolerates
 * this share of losses, as long as it lasts. A share above CL_LOSS_TRIAL_LOSS_MOST always counts as a full buffer:
 * there a cut does not tell the two apart.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Up to this share nobody slows down: of an interface, and of a path. A path has fewer packets to judge by, and a cut
 * of its window costs more. */
#define CL_LOSS_TRIAL_LOSS 0.02
#define CL_LOSS_TRIAL_LOSS_PATH 0.05
#define CL_LOSS_TRIAL_LOSS_MOST 0.35
#define CL_LOSS_TRIAL_PACKETS 64      /* enough to see the effect of the cut of a rate */
#define CL_LOSS_TRIAL_CUT 0.3         /* the share that the caller should cut */
#define CL_LOSS_TRIAL_SETTLE_US 20000 /* the least: hosts are late, too */

enum cl_loss_trial_verdict {
    CL_LOSS_TRIAL_NONE,
    CL_LOSS_TRIAL_FULL,  /* a buffer is full: send less */
    CL_LOSS_TRIAL_LOSSY, /* the link is lossy: undo the last cut */
};

struct cl_loss_trial {
    double least;         /* share of losses that is tolerated from the start */
    double bursts;        /* the least number of bursts that counts: fewer are chance */
    uint32_t enough;      /* packets to see the effect of a cut; without a trial, so many are remembered at least */
    uint32_t acked, lost; /* packets since it was last judged */
    double squares;       /* sum over the bursts of the square of their lost packets */
    bool trial;           /* they were sent after a cut */
    double before;        /* the share that was lost before the cut */
    double tolerated;     /* share of losses, where above `least` */
};

/* lost: packets that were found to be lost at the same time, a burst. */
static inline void cl_loss_trial_count(struct cl_loss_trial *trial, uint32_t acked, uint32_t lost)
{
    trial->acked += acked;
    trial->lost += lost;
    trial->squares += (double)lost * lost;
}

/* How long after a cut packets that left before it may still be found to be lost. round_trip_us: the longest. */
static inline uint64_t cl_loss_trial_settle_us(uint32_t round_trip_us)
{
    uint64_t found_us = (uint64_t)round_trip_us * 3 / 2; /* a loss is found some time after its round trip */
    return found_us > CL_LOSS_TRIAL_SETTLE_US ? found_us : CL_LOSS_TRIAL_SETTLE_US;
}

/* The caller asks once a round trip or so. queued: a known queue from elsewhere explains the losses: no trial. */
enum cl_loss_trial_verdict cl_loss_trial_judge(struct cl_loss_trial *trial, bool queued);
/* Forgets the packets counted so far: they were sent before the cut. */
void cl_loss_trial_skip(struct cl_loss_trial *trial);
