#include "protocol/timers.h"

#include <stdlib.h>

bool cl_timers_reserve(struct cl_timers *timers, uint32_t timer_count)
{
    if (timer_count < timers->capacity)
        return true;
    uint32_t capacity = 2 * timer_count + 8;
    struct cl_timer **heap = realloc(timers->heap, capacity * sizeof(struct cl_timer *));
    if (heap == NULL)
        return false;
    timers->heap = heap;
    timers->capacity = capacity;
    return true;
}

static void put(struct cl_timers *timers, uint32_t slot, struct cl_timer *timer)
{
    timers->heap[slot] = timer;
    timer->slot = slot;
}

static void sift_up(struct cl_timers *timers, struct cl_timer *timer, uint32_t slot)
{
    while (slot > 1 && timers->heap[slot / 2]->deadline_us > timer->deadline_us) {
        put(timers, slot, timers->heap[slot / 2]);
        slot /= 2;
    }
    put(timers, slot, timer);
}

static void sift_down(struct cl_timers *timers, struct cl_timer *timer, uint32_t slot)
{
    for (uint32_t child; (child = 2 * slot) <= timers->count; slot = child) {
        if (child < timers->count && timers->heap[child + 1]->deadline_us < timers->heap[child]->deadline_us)
            child++;
        if (timers->heap[child]->deadline_us >= timer->deadline_us)
            break;
        put(timers, slot, timers->heap[child]);
    }
    put(timers, slot, timer);
}

void cl_timers_arm(struct cl_timers *timers, struct cl_timer *timer, uint64_t deadline_us)
{
    if (deadline_us == UINT64_MAX || (timer->slot && timer->deadline_us <= deadline_us))
        return;
    timer->deadline_us = deadline_us;
    sift_up(timers, timer, timer->slot ? timer->slot : ++timers->count);
}

uint64_t cl_timers_first_us(const struct cl_timers *timers)
{
    return timers->count ? timers->heap[1]->deadline_us : UINT64_MAX;
}

struct cl_timer *cl_timers_pop(struct cl_timers *timers, uint64_t now_us)
{
    if (!timers->count || timers->heap[1]->deadline_us > now_us)
        return NULL;
    struct cl_timer *first = timers->heap[1], *last = timers->heap[timers->count--];
    if (timers->count)
        sift_down(timers, last, 1);
    first->slot = 0;
    return first;
}

void cl_timers_free(struct cl_timers *timers)
{
    free(timers->heap);
    *timers = (struct cl_timers){0};
}
