/*
 * delay: keeps a small standing queue. After Swift (Kumar et al., SIGCOMM 2020): additive increase while packets spend
 * less than a target in the network's queues, multiplicative decrease in proportion to the excess at most once per
 * round trip, slow start by doubling until a queue appears.
 *
 * What differs, and why:
 *  - The target is milliseconds, not tens of microseconds: engine threads share their cores with training and sleep for
 *    milliseconds, and the queue is what keeps the link busy meanwhile.
 *  - Loss up to LOSS_TOLERATED is taken for what it is on a lossy link and does not slow us. More than that in a round,
 *    beyond what chance explains, is an overflowing buffer that is shallower than the target: the window shrinks, and
 *    so does the target.
 */
#include "core/cc.h"

enum {
    INITIAL_PACKETS = 32,
    WINDOW_PACKETS_MIN = 2,
    WINDOW_PACKETS_MAX = 1 << 16,
    TARGET_US = 4000,
    TARGET_MIN_US = 500,
    INITIAL_RTT_US = 1000,
    LOSS_PACKETS_MIN = 4,
};

static const double LOSS_TOLERATED = 0.05;
static const double INCREASE_PACKETS = 1.0; /* per round near the target; up to INCREASE_FAR times that far below it */
static const double INCREASE_FAR = 8.0;
static const double DECREASE = 0.8;
static const double DECREASE_MAX = 0.5;

static void set_window(struct cl_cc *cc, double window, uint32_t rtt_us)
{
    double least = (double)WINDOW_PACKETS_MIN * cc->packet_bytes;
    double most = (double)WINDOW_PACKETS_MAX * cc->packet_bytes;
    window = window < least ? least : window > most ? most : window;
    cc->window = (uint64_t)window;
    double gain = cc->delay.slow_start ? 2.0 : 1.5;
    cc->rate = (uint64_t)(gain * window * 1e6 / (rtt_us ? rtt_us : 1));
}

static void init(struct cl_cc *cc)
{
    cc->delay = (struct cl_cc_delay){.slow_start = true, .target_us = TARGET_US};
    set_window(cc, (double)INITIAL_PACKETS * cc->packet_bytes, INITIAL_RTT_US);
}

/* More losses than LOSS_TOLERATED explains: two standard deviations above its mean. */
static bool overflowing(const struct cl_cc_delay *delay)
{
    double packets = (double)delay->round_acked + delay->round_lost;
    double excess = delay->round_lost - LOSS_TOLERATED * packets;
    return delay->round_lost >= LOSS_PACKETS_MIN && excess > 0 && excess * excess > 4 * LOSS_TOLERATED * packets;
}

static void end_round(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    struct cl_cc_delay *delay = &cc->delay;
    if (overflowing(delay)) {
        delay->slow_start = false;
        delay->target_us = delay->queue_us * 3 / 4 < TARGET_MIN_US ? TARGET_MIN_US : delay->queue_us * 3 / 4;
        if (delay->target_us > TARGET_US)
            delay->target_us = TARGET_US;
        set_window(cc, 0.7 * (double)cc->window, sample->rtt_us);
        delay->decrease_after = sample->next;
    } else if (delay->target_us < TARGET_US) {
        delay->target_us += delay->target_us / 64 + 1;
    }
    delay->round_end = sample->next;
    delay->round_acked = delay->round_lost = 0;
    delay->round_queue_us = UINT32_MAX;
}

static void on_acked(struct cl_cc *cc, const struct cl_cc_sample *sample, uint64_t now_us)
{
    (void)now_us;
    struct cl_cc_delay *delay = &cc->delay;
    delay->round_acked += sample->packets;
    if (sample->timed) {
        delay->queue_us = (3 * delay->queue_us + sample->queue_us) / 4;
        if (sample->queue_us < delay->round_queue_us)
            delay->round_queue_us = sample->queue_us;
    }
    if (sample->largest >= delay->round_end)
        end_round(cc, sample);

    double window = (double)cc->window, queue_us = delay->queue_us, target_us = delay->target_us;
    if (delay->slow_start && queue_us > target_us / 2)
        delay->slow_start = false;
    if (delay->slow_start) {
        if (sample->limited)
            window += (double)sample->bytes;
    } else if (queue_us < target_us) {
        double packets = INCREASE_PACKETS * (1 + (INCREASE_FAR - 1) * (1 - queue_us / target_us));
        if (sample->limited)
            window += packets * cc->packet_bytes * (double)sample->bytes / window;
    } else if (sample->largest >= delay->decrease_after) {
        double part = DECREASE * (queue_us - target_us) / queue_us;
        window *= 1 - (part < DECREASE_MAX ? part : DECREASE_MAX);
        delay->decrease_after = sample->next;
    }
    set_window(cc, window, sample->rtt_us);
}

static void on_lost(struct cl_cc *cc, uint64_t bytes, uint32_t packets, uint64_t next, uint64_t now_us)
{
    (void)bytes;
    (void)next;
    (void)now_us;
    cc->delay.round_lost += packets;
}

static void on_pto(struct cl_cc *cc, uint32_t count, uint64_t now_us)
{
    (void)now_us;
    /* One or two may be a peer that sleeps. From then on assume the worst slowly: the window also bounds what is sent
     * into the void. */
    if (count < 3)
        return;
    uint64_t least = 8u * (uint64_t)cc->packet_bytes;
    cc->delay.slow_start = false;
    if (cc->window / 2 >= least)
        cc->window /= 2;
}

const struct cl_cc_type cl_cc_type_delay = {"delay", true, init, on_acked, on_lost, on_pto};
