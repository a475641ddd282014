/*
 * Turn: what the engine does each time it wakes, in this order:
 *   1. operations that callers have handed over go to their groups,
 *   2. packets in,
 *   3. deaths of processes, after the last packets of the dead,
 *   4. timers that are due, and the ends of messages,
 *   5. groups forward,
 *   6. packets out,
 *   7. news: callers learn which operations have ended, after the packets have left,
 *   8. bells, for whatever waits in the host's memory.
 *
 * The engine supplies sockets, processes and a clock behind its functions, the simulator virtual ones.
 */
#pragma once

#include "group/groups.h"
#include "group/news.h"

struct cl_turn_io {
    uint64_t (*now_us)(void *context);
    /* Has cl_groups_take_all take what callers have handed over. */
    void (*take)(void *context);
    /* Hands the packets that have come to the endpoint. */
    void (*receive)(void *context);
    /* Reports the processes that have died: to the endpoint, and to the groups by cl_groups_peer_died. */
    void (*report_deaths)(void *context);
    /* Sends what the endpoint has to send; returns whether there is more to send at once. */
    bool (*send)(void *context);
    /* The members below watch; they may be NULL. */
    void (*expired)(void *context); /* timers were due */
    void (*completed)(void *context, const struct cl_completion *completion);
    void (*aborted)(void *context, const struct cl_closed_group *aborted);
};

struct cl_turn {
    const struct cl_turn_io *io;
    void *context;
    struct cl_endpoint *endpoint; /* NULL: shared memory only */
    struct cl_groups *groups;
    struct cl_news *news;
};

/* Takes a turn. Returns when the next one is due; 0: at once; UINT64_MAX: never. */
uint64_t cl_turn_take(const struct cl_turn *turn);
