#include "congestion/neighbours.h"

#include <math.h>

enum {
    LAST = CL_CLASSES_BETWEEN_HOSTS - 1, /* whose bytes are those of all classes */
    IDLE_US = 20000,                     /* a process that has not sent for so long needs no share now, */
    RECENT_US = 1000000,                 /* and one that has not for so long no room for its next burst */
    BEGIN_BYTES = 6000,                  /* more than some acknowledgements, since the last judgement */
};

static const double WEIGHT = 0.5; /* of the newest rate */
static const double USES = 0.75;  /* of its share: a process that sends less leaves the rest to others */
static const double SMALL = 0.1;  /* of a share: a process that sends less does not count */

void cl_neighbours_init(struct cl_neighbours *neighbours)
{
    *neighbours = (struct cl_neighbours){.depth_us = UINT32_MAX, .idle_us = IDLE_US};
}

static bool has_used(const struct cl_neighbour_state *neighbour, uint64_t lately_us, uint64_t now_us)
{
    return neighbour->used_us != 0 && now_us < neighbour->used_us + lately_us;
}

static void count(struct cl_neighbours *neighbours, uint64_t now_us)
{
    neighbours->active = neighbours->recent = 0;
    neighbours->depth_us = UINT32_MAX;
    for (uint32_t i = 0; i < neighbours->count; i++) {
        const struct cl_neighbour_state *neighbour = &neighbours->list[i];
        neighbours->active += has_used(neighbour, neighbours->idle_us, now_us);
        if (!has_used(neighbour, RECENT_US, now_us))
            continue;
        neighbours->recent++;
        if (neighbour->told.depth_us != 0 && neighbour->told.depth_us < neighbours->depth_us)
            neighbours->depth_us = neighbour->told.depth_us;
    }
}

void cl_neighbours_hear(struct cl_neighbours *neighbours, uint32_t neighbour, const struct cl_told *told,
                        struct cl_told *news, uint64_t now_us)
{
    *news = (struct cl_told){0};
    if (neighbour >= CL_NEIGHBOURS_MAX)
        return;
    struct cl_neighbour_state *known = &neighbours->list[neighbour];
    bool same = known->told_us != 0 && now_us < known->told_us + neighbours->idle_us && told->lost >= known->told.lost;
    for (int i = 0; i <= LAST; i++)
        same = same && told->bytes[i] >= known->told.bytes[i];
    for (int i = 0; same && i <= LAST; i++)
        news->bytes[i] = told->bytes[i] - known->told.bytes[i];
    if (same)
        news->lost = told->lost - known->told.lost;
    else
        known->judged = told->bytes[LAST];
    if (neighbour >= neighbours->count)
        neighbours->count = neighbour + 1;
    known->told = *told;
    known->told_us = now_us;
    /* one that sends no more than it did is none that begins */
    double usual = 2 * known->rate * (double)(now_us - neighbours->judged_us) / 1e6;
    double begun = (double)(told->bytes[LAST] - known->judged);
    if (has_used(known, neighbours->idle_us, now_us) || begun < BEGIN_BYTES + usual)
        return;
    known->used_us = now_us;
    known->begins = neighbours->changed = true;
    neighbours->unused = 0; /* until it is known what it takes */
    count(neighbours, now_us);
}

bool cl_neighbours_judge(struct cl_neighbours *neighbours, double capacity, uint64_t every_us, uint64_t now_us)
{
    bool changed = neighbours->changed;
    neighbours->changed = false;
    if (neighbours->count == 0 || now_us < neighbours->judged_us + every_us)
        return changed;
    double passed_us = (double)(now_us - neighbours->judged_us), least = SMALL * capacity / (neighbours->active + 1);
    neighbours->idle_us = 2 * every_us > IDLE_US ? 2 * every_us : IDLE_US; /* a slow link has long judgements */
    for (uint32_t i = 0; i < neighbours->count; i++) {
        struct cl_neighbour_state *neighbour = &neighbours->list[i];
        double rate = (double)(neighbour->told.bytes[LAST] - neighbour->judged) * 1e6 / passed_us;
        bool goes_on = has_used(neighbour, neighbours->idle_us, now_us) && !neighbour->begins;
        neighbour->rate += (goes_on ? WEIGHT : 1) * (rate - neighbour->rate);
        neighbour->judged = neighbour->told.bytes[LAST];
        if (rate > least)
            neighbour->used_us = now_us;
    }
    count(neighbours, now_us);
    double equal = capacity / (neighbours->active + 1), unused = 0;
    uint32_t users = 1;
    neighbours->small = 0;
    for (uint32_t i = 0; i < neighbours->count; i++) {
        struct cl_neighbour_state *neighbour = &neighbours->list[i];
        if (!has_used(neighbour, neighbours->idle_us, now_us))
            neighbours->small += neighbour->rate;
        else if (!neighbour->begins && neighbour->rate < USES * equal)
            unused += equal - neighbour->rate;
        else
            users++;
        if (neighbour->begins) /* what it sent is of a part of the time */
            neighbour->rate = fmax(neighbour->rate, equal);
        neighbour->begins = false;
    }
    neighbours->unused = unused / users;
    neighbours->judged_us = now_us;
    return true;
}

double cl_neighbours_leave(const struct cl_neighbours *neighbours, double capacity)
{
    double equal = (capacity - neighbours->small) / (neighbours->active + 1);
    return fmin(fmax(equal + neighbours->unused, capacity / (2 * (neighbours->active + 1.0))), capacity);
}

double cl_neighbours_spare(const struct cl_neighbours *neighbours)
{
    return 1.0 / (neighbours->recent + 1);
}
