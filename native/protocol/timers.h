/*
 * Timers: a binary heap of deadlines. A timer may go off early: its owner then checks what is due and arms it again. So
 * postponing a deadline, which happens with every packet, costs nothing.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct cl_timer {
    uint64_t deadline_us;
    uint32_t slot; /* its place in the heap, from 1; 0: not armed */
    void *owner;
};

struct cl_timers {
    struct cl_timer **heap; /* [1 .. count] */
    uint32_t count, capacity;
};

/* Makes room for one more timer, so that arming cannot fail. False when there is no memory. */
bool cl_timers_reserve(struct cl_timers *timers, uint32_t timer_count);
/* No effect when the timer already goes off earlier. UINT64_MAX: never. */
void cl_timers_arm(struct cl_timers *timers, struct cl_timer *timer, uint64_t deadline_us);
/* UINT64_MAX when none is armed. */
uint64_t cl_timers_first_us(const struct cl_timers *timers);
/* Disarms and returns the first timer if it is due. */
struct cl_timer *cl_timers_pop(struct cl_timers *timers, uint64_t now_us);
void cl_timers_free(struct cl_timers *timers);
