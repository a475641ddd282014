#include "congestion/loss_trial.h"

enum {
    LOST_MIN = 4,        /* packets */
    TRIAL_PACKETS = 64,  /* that show what a cut has done */
    MEMORY_PACKETS = 256 /* of small windows: judged over several rounds */
};

static const double TRIAL_KEPT = 0.7; /* of the losses are still there: the cut has done nothing */
static const double MARGIN = 1.25;
static const double FORGET = 0.98;

static double tolerance(const struct cl_loss_trial *overflow)
{
    return overflow->tolerated > CL_LOSS_TRIAL_LOSS ? overflow->tolerated : CL_LOSS_TRIAL_LOSS;
}

/* By two standard deviations. */
static bool exceeds(const struct cl_loss_trial *overflow)
{
    double packets = (double)overflow->acked + overflow->lost, part = tolerance(overflow);
    double excess = overflow->lost - part * packets;
    return overflow->lost >= LOST_MIN && excess > 0 && excess * excess > 4 * part * packets;
}

void cl_loss_trial_skip(struct cl_loss_trial *overflow)
{
    overflow->acked = overflow->lost = 0;
}

enum cl_loss_trial_verdict cl_loss_trial_judge(struct cl_loss_trial *overflow, bool queued)
{
    uint32_t packets = overflow->acked + overflow->lost;
    double part = packets ? (double)overflow->lost / packets : 0;
    if (overflow->trial) {
        if (queued) {
            overflow->trial = false;
        } else if (packets < TRIAL_PACKETS) {
            return CL_LOSS_TRIAL_NONE;
        } else {
            overflow->trial = false;
            bool same = part > TRIAL_KEPT * overflow->before;
            double most = part > overflow->before ? part : overflow->before;
            if (same && most < CL_LOSS_TRIAL_LOSS_MOST) {
                overflow->tolerated = MARGIN * most < CL_LOSS_TRIAL_LOSS_MOST ? MARGIN * most : CL_LOSS_TRIAL_LOSS_MOST;
                cl_loss_trial_skip(overflow);
                return CL_LOSS_TRIAL_LOSSY;
            }
        }
    }
    if (exceeds(overflow)) {
        overflow->trial = part < CL_LOSS_TRIAL_LOSS_MOST && !queued;
        overflow->before = part;
        overflow->tolerated = 0;
        cl_loss_trial_skip(overflow);
        return CL_LOSS_TRIAL_FULL;
    }
    if (packets >= MEMORY_PACKETS) {
        if (part < overflow->tolerated / 2)
            overflow->tolerated *= FORGET;
        overflow->acked /= 2;
        overflow->lost /= 2;
    }
    return CL_LOSS_TRIAL_NONE;
}
