/*
 * Keeps the queues on the way short, after Swift (Kumar et al., SIGCOMM 2020): additive increase while packets spend
 * less than a target time in them, multiplicative decrease in proportion to the excess at most once per round trip,
 * slow start by doubling until a queue appears.
 *
 * Differences from Swift:
 *  - The target is milliseconds, not tens of microseconds. Engine threads share their cores with training and sleep for
 *    milliseconds, so packets come in bursts, and a queue of that length is normal.
 *  - Loss alone does not slow the sender down: the link may be lossy. Only when the loss trial (loss_trial.h) finds a
 *    full buffer, which is then shallower than the target, do both the window and the target shrink.
 *  - Where several hosts send to one, the receiver tells them their share (ingress.h). A sender that has to slow down
 *    goes to its share at once; a sender that finds no queue also grows to it at once.
 */
#include "congestion/cc.h"
#include "congestion/pacer.h"

enum {
    WINDOW_PACKETS_START = 32,
    WINDOW_PACKETS_MIN = 2,
    WINDOW_PACKETS_MAX = 1 << 16,
    WINDOW_PACKETS_SILENT = 8, /* smallest window towards a peer that does not answer */
    TARGET_US = 4000,
    TARGET_PACKETS = 14, /* least target: more than the 13 packets that egress.c keeps at the sender on slow links */
    TARGET_MIN_US = 500,
    SILENT_PTOS = 3,
    SHARE_CALM_ROUNDS = 16,
    PACED_US = 4000,    /* a path is paced if its round trip is longer than this and ... */
    PACED_PACKETS = 64, /* ... than this many packets take: slow links always show some queue of their own */
    PACED_BURST_US = 1000,
    SHARE_HOSTS_US = 1000, /* time that hosts take to answer */
};

static const double INCREASE_PACKETS = 1; /* per round, near the target */
static const double INCREASE_FAR = 8;     /* times INCREASE_PACKETS, far below the target */
static const double DECREASE = 0.8;
static const double DECREASE_MAX = 0.5;
static const double SHARE_GAIN = 0.25;
static const double SHARE_GAIN_MIN = 0.75;
static const double SHARE_SURE = 0.8;
static const double PACE_GAIN = 1.25;
static const double PACE_SLOW_START = 2;
static const double MARKED_GAIN = 1.0 / 16;
static const double SHARE_CALM = 0.125; /* of the target: below this there is practically no queue */

static void set_window(struct cl_cc *cc, double window)
{
    double least = (double)WINDOW_PACKETS_MIN * cc->packet_bytes;
    double most = (double)WINDOW_PACKETS_MAX * cc->packet_bytes;
    cc->window = (uint64_t)(window < least ? least : window > most ? most : window);
}

void cl_cc_init(struct cl_cc *cc, uint32_t packet_bytes)
{
    *cc = (struct cl_cc){.packet_bytes = packet_bytes,
                         .slow_start = true,
                         .target_us = TARGET_US,
                         .loss_trial = {.least = CL_LOSS_TRIAL_LOSS_PATH, .enough = CL_LOSS_TRIAL_PACKETS}};
    set_window(cc, (double)WINDOW_PACKETS_START * cc->packet_bytes);
}

void cl_cc_resume(struct cl_cc *cc, uint64_t window)
{
    cc->slow_start = true;
    cc->sharing = false;
    cc->queue_us = 0;
    set_window(cc, (double)window);
}

static double target_of(uint32_t target_us, uint32_t packet_us)
{
    double least_us = (double)TARGET_PACKETS * packet_us;
    return target_us < least_us ? least_us : target_us;
}

static double lesser(double a, double b)
{
    return a < b ? a : b;
}

uint32_t cl_cc_target_us(const struct cl_cc *cc, uint32_t packet_us)
{
    return (uint32_t)target_of(cc->target_us, packet_us);
}

static void overflowed(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    uint32_t target_us = cc->queue_us * 3 / 4;
    cc->target_us = target_us < TARGET_MIN_US ? TARGET_MIN_US : target_us < TARGET_US ? target_us : TARGET_US;
    cc->slow_start_before = cc->slow_start;
    cc->slow_start = false;
    cc->decrease_after = sample->next;
    cc->window_before = (double)cc->window;
    cc->sharing = sample->crowded;
    set_window(cc, (1 - CL_LOSS_TRIAL_CUT) * (double)cc->window);
}

static void end_round(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    bool cut = cc->round_end < cc->decrease_after; /* this round, or most of it, was sent before the cut */
    double target_us = target_of(cc->target_us, sample->packet_us);
    cc->round_end = sample->next;
    double part = cc->marked < cc->acked ? (double)cc->marked / cc->acked : 1;
    if (cc->marked || cc->marked_part > 0)
        cc->marked_part += MARKED_GAIN * (part - cc->marked_part);
    cc->acked = cc->marked = 0;
    cc->calm_rounds = cc->queue_us < target_us * SHARE_CALM ? cc->calm_rounds + 1 : 0;
    if (cc->calm_rounds > SHARE_CALM_ROUNDS || !sample->crowded)
        cc->sharing = false;
    if (cut) {
        cl_loss_trial_skip(&cc->loss_trial);
        return;
    }
    /* Half of the usual target: above half of a target that a trial has lowered there is nearly always some queue. */
    bool queued = cc->queue_us > target_of(TARGET_US, sample->packet_us) / 2 || sample->crowded;
    enum cl_loss_trial_verdict verdict = cl_loss_trial_judge(&cc->loss_trial, queued);
    if (verdict == CL_LOSS_TRIAL_FULL) {
        overflowed(cc, sample);
    } else if (verdict == CL_LOSS_TRIAL_LOSSY) {
        cc->target_us = TARGET_US;
        cc->slow_start = cc->slow_start_before;
        if (cc->window_before > (double)cc->window)
            set_window(cc, cc->window_before);
    } else if (cc->target_us < TARGET_US) {
        uint32_t grown_us = cc->target_us + cc->target_us / 64 + 1;
        cc->target_us = grown_us < TARGET_US ? grown_us : TARGET_US;
    }
}

/* This host is one of several senders to a port. All of them see the same queue, and so scale their equal shares by the
 * same factor. */
static void keep_share(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    double target_us = target_of(cc->target_us, sample->packet_us);
    double gain = 1 + SHARE_GAIN * (target_us - cc->queue_us) / target_us;
    gain = gain < SHARE_GAIN_MIN ? SHARE_GAIN_MIN : gain;
    double burst_us = target_us / 2 < SHARE_HOSTS_US ? SHARE_HOSTS_US : target_us / 2;
    double rate = gain * (double)sample->share, burst = rate * burst_us / 1e6, least = 2.0 * cc->packet_bytes;
    cc->rate = (uint64_t)rate + 1;
    cc->burst = (uint64_t)(burst < least ? least : burst);
    set_window(cc, rate * (sample->base_us + SHARE_HOSTS_US + 2 * target_us) / 1e6);
}

/* The part of the share that certainly fits: a window of this size never fills the port's queue. */
static double share_of(const struct cl_cc_sample *sample)
{
    return SHARE_SURE * (double)sample->share * sample->base_us / 1e6;
}

/* Paces the path if its round trip is long: a window sent at once would overflow the queues on the way. On short paths
 * the window is small, and bursts come from sleeping hosts and acknowledgements for batches anyway. */
static void pace(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    cc->rate = 0;
    if (sample->base_us < PACED_US + PACED_PACKETS * sample->packet_us)
        return;
    double gain = cc->slow_start ? PACE_SLOW_START : PACE_GAIN;
    double rate = gain * (double)cc->window * 1e6 / (sample->base_us + cc->queue_us);
    double burst = rate * PACED_BURST_US / 1e6, least = (double)CL_PACER_BURST_PACKETS * cc->packet_bytes;
    cc->rate = (uint64_t)rate + 1;
    cc->burst = (uint64_t)(burst < least ? least : burst);
}

void cl_cc_on_acked(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    cl_loss_trial_count(&cc->loss_trial, sample->packets, 0);
    if (sample->timed)
        cc->queue_us = (3 * cc->queue_us + sample->queue_us) / 4;
    cc->acked += sample->packets;
    cc->marked += sample->marked;
    if (sample->marked && cc->marked_part == 0)
        cc->marked_part = 1; /* the worst case, until the share is known */
    if (sample->largest >= cc->round_end)
        end_round(cc, sample);
    if (sample->contested)
        return;

    double window = (double)cc->window, queue_us = cc->queue_us,
           target_us = target_of(cc->target_us, sample->packet_us);
    if (queue_us > target_us / 2)
        cc->slow_start = false;
    if (sample->crowded && queue_us > target_us / 2)
        cc->sharing = true;
    if (cc->sharing) {
        if (sample->crowded && sample->timed)
            keep_share(cc, sample);
        return;
    }
    if (sample->marked) {
        cc->slow_start = false;
        if (sample->largest < cc->decrease_after)
            return;
        window *= 1 - cc->marked_part / 2;
        cc->decrease_after = sample->next;
    } else if (queue_us > target_us) {
        if (sample->largest < cc->decrease_after)
            return;
        double part = DECREASE * (queue_us - target_us) / queue_us;
        window *= 1 - lesser(part, DECREASE_MAX);
        cc->decrease_after = sample->next;
    } else if (!sample->limited || cc->loss_trial.trial) {
        /* no growth: the window is not the limit, or a cut is on trial */
    } else if (cc->slow_start || (queue_us < target_us / 2 && window < share_of(sample))) {
        window += (double)sample->bytes;
    } else {
        /* a lowered target means a shallow buffer: grow carefully */
        double far = (INCREASE_FAR - 1) * (1 - queue_us / target_us) * cc->target_us / TARGET_US;
        window += INCREASE_PACKETS * (1 + far) * cc->packet_bytes * (double)sample->bytes / window;
    }
    set_window(cc, window);
    if (sample->timed)
        pace(cc, sample);
}

void cl_cc_on_lost(struct cl_cc *cc, uint32_t packets)
{
    cl_loss_trial_count(&cc->loss_trial, 0, packets);
}

void cl_cc_on_pto(struct cl_cc *cc, uint32_t count)
{
    /* After one or two timeouts the peer may only be asleep. After more, halve the window each time: it limits the
     * packets sent to a peer that may be gone. */
    double halved = (double)cc->window / 2;
    if (count >= SILENT_PTOS && halved >= (double)WINDOW_PACKETS_SILENT * cc->packet_bytes) {
        cc->slow_start = true; /* to recover quickly if the peer wakes up */
        set_window(cc, halved);
    }
}
