#include "congestion/loss_trial.h"

enum {
    LOST_MIN = 4,        /* packets */
    MEMORY_PACKETS = 256 /* small windows are judged over several rounds: so many packets by the length of the bursts */
};

static const double TRIAL_KEPT = 0.5; /* if more than this share of the losses is still there, the cut had no effect */
static const double MARGIN = 1.25;
static const double FORGET = 0.98;
static const double SURE = 5; /* the square of the standard deviations that tell too many losses from chance */

static double tolerance(const struct cl_loss_trial *trial)
{
    return trial->tolerated > trial->least ? trial->tolerated : trial->least;
}

/* The mean length of the bursts of a lost packet: 1 if none was lost together with another. The variance of the number
 * of lost packets is as many times that of packets lost one by one. */
static double burst_packets(const struct cl_loss_trial *trial)
{
    return trial->lost ? trial->squares / trial->lost : 1;
}

/* Whether the losses exceed the tolerated share by more than chance does. */
static bool exceeds(const struct cl_loss_trial *trial)
{
    double packets = (double)trial->acked + trial->lost, part = tolerance(trial);
    double excess = trial->lost - part * packets;
    return trial->lost >= LOST_MIN && trial->lost >= trial->bursts * burst_packets(trial) && excess > 0 &&
           excess * excess > SURE * part * packets * burst_packets(trial);
}

void cl_loss_trial_skip(struct cl_loss_trial *trial)
{
    trial->acked = trial->lost = 0;
    trial->squares = 0;
}

enum cl_loss_trial_verdict cl_loss_trial_judge(struct cl_loss_trial *trial, bool queued)
{
    uint32_t packets = trial->acked + trial->lost;
    double part = packets ? (double)trial->lost / packets : 0;
    if (trial->trial) {
        if (queued) {
            trial->trial = false;
        } else if (packets < trial->enough) {
            return CL_LOSS_TRIAL_NONE;
        } else {
            trial->trial = false;
            bool same = part > TRIAL_KEPT * trial->before;
            double most = part > trial->before ? part : trial->before;
            if (same && most < CL_LOSS_TRIAL_LOSS_MOST) {
                double share = MARGIN * most > most + CL_LOSS_TRIAL_LOSS ? MARGIN * most : most + CL_LOSS_TRIAL_LOSS;
                trial->tolerated = share < CL_LOSS_TRIAL_LOSS_MOST ? share : CL_LOSS_TRIAL_LOSS_MOST;
                cl_loss_trial_skip(trial);
                return CL_LOSS_TRIAL_LOSSY;
            }
        }
    }
    if (exceeds(trial)) {
        trial->trial = part < CL_LOSS_TRIAL_LOSS_MOST && !queued;
        trial->before = part;
        trial->tolerated = 0;
        cl_loss_trial_skip(trial);
        return CL_LOSS_TRIAL_FULL;
    }
    if (packets >= trial->enough && packets >= MEMORY_PACKETS * burst_packets(trial)) {
        if (part < trial->tolerated / 2)
            trial->tolerated *= FORGET;
        trial->acked /= 2;
        trial->lost /= 2;
        trial->squares /= 2;
    }
    return CL_LOSS_TRIAL_NONE;
}
