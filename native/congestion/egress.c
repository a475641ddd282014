#include "congestion/egress.h"

#include <math.h>

enum {
    DEPTH_MAX_US = 4000,
    DEPTH_MIN_US = 100,
    DEPTH_START_PACKETS = 128,
    DEPTH_MIN_PACKETS = 10,
    START_PACKETS = 64, /* sent at once at the start: enough to measure the link */
    START_US = 4000,    /* the next START_PACKETS leave in this time */
    EPOCH_US = 5000,
    EPOCH_SAMPLES = 4,
    SPAN_PACKETS = 16, /* shortest measurement of capacity */
    SPAN_DEPTHS = 3,
    SPAN_STARTUP_US = 50,
    SPAN_MAX_US = 1000000,
    BUSY_SLACK_US = 100,
    RECOVERY = 8, /* depths */
    TARGET_PACKETS = 8,
    WEIGHT_MAX = 8,
    CONFIRMED = 8,            /* measurements */
    ROUND_TRIP_MEMORY = 128,  /* epochs: acknowledgements of long paths may come far apart */
    FASTEST_US = 60000000,    /* of sending: then the highest capacity is forgotten by two thirds */
    FASTEST_EPOCH_US = 20000, /* so much of an epoch counts: a longer one has a pause */
    FASTEST_WEIGHT = 2,       /* measurements: the first one may be of the start's burst */
    BATCH_MOST_US = 400,      /* other peers wait for its end */
    SHARE_DEPTHS = 2,         /* the time in which the neighbours' rate is measured */
    SPAN_DEPTHS_SHARED = 8,   /* what neighbours send is counted a little early or late: longer measurements */
    NEWS_US = 20000,          /* of neighbours: a longer silence is none */
    NEWS_TIMES = 100,         /* the capacity: it may not be known yet */
};

static const double TARGET_DEPTHS = 0.5;
static const double GAIN_STARTUP = 2;
static const double GAIN_EMPTY = 1.25; /* no packet waits: the link can carry more */
static const double GAIN_MIN = 0.5;
static const double SLOW_PATH = 0.5;                                          /* of the capacity */
static const uint64_t CAPACITY_LEAST = 100000, CAPACITY_MOST = 1000000000000; /* that a neighbour may tell */

/* The longest depth of a link on which a packet takes so long. */
static double longest_depth_us(double packet_us)
{
    return fmax(packet_us * DEPTH_MIN_PACKETS, DEPTH_MAX_US);
}

/* The time that `packets` take on the link, within the limits of a depth. */
static uint32_t depth_of(const struct cl_egress *egress, double packets)
{
    double packet_us = cl_egress_packet_us(egress), depth_us = packets * packet_us;
    double least_us = packet_us * DEPTH_MIN_PACKETS, most_us = longest_depth_us(packet_us);
    least_us = least_us < DEPTH_MIN_US ? DEPTH_MIN_US : least_us;
    return (uint32_t)(depth_us < least_us ? least_us : depth_us < most_us ? depth_us : most_us);
}

/* All processes of this host use the room that the most careful one of them finds. */
static uint32_t common_depth_us(const struct cl_egress *egress)
{
    uint32_t others_us = egress->neighbours.depth_us, least_us = depth_of(egress, 0);
    if (others_us >= egress->depth_us)
        return egress->depth_us;
    return others_us > least_us ? others_us : least_us < egress->depth_us ? least_us : egress->depth_us;
}

/* A fixed number of packets is part of the target: where several hosts share a bottleneck, a slower host wants more of
 * its queue and gets a larger share, until all are equal. The rest makes up for late wake-ups; urgent packets would
 * have to wait behind it. */
double cl_egress_target_us(const struct cl_egress *egress)
{
    return TARGET_DEPTHS * common_depth_us(egress) + TARGET_PACKETS * cl_egress_packet_us(egress);
}

double cl_egress_target_alone_us(const struct cl_egress *egress)
{
    double packet_us = cl_egress_fastest_packet_us(egress);
    double depth_us = fmin(common_depth_us(egress), longest_depth_us(packet_us));
    return TARGET_DEPTHS * depth_us + TARGET_PACKETS * packet_us;
}

static double present_target_us(const struct cl_egress *egress, uint64_t now_us)
{
    bool urgent = now_us < egress->urgent_until_us;
    return urgent ? TARGET_PACKETS * cl_egress_packet_us(egress) : cl_egress_target_us(egress);
}

static void set_rate(struct cl_egress *egress, uint64_t now_us)
{
    uint32_t depth_us = common_depth_us(egress);
    double gain = 1 + (present_target_us(egress, now_us) - egress->queue_us) / (RECOVERY * depth_us);
    gain = egress->startup ? GAIN_STARTUP : egress->empty ? GAIN_EMPTY : gain < GAIN_MIN ? GAIN_MIN : gain;
    double left = cl_egress_rate(egress);
    double burst = egress->capacity * cl_neighbours_spare(&egress->neighbours) * depth_us / 1e6;
    double least = (double)CL_PACER_BURST_PACKETS * egress->datagram_bytes;
    cl_pacer_set(&egress->pacer, (uint64_t)(gain * left) + 1, (uint64_t)(burst < least ? least : burst), now_us);
}

void cl_egress_init(struct cl_egress *egress, uint32_t datagram_bytes)
{
    *egress = (struct cl_egress){.startup = true,
                                 .datagram_bytes = datagram_bytes + CL_EGRESS_OVERHEAD_BYTES,
                                 .depth_us = DEPTH_MAX_US,
                                 .loss_trial = {.least = CL_LOSS_TRIAL_LOSS, .enough = CL_LOSS_TRIAL_PACKETS},
                                 .epoch_queue_us = UINT32_MAX};
    uint64_t start = (uint64_t)START_PACKETS * egress->datagram_bytes;
    cl_neighbours_init(&egress->neighbours);
    cl_batches_init(&egress->batches);
    egress->capacity = (double)start * 1e6 / START_US;
    cl_pacer_init(&egress->pacer, (uint64_t)egress->capacity, start, 0);
}

void cl_egress_see(struct cl_egress *egress, uint8_t class, uint8_t first_class, uint32_t bytes, uint64_t now_us)
{
    if (cl_egress_urgent(egress, class, now_us)) {
        egress->mixed_until_us = now_us + CL_EGRESS_MIXED_US;
        if (class < CL_CLASSES_URGENT)
            egress->urgent_until_us = egress->mixed_until_us;
        egress->borrowed += egress->pacer.tokens < 0 ? bytes + CL_EGRESS_OVERHEAD_BYTES : 0;
    } else {
        if (first_class >= class) /* the packet is not the guard's: see queue.h */
            egress->borrowed = 0;
        egress->last_class = class;
        egress->last_class_us = now_us;
    }
}

/* A batch is long beside the short queue that urgent packets want. */
static bool sends_batches(const struct cl_egress *egress, uint64_t now_us)
{
    return now_us >= egress->urgent_until_us && cl_batches_wanted(&egress->batches, now_us);
}

uint64_t cl_egress_ready_us(struct cl_egress *egress, uint8_t class, uint64_t now_us)
{
    bool borrows = cl_egress_urgent(egress, class, now_us) && egress->borrowed < egress->pacer.burst;
    egress->pacer.batches = sends_batches(egress, now_us);
    return cl_pacer_ready_us(&egress->pacer, borrows, now_us);
}

struct cl_egress_snapshot cl_egress_snapshot(const struct cl_egress *egress, uint8_t class, uint64_t now_us)
{
    return (struct cl_egress_snapshot){.bytes = egress->bytes[class],
                                       .paced_us = now_us + cl_egress_backlog_us(egress)};
}

void cl_egress_sent(struct cl_egress *egress, uint8_t class, uint32_t bytes)
{
    if (cl_pacer_is_full(&egress->pacer)) {
        egress->full_us = egress->pacer.last_us;
        if (egress->marked)
            egress->idle_us = egress->full_us;
    }
    for (; class < CL_CLASSES_BETWEEN_HOSTS; class ++) {
        egress->own_bytes[class] += bytes + CL_EGRESS_OVERHEAD_BYTES;
        egress->bytes[class] += bytes + CL_EGRESS_OVERHEAD_BYTES;
    }
    cl_pacer_sent(&egress->pacer, bytes + CL_EGRESS_OVERHEAD_BYTES);
}

static void set_depth(struct cl_egress *egress, bool startup)
{
    egress->startup = startup;
    egress->overflow_us = depth_of(egress, DEPTH_START_PACKETS);
    egress->depth_us = startup ? egress->overflow_us / 2 : egress->overflow_us;
}

/* ---- other processes of this host ---- */

struct cl_told cl_egress_tell(const struct cl_egress *egress)
{
    struct cl_told told = {.lost = egress->own_lost_bytes};
    for (int class = 0; class < CL_CLASSES_BETWEEN_HOSTS; class ++)
        told.bytes[class] = egress->own_bytes[class];
    if (!egress->startup) {
        told.capacity = (uint64_t)egress->capacity;
        told.depth_us = egress->depth_us;
    }
    return told;
}

/* Another process wrote the numbers: any may stand there. A link cannot have carried more than a few times its
 * capacity. */
static bool is_likely(const struct cl_egress *egress, const struct cl_told *news)
{
    double most = NEWS_TIMES * egress->capacity * NEWS_US / 1e6;
    bool likely = (double)news->lost < most;
    for (int class = 0; class < CL_CLASSES_BETWEEN_HOSTS; class ++)
        likely = likely && (double)news->bytes[class] < most;
    return likely;
}

void cl_egress_hear(struct cl_egress *egress, uint32_t neighbour, const struct cl_told *told, uint64_t now_us)
{
    struct cl_told news;
    cl_neighbours_hear(&egress->neighbours, neighbour, told, &news, now_us);
    if (!is_likely(egress, &news))
        return;
    egress->lost_bytes += news.lost;
    for (int class = 0; class < CL_CLASSES_BETWEEN_HOSTS; class ++)
        egress->bytes[class] += news.bytes[class];
    if (egress->startup && told->capacity >= CAPACITY_LEAST && told->capacity <= CAPACITY_MOST) {
        egress->capacity = (double)told->capacity; /* there is nothing left to search for */
        set_depth(egress, false);
        set_rate(egress, now_us);
    }
}

bool cl_egress_heard(struct cl_egress *egress, uint64_t now_us)
{
    if (cl_neighbours_judge(&egress->neighbours, egress->capacity, SHARE_DEPTHS * egress->depth_us, now_us))
        set_rate(egress, now_us);
    return egress->neighbours.active > 0;
}

/* Grows the depth halfway to the last overflow, then slowly, to find out whether there is more room. */
static void grow_depth(struct cl_egress *egress)
{
    bool far = egress->depth_us < egress->overflow_us * 8 / 10;
    double grown_us = egress->depth_us + egress->depth_us / (far ? 32 : 512) + 1;
    egress->depth_us = depth_of(egress, grown_us / cl_egress_packet_us(egress));
}

/* The queue seems to have overflowed at this depth. A trial goes down to the least depth at once: a cut by a part may
 * not stop the losses of bursts. */
static void overflowed(struct cl_egress *egress, uint32_t depth_us, uint64_t now_us)
{
    egress->cut_us = now_us;
    egress->confirmed = 0;
    egress->overflow_us = depth_us;
    egress->cut_depth_us = depth_of(egress, (1 - CL_LOSS_TRIAL_CUT) * depth_us / cl_egress_packet_us(egress));
    egress->depth_us = egress->loss_trial.trial ? depth_of(egress, 0) : egress->cut_depth_us;
}

/* Whether the losses that are found now are of packets that left after the last cut of the depth. */
static bool is_settled(const struct cl_egress *egress, uint64_t now_us)
{
    return now_us >= egress->cut_us + cl_loss_trial_settle_us(egress->round_trip_us);
}

static void adapt_depth(struct cl_egress *egress, uint64_t now_us)
{
    struct cl_loss_trial *trial = &egress->loss_trial;
    if (!is_settled(egress, now_us)) {
        cl_loss_trial_skip(trial);
        cl_batches_forget(&egress->batches);
        return;
    }
    bool tried = trial->trial;
    enum cl_loss_trial_verdict verdict = cl_loss_trial_judge(trial, false);
    if (tried || verdict != CL_LOSS_TRIAL_NONE)
        cl_batches_forget(&egress->batches);
    else
        cl_batches_judge(&egress->batches, egress->round_trip_us, now_us);
    if (verdict == CL_LOSS_TRIAL_FULL)
        overflowed(egress, tried ? egress->cut_depth_us : common_depth_us(egress), now_us);
    else if (verdict == CL_LOSS_TRIAL_LOSSY)
        egress->depth_us = egress->overflow_us;
    else if (tried && !trial->trial)
        egress->depth_us = egress->cut_depth_us; /* the losses have stopped */
    else if (!trial->trial)
        grow_depth(egress);
}

/* Remembers the highest capacity for a while: another flow may be why less is measured now. */
static void see_fastest(struct cl_egress *egress, uint64_t now_us)
{
    uint64_t passed_us = now_us - egress->epoch_began_us;
    egress->epoch_began_us = now_us;
    egress->fastest -= egress->fastest * fmin((double)passed_us, FASTEST_EPOCH_US) / FASTEST_US;
    if (egress->weight >= FASTEST_WEIGHT)
        egress->fastest = fmax(egress->fastest, egress->capacity);
}

static void end_epoch(struct cl_egress *egress, uint64_t now_us)
{
    egress->queue_us = egress->epoch_queue_us;
    if (egress->startup) {
        set_depth(egress, egress->queue_us < cl_egress_target_us(egress) / 2);
        cl_batches_forget(&egress->batches);
    } else {
        adapt_depth(egress, now_us);
    }
    see_fastest(egress, now_us);
    egress->empty = egress->epoch_longest_us < cl_egress_target_us(egress) / 4;
    egress->round_trip_us -= egress->round_trip_us / ROUND_TRIP_MEMORY;
    egress->epoch_queue_us = UINT32_MAX;
    egress->epoch_longest_us = 0;
    egress->epoch_samples = 0;
    egress->epoch_end_us = now_us + (egress->depth_us < EPOCH_US ? egress->depth_us : EPOCH_US);
}

static uint64_t longer(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* A measurement has shown that the capacity is not too high. */
static void confirm(struct cl_egress *egress)
{
    if (egress->confirmed < CONFIRMED)
        egress->confirmed++;
}

/* The bytes that neighbours may have sent before a packet of this process and told after it: their bursts. */
static double unsure_of(const struct cl_egress *egress)
{
    const struct cl_neighbours *neighbours = &egress->neighbours;
    double others = neighbours->active > 0 && !egress->startup ? 1 - cl_neighbours_spare(neighbours) : 0;
    return others * egress->capacity * common_depth_us(egress) / 1e6;
}

/* Measures the capacity between two packets of a class. last: no data was sent that this class could overtake. */
static void measure_between(struct cl_egress *egress, const struct cl_egress_sample *start,
                            const struct cl_egress_sample *end, uint64_t arrived_us, bool last, bool mixed)
{
    uint64_t span = end->snapshot.bytes - start->snapshot.bytes;
    if (egress->loss_trial.tolerated <= CL_LOSS_TRIAL_LOSS) {
        uint64_t lost = egress->lost_bytes - start->lost_bytes;
        span -= lost < span / 2 ? lost : span / 2;
    }
    uint64_t left_us = end->sent_us - start->sent_us, longest_us = longer(left_us, arrived_us);
    if (mixed && end->snapshot.paced_us > start->snapshot.paced_us)
        longest_us = longer(longest_us, end->snapshot.paced_us - start->snapshot.paced_us);
    double capacity = (double)span * 1e6 / (double)arrived_us, slowest = (double)span * 1e6 / (double)longest_us;
    double sure = slowest - unsure_of(egress) * 1e6 / (double)longest_us;
    bool full = start->sent_us < egress->full_us;
    bool slow = full && egress->confirmed >= CONFIRMED && capacity < SLOW_PATH * egress->capacity;
    bool busy = last && start->sent_us >= egress->idle_us && !end->crowded && !slow;
    if (busy && egress->startup && left_us < arrived_us * 8 / 10) {
        egress->capacity = capacity; /* packets arrived slower than they left: the link was the limit */
        set_depth(egress, false);
    } else if (busy && !egress->startup) {
        /* the first measurement replaces the estimate of the start, later ones are averaged */
        if (egress->weight < WEIGHT_MAX)
            egress->weight++;
        if (!full)
            confirm(egress);
        egress->capacity += ((mixed ? slowest : capacity) - egress->capacity) / egress->weight;
    } else if (sure > egress->capacity) {
        /* The link may have been idle at times: its capacity is at least this. Packets that arrived faster than they
         * left prove nothing: a queue elsewhere may have drained. */
        egress->capacity = sure;
        confirm(egress);
    }
}

static void measure(struct cl_egress *egress, struct cl_egress_view *view, const struct cl_egress_sample *sample,
                    bool last, uint64_t now_us)
{
    struct cl_egress_sample *start = &view->start[sample->class];
    int32_t arrived_us = (int32_t)(sample->clock_us - start->clock_us); /* time between the two arrivals */
    int32_t depths = egress->neighbours.active > 0 ? SPAN_DEPTHS_SHARED : SPAN_DEPTHS;
    int32_t least_us = depths * (int32_t)egress->depth_us;
    if (egress->neighbours.active > 0 && least_us > SPAN_MAX_US / 2)
        least_us = SPAN_MAX_US / 2;
    if (view->started >> sample->class & 1 && sample->snapshot.bytes > start->snapshot.bytes && arrived_us >= 0 &&
        arrived_us < SPAN_MAX_US) {
        if (sample->snapshot.bytes - start->snapshot.bytes < (uint64_t)SPAN_PACKETS * egress->datagram_bytes ||
            arrived_us < (egress->startup ? SPAN_STARTUP_US : least_us))
            return;
        measure_between(egress, start, sample, (uint64_t)arrived_us, last, now_us < egress->mixed_until_us);
    }
    *start = *sample;
    start->lost_bytes = egress->lost_bytes;
    view->started = (uint16_t)(view->started | 1u << sample->class);
}

uint32_t cl_egress_on_sample(struct cl_egress *egress, struct cl_egress_view *view,
                             const struct cl_egress_sample *sample, uint64_t now_us)
{
    uint32_t queue_us = sample->crowded ? 0 : sample->queue_us;
    bool overtakes = cl_egress_urgent(egress, sample->class, now_us);
    /* The link is busy as long as each packet leaves before the previous one has drained. */
    if (!sample->overtaken && !overtakes) {
        if (sample->sent_us > egress->busy_until_us + BUSY_SLACK_US)
            egress->idle_us = sample->sent_us;
        egress->busy_until_us = longer(egress->busy_until_us, sample->sent_us + queue_us);
    }
    if (!sample->overtaken)
        measure(egress, view, sample, !overtakes, now_us);
    view->queue_us = view->any && !egress->startup ? (3 * view->queue_us + queue_us) / 4 : queue_us;
    view->any = true;
    if (view->queue_us < egress->epoch_queue_us)
        egress->epoch_queue_us = view->queue_us;
    if (queue_us > egress->epoch_longest_us)
        egress->epoch_longest_us = queue_us;
    if (sample->round_trip_us > egress->round_trip_us)
        egress->round_trip_us = sample->round_trip_us;
    egress->epoch_samples++;
    if (egress->startup || (now_us >= egress->epoch_end_us && egress->epoch_samples >= EPOCH_SAMPLES))
        end_epoch(egress, now_us);
    set_rate(egress, now_us);
    return sample->crowded ? sample->queue_us : queue_us > egress->queue_us ? queue_us - egress->queue_us : 0;
}

void cl_egress_on_settled(struct cl_egress *egress, uint32_t acked, uint32_t lost)
{
    cl_loss_trial_count(&egress->loss_trial, acked, lost);
    cl_batches_count(&egress->batches, acked, lost);
    egress->lost_bytes += (uint64_t)lost * egress->datagram_bytes;
    egress->own_lost_bytes += (uint64_t)lost * egress->datagram_bytes;
}

void cl_egress_overflowed(struct cl_egress *egress, uint64_t now_us)
{
    if (!egress->startup && !egress->loss_trial.trial && is_settled(egress, now_us))
        overflowed(egress, common_depth_us(egress), now_us);
}

uint64_t cl_egress_batch(const struct cl_egress *egress, uint64_t now_us)
{
    if (!sends_batches(egress, now_us))
        return 0;
    uint64_t most = (uint64_t)cl_egress_rate(egress) * BATCH_MOST_US / 1000000, batch = cl_pacer_batch(&egress->pacer);
    return batch < most ? batch : most;
}

uint64_t cl_egress_backlog_us(const struct cl_egress *egress)
{
    double backlog = (double)egress->pacer.burst - (double)egress->pacer.tokens / 1e6;
    return backlog > 0 ? (uint64_t)(backlog * 1e6 / cl_egress_rate(egress)) : 0;
}
