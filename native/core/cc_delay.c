/*
 * delay: keeps the queues on the way short. After Swift (Kumar et al., SIGCOMM 2020): additive increase while packets
 * spend less than a target in them, multiplicative decrease in proportion to the excess at most once per round trip,
 * slow start by doubling until a queue appears.
 *
 * What differs, and why:
 *  - The target is milliseconds, not tens of microseconds: engine threads share their cores with training and sleep for
 *    milliseconds, so packets come in bursts and a queue of that length is nothing to worry about.
 *  - Loss up to what cl_cc_overflowing tolerates is taken for what it is on a lossy link, and does not slow us. More
 * than that is a buffer that is shallower than the target: the window shrinks, and so does the target.
 */
#include "core/cc.h"

enum {
    WINDOW_PACKETS_START = 32,
    WINDOW_PACKETS_MIN = 2,
    WINDOW_PACKETS_MAX = 1 << 16,
    WINDOW_PACKETS_SILENT = 8, /* in flight at least towards a peer that does not answer */
    TARGET_US = 4000,
    TARGET_PACKETS = 8, /* on slow links a packet alone takes long */
    TARGET_MIN_US = 500,
    SILENT_PTOS = 3,
};

static const double INCREASE_PACKETS = 1; /* per round near the target, up to */
static const double INCREASE_FAR = 8;     /* times that far below it */
static const double DECREASE = 0.8;
static const double DECREASE_MAX = 0.5;
static const double DECREASE_LOSS = 0.3;

static void set_window(struct cl_cc *cc, double window)
{
    double least = (double)WINDOW_PACKETS_MIN * cc->packet_bytes;
    double most = (double)WINDOW_PACKETS_MAX * cc->packet_bytes;
    cc->window = (uint64_t)(window < least ? least : window > most ? most : window);
}

static void init(struct cl_cc *cc)
{
    cc->rate = 0;
    cc->delay = (struct cl_cc_delay){.slow_start = true, .target_us = TARGET_US};
    set_window(cc, (double)WINDOW_PACKETS_START * cc->packet_bytes);
}

static void end_round(struct cl_cc *cc, uint64_t next)
{
    struct cl_cc_delay *delay = &cc->delay;
    if (cl_cc_overflowing(delay->round_acked, delay->round_lost)) {
        uint32_t target_us = cc->queue_us * 3 / 4;
        delay->target_us = target_us < TARGET_MIN_US ? TARGET_MIN_US : target_us < TARGET_US ? target_us : TARGET_US;
        delay->slow_start = false;
        delay->decrease_after = next;
        set_window(cc, (1 - DECREASE_LOSS) * (double)cc->window);
    } else if (delay->target_us < TARGET_US) {
        uint32_t target_us = delay->target_us + delay->target_us / 64 + 1;
        delay->target_us = target_us < TARGET_US ? target_us : TARGET_US;
    }
    delay->round_end = next;
    delay->round_acked = delay->round_lost = 0;
}

static void on_acked(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    struct cl_cc_delay *delay = &cc->delay;
    delay->round_acked += sample->packets;
    if (sample->timed)
        cc->queue_us = (3 * cc->queue_us + sample->queue_us) / 4;
    if (sample->largest >= delay->round_end)
        end_round(cc, sample->next);

    double window = (double)cc->window, queue_us = cc->queue_us, target_us = delay->target_us;
    if (target_us < TARGET_PACKETS * sample->packet_us)
        target_us = TARGET_PACKETS * sample->packet_us;
    if (queue_us > target_us / 2)
        delay->slow_start = false;
    if (queue_us > target_us) {
        if (sample->largest < delay->decrease_after)
            return;
        double part = DECREASE * (queue_us - target_us) / queue_us;
        window *= 1 - (part < DECREASE_MAX ? part : DECREASE_MAX);
        delay->decrease_after = sample->next;
    } else if (sample->limited && delay->slow_start) {
        window += (double)sample->bytes;
    } else if (sample->limited) {
        double packets = INCREASE_PACKETS * (1 + (INCREASE_FAR - 1) * (1 - queue_us / target_us));
        window += packets * cc->packet_bytes * (double)sample->bytes / window;
    }
    set_window(cc, window);
}

static void on_lost(struct cl_cc *cc, uint32_t packets)
{
    cc->delay.round_lost += packets;
}

static void on_pto(struct cl_cc *cc, uint32_t count)
{
    /* One or two may be a peer that sleeps. From then on assume the worst, slowly: the window also bounds what is sent
     * into the void. */
    double halved = (double)cc->window / 2;
    if (count >= SILENT_PTOS && halved >= (double)WINDOW_PACKETS_SILENT * cc->packet_bytes) {
        cc->delay.slow_start = true; /* and back up quickly, should the peer wake up */
        set_window(cc, halved);
    }
}

const struct cl_cc_type cl_cc_type_delay = {"delay", true, init, on_acked, on_lost, on_pto};
