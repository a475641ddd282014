#include "sim/clock.h"

#include "sim/memory.h"

static bool earlier(const struct sim_slot *a, const struct sim_slot *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void put(struct sim_clock *clock, uint32_t slot, struct sim_slot entry)
{
    clock->heap[slot] = entry;
    entry.event->slot = slot;
}

static void sift_up(struct sim_clock *clock, uint32_t slot, struct sim_slot entry)
{
    for (; slot > 1 && earlier(&entry, &clock->heap[slot / 2]); slot /= 2)
        put(clock, slot, clock->heap[slot / 2]);
    put(clock, slot, entry);
}

static void sift_down(struct sim_clock *clock, uint32_t slot, struct sim_slot entry)
{
    for (uint32_t child; (child = 2 * slot) <= clock->count; slot = child) {
        if (child < clock->count && earlier(&clock->heap[child + 1], &clock->heap[child]))
            child++;
        if (!earlier(&clock->heap[child], &entry))
            break;
        put(clock, slot, clock->heap[child]);
    }
    put(clock, slot, entry);
}

void sim_clock_cancel(struct sim_clock *clock, struct sim_event *event)
{
    uint32_t slot = event->slot;
    if (slot == 0)
        return;
    event->slot = 0;
    struct sim_slot last = clock->heap[clock->count--];
    if (last.event == event)
        return;
    if (slot > 1 && earlier(&last, &clock->heap[slot / 2]))
        sift_up(clock, slot, last);
    else
        sift_down(clock, slot, last);
}

void sim_clock_schedule(struct sim_clock *clock, struct sim_event *event, uint64_t at_ns)
{
    sim_clock_cancel(clock, event);
    if (clock->count + 1 >= clock->capacity) {
        clock->capacity = clock->capacity ? 2 * clock->capacity : 256;
        clock->heap = sim_resize(clock->heap, clock->capacity, sizeof *clock->heap);
    }
    event->at_ns = at_ns < clock->now_ns ? clock->now_ns : at_ns;
    sift_up(clock, ++clock->count, (struct sim_slot){event->at_ns, clock->order++, event});
}

bool sim_clock_step(struct sim_clock *clock)
{
    if (clock->count == 0)
        return false;
    struct sim_event *event = clock->heap[1].event;
    clock->now_ns = event->at_ns;
    clock->events++;
    sim_clock_cancel(clock, event);
    event->fire(event);
    return true;
}

void sim_clock_free(struct sim_clock *clock)
{
    free(clock->heap);
    *clock = (struct sim_clock){0};
}
