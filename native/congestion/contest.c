#include "congestion/contest.h"

#include <math.h>

enum {
    QUEUED_KEPT = 16,        /* a queue is kept after so many times its length ... */
    QUEUED_KEPT_SHARED = 64, /* ... or so many, where several windows have to find it */
    LOSSES_LEAST = 8,
    LOSSES_MEMORY = 64,
    PROBE_EVERY = 50, /* rounds until the first probe, and twice as many after each in vain; several ranks of a host
                         see COMMON_PROBE_US, too */
    PROBE_EVERY_MOST = 1600,
    PROBE_ROUNDS = 3,
    COMMON_PROBE_US = 1 << 22, /* least time between probes that several ranks of a host make together; */
    COMMON_PROBE_ROUNDS = 2,   /* each begins so soon after it */
    FORGET_US = 10000000,
    IDLE_US = 1000000,
    SILENT_PTOS = 3, /* after fewer the peer may only be asleep */
    BURST_PACKETS_LEAST = 2,
};

static const double KEPT = 1.25;         /* a queue that is longer is not the one that is kept */
static const double KEPT_OVERFLOWED = 2; /* a longer buffer shows its queue in time */
static const double USUAL_WEIGHT = 1.0 / 256, HOST_WEIGHT = 1.0 / 16, LOST_WEIGHT = 1.0 / 8;
static const double SURE = 9;                        /* at first, twice as much after each mistake */
static const double EXCESS = 0.2, CHANCE_PART = 0.5; /* of the losses */
static const double FULL_PART = 0.5;                 /* of the longest queue */
static const double LONGEST_FADES = 1.0 / 4096, DELIVERED_FADES = 0.1;
static const double SHORT_PART = 0.5; /* of the queue that is kept: a shorter buffer overflows all the time */
static const double CUT_LEAST = 0.5;
static const double TRIAL_PART = 0.4; /* of the first window: a trial cuts no further */
static const double PROBE_PART = 0.9; /* of what the empty network holds */
static const double DRAINED = 0.25;   /* of the queue before the probe */
static const double PACE_GAIN = 1.25;
static const double BURST_ROUNDS = 1.0 / 32, BURST_HOSTS = 2;

void cl_contest_init(struct cl_contest *contest, uint32_t packet_bytes)
{
    *contest = (struct cl_contest){
        .packet_bytes = packet_bytes, .senders = 1, .least_us = UINT32_MAX, .probe_every = PROBE_EVERY, .sure = SURE};
}

/* ---- the window ---- */

/* The part of the window to which a probe goes down: nearly what the empty network holds. */
static double probe_part(const struct cl_contest *contest)
{
    return PROBE_PART * contest->base_us / (contest->base_us + contest->probed_us);
}

/* What is in the network, and not with hosts that sleep. */
static double network_bytes(const struct cl_contest *contest)
{
    double bytes = contest->cubic.window * contest->packet_bytes / contest->senders;
    return contest->probed_us > 0 ? probe_part(contest) * bytes : bytes;
}

static double network_us(const struct cl_contest *contest)
{
    return contest->base_us + contest->queue_us + 1.0;
}

uint64_t cl_contest_window(const struct cl_contest *contest)
{
    double bytes = network_bytes(contest) * (1 + contest->host_us / network_us(contest));
    return (uint64_t)fmax(bytes, (double)CL_CUBIC_WINDOW_LEAST * contest->packet_bytes);
}

uint64_t cl_contest_rate(const struct cl_contest *contest)
{
    return (uint64_t)(PACE_GAIN * network_bytes(contest) * 1e6 / network_us(contest)) + 1;
}

uint64_t cl_contest_burst(const struct cl_contest *contest)
{
    double burst_us = BURST_ROUNDS * contest->base_us + BURST_HOSTS * contest->host_us;
    double least = (double)BURST_PACKETS_LEAST * contest->packet_bytes;
    return (uint64_t)fmax((double)cl_contest_rate(contest) * burst_us / 1e6, least);
}

/* ---- where packets are lost ---- */

/* Whether the queue is longer than usual; in a contest it must also be near the longest one of lately. */
static bool is_longer(const struct cl_contest *contest)
{
    return contest->queue_us > contest->usual_us &&
           (!contest->active || contest->queue_us >= FULL_PART * contest->longest_us);
}

static double losses_of(const struct cl_contest *contest)
{
    return contest->losses[0] + contest->losses[1];
}

/* How many of the losses came while the queue was longer than usual, beyond the part of all packets that did so. Also
 * gives the variance that chance has. */
static double excess_of(const struct cl_contest *contest, double *variance)
{
    double part = contest->packets[1] / fmax(contest->packets[0] + contest->packets[1], 1);
    *variance = part * (1 - part) * losses_of(contest);
    return contest->losses[1] - part * losses_of(contest);
}

static bool overflows(const struct cl_contest *contest)
{
    double variance, excess = excess_of(contest, &variance);
    return excess > EXCESS * losses_of(contest) && excess * excess > contest->sure * variance;
}

/* Without a contest a buffer that is shorter than the queue that is kept overflows all the time. That is worse,
 * whatever the link loses by chance. */
static bool loses_by_chance(const struct cl_contest *contest)
{
    return losses_of(contest) >= LOSSES_LEAST && contest->losses[1] < CHANCE_PART * losses_of(contest) &&
           contest->longest_us > SHORT_PART * contest->kept_us;
}

/* The part of the losses at long queues that chance does not explain: a link loses packets at the same rate at any
 * length of the queue. */
static double overflow_part(const struct cl_contest *contest)
{
    double by_chance = contest->losses[0] * contest->packets[1], all = contest->losses[1] * contest->packets[0];
    return all > 0 ? fmax(1 - by_chance / all, 0) : 1;
}

static void forget_losses(struct cl_contest *contest)
{
    contest->packets[0] = contest->packets[1] = contest->losses[0] = contest->losses[1] = 0;
}

static void count_acked(struct cl_contest *contest, uint32_t packets)
{
    contest->packets[is_longer(contest)] += packets;
    if (losses_of(contest) <= LOSSES_MEMORY)
        return;
    for (int i = 0; i < 2; i++) {
        contest->packets[i] /= 2;
        contest->losses[i] /= 2;
    }
}

/* ---- begin and end ---- */

/* bytes: of this path, acknowledged in a round trip. */
static enum cl_contest_news begin(struct cl_contest *contest, double bytes)
{
    contest->active = true;
    cl_cubic_init(&contest->cubic, bytes * contest->senders / contest->packet_bytes);
    contest->first = contest->cubic.window;
    contest->rounds = contest->probe_every;
    contest->trial.trial = false;
    contest->cuts = 0;
    forget_losses(contest);
    return CL_CONTEST_BEGAN;
}

static enum cl_contest_news end(struct cl_contest *contest, uint64_t now_us)
{
    contest->active = false;
    contest->probed_us = contest->queued_rounds = 0;
    contest->ended_us = now_us;
    forget_losses(contest);
    return CL_CONTEST_ENDED;
}

static enum cl_contest_news judge_queue(struct cl_contest *contest, uint64_t now_us)
{
    if (contest->least_us == UINT32_MAX)
        return CL_CONTEST_NONE;
    if (contest->marked || contest->least_us <= KEPT * contest->kept_alone_us) {
        contest->queued_rounds = 0;
        return CL_CONTEST_NONE;
    }
    if (contest->queued_rounds++ == 0) {
        contest->queued_us = now_us;
        contest->most_bytes = 0;
    }
    contest->most_bytes = contest->bytes > contest->most_bytes ? contest->bytes : contest->most_bytes;
    bool shares = !contest->alone || contest->ranks > 1;
    uint64_t wait_us = (uint64_t)(shares ? QUEUED_KEPT_SHARED : QUEUED_KEPT) * contest->kept_alone_us;
    if (contest->queued_rounds < CL_CONTEST_ROUNDS || now_us <= contest->queued_us + wait_us)
        return CL_CONTEST_NONE;
    return begin(contest, (double)contest->most_bytes);
}

/* Whether the next probe is due. A probe of one of several ranks of a host drains no queue, as the others go on. So
 * they probe together, shortly after multiples of a time on the host's clock, or not at all. That time doubles, so that
 * ranks with different ones meet at the multiples of the longest one. */
static bool probe_is_due(const struct cl_contest *contest, uint64_t now_us)
{
    if (contest->ranks == 1)
        return contest->rounds == 0;
    double round_us = network_us(contest), least_us = contest->probe_every * round_us;
    uint64_t period_us = COMMON_PROBE_US;
    while ((double)period_us < least_us)
        period_us *= 2;
    return (double)(now_us % period_us) < COMMON_PROBE_ROUNDS * round_us &&
           (double)(now_us - contest->probe_at_us) > 2 * COMMON_PROBE_ROUNDS * round_us;
}

static enum cl_contest_news probe(struct cl_contest *contest, uint64_t now_us)
{
    if (contest->rounds > 0)
        contest->rounds--;
    if (contest->probed_us > 0 && contest->least_us < DRAINED * contest->probed_us) {
        contest->cubic.window *= probe_part(contest);
        return end(contest, now_us);
    }
    if (contest->probed_us > 0) {
        if (contest->rounds > 0)
            return CL_CONTEST_NONE;
        contest->probed_us = 0;
        contest->probe_every *= contest->probe_every < PROBE_EVERY_MOST ? 2 : 1;
        contest->rounds = contest->probe_every;
    } else if (probe_is_due(contest, now_us) && contest->queue_us > contest->base_us * DRAINED &&
               contest->queue_us > KEPT * contest->kept_alone_us) {
        contest->probed_us = contest->queue_us;
        contest->probe_at_us = now_us;
        contest->rounds = PROBE_ROUNDS;
    }
    return CL_CONTEST_NONE;
}

static enum cl_contest_news end_round(struct cl_contest *contest, uint64_t next, uint64_t now_us)
{
    enum cl_contest_news news = contest->active ? probe(contest, now_us) : judge_queue(contest, now_us);
    contest->round_end = next;
    contest->bytes_before = contest->bytes;
    contest->delivered = fmax((double)contest->bytes, (1 - DELIVERED_FADES) * contest->delivered);
    contest->bytes = 0;
    contest->least_us = UINT32_MAX;
    contest->marked = false;
    return news;
}

/* Does the link cause the losses? */
static enum cl_contest_news judge_end(struct cl_contest *contest, uint64_t now_us)
{
    bool lossy;
    if (contest->trial.trial) {
        enum cl_loss_trial_verdict verdict = cl_loss_trial_judge(&contest->trial, false);
        contest->trial.trial = contest->trial.trial && verdict == CL_LOSS_TRIAL_NONE;
        lossy = verdict == CL_LOSS_TRIAL_LOSSY;
    } else {
        lossy = loses_by_chance(contest);
        contest->sure *= lossy ? 2 : 1;
    }
    if (!lossy)
        return CL_CONTEST_NONE;
    end(contest, now_us);
    return CL_CONTEST_UNDONE;
}

/* Do losses begin a contest? */
static enum cl_contest_news judge_losses(struct cl_contest *contest, const struct cl_loss_trial *trial, uint64_t now_us)
{
    if (now_us > contest->ended_us + FORGET_US) {
        contest->probe_every = PROBE_EVERY;
        contest->sure = SURE;
    }
    if (!contest->alone)
        return CL_CONTEST_NONE;
    if (contest->lost_us < KEPT_OVERFLOWED * contest->kept_us && overflows(contest)) {
        begin(contest, contest->delivered);
        return CL_CONTEST_OVERFLOWED;
    }
    contest->tried = contest->tried && trial->trial;
    /* Bursts of several ranks may have caused the losses. In a long buffer TCP shows by its queue. */
    bool other = contest->ranks > 1 && contest->longest_us >= KEPT_OVERFLOWED * contest->kept_us;
    if (!trial->trial || contest->tried || other || losses_of(contest) < 1)
        return CL_CONTEST_NONE;
    begin(contest, contest->delivered);
    contest->tried = true;
    contest->tried_from = contest->next;
    contest->trial = *trial;
    cl_loss_trial_skip(&contest->trial);
    return CL_CONTEST_BEGAN;
}

/* ---- events ---- */

static enum cl_contest_news see_queue(struct cl_contest *contest, const struct cl_contest_sample *sample,
                                      uint64_t now_us)
{
    contest->usual_us += USUAL_WEIGHT * (sample->queue_us - contest->usual_us);
    contest->host_us += HOST_WEIGHT * (sample->host_us - contest->host_us);
    contest->queue_us = sample->queue_us;
    contest->longest_us = fmax(sample->queue_us, (1 - LONGEST_FADES) * contest->longest_us);
    contest->base_us = sample->base_us;
    contest->kept_us = sample->kept_us;
    contest->kept_alone_us = sample->kept_alone_us;
    contest->least_us = sample->queue_us < contest->least_us ? sample->queue_us : contest->least_us;
    return sample->largest >= contest->round_end ? end_round(contest, sample->next, now_us) : CL_CONTEST_NONE;
}

static void grow(struct cl_contest *contest, const struct cl_contest_sample *sample, uint64_t now_us)
{
    bool limited = sample->limited || (double)contest->bytes_before > network_bytes(contest) / 2;
    if (limited && !contest->probed_us && sample->largest >= contest->recover)
        cl_cubic_grow(&contest->cubic, (double)sample->bytes * contest->senders / contest->packet_bytes,
                      contest->base_us, now_us);
}

enum cl_contest_news cl_contest_on_acked(struct cl_contest *contest, const struct cl_contest_sample *sample,
                                         uint64_t now_us)
{
    enum cl_contest_news news = CL_CONTEST_NONE;
    contest->marked |= sample->marked > 0;
    if (contest->active && (sample->marked > 0 || now_us > contest->acked_us + IDLE_US))
        news = end(contest, now_us);
    contest->acked_us = now_us;
    contest->bytes += sample->bytes;
    contest->largest = sample->largest;
    contest->next = sample->next;
    contest->alone = sample->alone;
    contest->ranks = sample->ranks > 1 ? sample->ranks : 1;
    contest->senders = sample->senders > contest->ranks ? sample->senders : contest->ranks;
    count_acked(contest, sample->packets);
    if (contest->trial.trial && sample->largest >= contest->tried_from)
        cl_loss_trial_count(&contest->trial, sample->packets, 0);
    if (!news && sample->timed)
        news = see_queue(contest, sample, now_us);
    if (!news)
        news = contest->active ? judge_end(contest, now_us) : judge_losses(contest, sample->trial, now_us);
    if (contest->active)
        grow(contest, sample, now_us);
    return news;
}

void cl_contest_on_lost(struct cl_contest *contest, uint32_t packets)
{
    bool longer = is_longer(contest), trial = contest->active && contest->trial.trial;
    if (contest->largest >= contest->counted) {
        contest->counted = contest->next;
        contest->losses[longer]++;
        contest->lost_us += LOST_WEIGHT * (contest->queue_us - contest->lost_us);
    }
    if (trial && contest->largest >= contest->tried_from)
        cl_loss_trial_count(&contest->trial, 0, packets);
    if (trial && contest->cubic.window < TRIAL_PART * contest->first)
        return;
    if (!contest->active || !longer || contest->largest < contest->recover)
        return;
    contest->recover = contest->next;
    contest->cuts += trial ? 1 : overflow_part(contest);
    if (contest->cuts < CUT_LEAST)
        return;
    contest->cuts--;
    cl_cubic_cut(&contest->cubic);
}

void cl_contest_on_pto(struct cl_contest *contest, uint32_t count)
{
    if (contest->active && count >= SILENT_PTOS)
        cl_cubic_cut(&contest->cubic);
}
