#include "congestion/neighbours.h"

#include <math.h>

enum {
    IDLE_US = 20000,     /* a process that has not sent for so long needs no share now, */
    RECENT_US = 1000000, /* and one that has not for so long no room for its next burst */
};

static const double WEIGHT = 0.5; /* of the newest rate */
static const double USES = 0.75;  /* of its share: a process that sends less leaves the rest to others */

static bool has_sent(const struct cl_neighbour_state *neighbour, uint64_t lately_us, uint64_t now_us)
{
    return neighbour->sent_us != 0 && now_us < neighbour->sent_us + lately_us;
}

static void count(struct cl_neighbours *neighbours, uint64_t now_us)
{
    neighbours->active = neighbours->recent = 0;
    neighbours->depth_us = UINT32_MAX;
    for (uint32_t i = 0; i < neighbours->count; i++) {
        const struct cl_neighbour_state *neighbour = &neighbours->list[i];
        neighbours->active += has_sent(neighbour, IDLE_US, now_us);
        if (!has_sent(neighbour, RECENT_US, now_us))
            continue;
        neighbours->recent++;
        if (neighbour->told.depth_us != 0 && neighbour->told.depth_us < neighbours->depth_us)
            neighbours->depth_us = neighbour->told.depth_us;
    }
}

/* How much all send is measured from now on. */
static void begin(struct cl_neighbours *neighbours, uint64_t now_us)
{
    count(neighbours, now_us);
    for (uint32_t i = 0; i < neighbours->count; i++)
        neighbours->list[i].judged = neighbours->list[i].told.bytes;
    neighbours->begins = true;
    neighbours->unused = 0;
    neighbours->judged_us = now_us;
}

void cl_neighbours_init(struct cl_neighbours *neighbours)
{
    *neighbours = (struct cl_neighbours){.depth_us = UINT32_MAX};
}

struct cl_heard cl_neighbours_hear(struct cl_neighbours *neighbours, uint32_t neighbour, const struct cl_told *told,
                                   uint64_t now_us)
{
    struct cl_heard heard = {0};
    if (neighbour >= CL_NEIGHBOURS_MAX)
        return heard;
    struct cl_neighbour_state *known = &neighbours->list[neighbour];
    bool same = neighbour < neighbours->count && told->bytes >= known->told.bytes && told->lost >= known->told.lost;
    if (same)
        heard = (struct cl_heard){told->bytes - known->told.bytes, told->lost - known->told.lost};
    if (neighbour >= neighbours->count)
        neighbours->count = neighbour + 1;
    known->told = *told;
    if (!same)
        known->judged = told->bytes;
    if (heard.sent == 0)
        return heard;
    bool begins = !has_sent(known, IDLE_US, now_us);
    known->sent_us = now_us;
    if (begins)
        begin(neighbours, now_us);
    return heard;
}

void cl_neighbours_judge(struct cl_neighbours *neighbours, double capacity, uint64_t every_us, uint64_t now_us)
{
    if (neighbours->count == 0 || now_us < neighbours->judged_us + every_us)
        return;
    count(neighbours, now_us);
    double passed_us = (double)(now_us - neighbours->judged_us), equal = capacity / (neighbours->active + 1);
    double unused = 0;
    uint32_t users = 1;
    for (uint32_t i = 0; i < neighbours->count; i++) {
        struct cl_neighbour_state *neighbour = &neighbours->list[i];
        double rate = (double)(neighbour->told.bytes - neighbour->judged) * 1e6 / passed_us;
        neighbour->rate += (neighbours->begins ? 1 : WEIGHT) * (rate - neighbour->rate);
        neighbour->judged = neighbour->told.bytes;
        if (!has_sent(neighbour, IDLE_US, now_us))
            continue;
        if (neighbour->rate < USES * equal)
            unused += equal - neighbour->rate;
        else
            users++;
    }
    neighbours->unused = unused / users;
    neighbours->begins = false;
    neighbours->judged_us = now_us;
}

double cl_neighbours_leave(const struct cl_neighbours *neighbours, double capacity)
{
    return fmin(capacity / (neighbours->active + 1) + neighbours->unused, capacity);
}

double cl_neighbours_spare(const struct cl_neighbours *neighbours)
{
    return 1.0 / (neighbours->recent + 1);
}
