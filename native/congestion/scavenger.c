#include "congestion/scavenger.h"

enum {
    WINDOW_PACKETS_START = 4,
    WINDOW_PACKETS_MOST = 1 << 16,
    TARGET_US = 500,
    TARGET_LEAST_US = 20,
    TARGET_PACKETS = 4,
    SILENT_PTOS = 3, /* after fewer the peer may only be asleep */
};

static const double TARGET_PART = 0.25; /* of the queue that overflowed */
static const double DECREASE_MAX = 0.5; /* of the window, per round */
static const double INCREASE_FAR = 8;   /* packets per round, far below the target */
static const double INCREASE_BESIDE = 0.125;

static double clamped(double value, double least, double most)
{
    return value < least ? least : value > most ? most : value;
}

static void set_window(struct cl_scavenger *scavenger, double window)
{
    double least = scavenger->packet_bytes;
    scavenger->window = clamped(window, least, least * WINDOW_PACKETS_MOST);
}

static void begin_round(struct cl_scavenger *scavenger, uint64_t next)
{
    scavenger->round_end = next;
    scavenger->least_us = UINT32_MAX;
    scavenger->most_us = 0;
    scavenger->limited = scavenger->congested = false;
}

void cl_scavenger_init(struct cl_scavenger *scavenger, uint32_t packet_bytes)
{
    *scavenger = (struct cl_scavenger){.packet_bytes = packet_bytes, .slow_start = true, .target_us = TARGET_US};
    set_window(scavenger, (double)WINDOW_PACKETS_START * packet_bytes);
    begin_round(scavenger, 0);
}

/* Somebody fills the queue: is it this window? */
static void shrink(struct cl_scavenger *scavenger, double part)
{
    scavenger->slow_start = false;
    scavenger->calm_rounds = 0;
    scavenger->beside = scavenger->beside || scavenger->window < 1.5 * scavenger->packet_bytes;
    scavenger->cut = true;
    set_window(scavenger, (1 - clamped(part, 0, DECREASE_MAX)) * scavenger->window);
}

static double target_of(const struct cl_scavenger *scavenger)
{
    double least_us = (double)TARGET_PACKETS * scavenger->packet_us;
    return scavenger->target_us < least_us ? least_us : scavenger->target_us;
}

static void end_round(struct cl_scavenger *scavenger, uint64_t next)
{
    double queue_us = scavenger->least_us, target_us = target_of(scavenger);
    if (scavenger->cut) {
        scavenger->cut = false;
    } else if (scavenger->congested) {
        double least_us = TARGET_PART * scavenger->most_us;
        scavenger->target_us = (uint32_t)clamped(least_us, TARGET_LEAST_US, TARGET_US);
        shrink(scavenger, DECREASE_MAX);
    } else if (scavenger->least_us == UINT32_MAX) {
        /* nothing is known */
    } else if (queue_us > target_us) {
        shrink(scavenger, (queue_us - target_us) / target_us);
    } else {
        if (!scavenger->beside)
            scavenger->target_us =
                (uint32_t)clamped(scavenger->target_us * (1 + 1.0 / 64) + 1, TARGET_LEAST_US, TARGET_US);
        if (++scavenger->calm_rounds >= CL_SCAVENGER_CALM_ROUNDS)
            scavenger->beside = false;
        double packets = scavenger->beside ? INCREASE_BESIDE : 1 + (INCREASE_FAR - 1) * (1 - queue_us / target_us);
        if (scavenger->limited && !scavenger->slow_start)
            set_window(scavenger, scavenger->window + packets * scavenger->packet_bytes);
    }
    begin_round(scavenger, next);
}

void cl_scavenger_on_acked(struct cl_scavenger *scavenger, const struct cl_scavenger_sample *sample)
{
    if (sample->timed) {
        scavenger->least_us = sample->queue_us < scavenger->least_us ? sample->queue_us : scavenger->least_us;
        scavenger->most_us = sample->queue_us > scavenger->most_us ? sample->queue_us : scavenger->most_us;
        scavenger->packet_us = sample->packet_us;
        if (sample->queue_us > target_of(scavenger) / 2)
            scavenger->slow_start = false;
    }
    scavenger->limited = scavenger->limited || sample->limited;
    scavenger->congested = scavenger->congested || sample->marked;
    if (scavenger->slow_start && sample->limited)
        set_window(scavenger, scavenger->window + (double)sample->bytes);
    if (sample->largest >= scavenger->round_end)
        end_round(scavenger, sample->next);
}

void cl_scavenger_on_lost(struct cl_scavenger *scavenger)
{
    scavenger->congested = true;
}

void cl_scavenger_on_pto(struct cl_scavenger *scavenger, uint32_t count)
{
    if (count >= SILENT_PTOS)
        set_window(scavenger, scavenger->window / 2);
}
