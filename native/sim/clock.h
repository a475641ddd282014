/*
 * Clock: virtual time and the events to come. An event is part of the thing it happens to. Of two events at the same
 * time the one scheduled first happens first, so a run never depends on addresses.
 */
#ifndef CL_SIM_CLOCK_H
#define CL_SIM_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

struct sim_event {
    void (*fire)(struct sim_event *event);
    uint64_t at_ns; /* while it is scheduled */
    uint32_t slot;  /* in the heap, from 1; 0: not scheduled */
};

struct sim_slot {
    uint64_t at_ns, order;
    struct sim_event *event;
};

struct sim_clock {
    uint64_t now_ns;
    uint64_t order;        /* events scheduled so far */
    uint64_t events;       /* events that happened so far */
    struct sim_slot *heap; /* [1 .. count] */
    uint32_t count, capacity;
};

/* Moves the event if it is scheduled already. Times in the past are now. */
void sim_clock_schedule(struct sim_clock *clock, struct sim_event *event, uint64_t at_ns);
void sim_clock_cancel(struct sim_clock *clock, struct sim_event *event);
/* The time when the next event happens; UINT64_MAX: there is none. */
static inline uint64_t sim_clock_next_ns(const struct sim_clock *clock)
{
    return clock->count > 0 ? clock->heap[1].at_ns : UINT64_MAX;
}
/* Lets the next event happen; false when there is none. */
bool sim_clock_step(struct sim_clock *clock);
void sim_clock_free(struct sim_clock *clock);

#endif
