#include "engine/events.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

enum { EVENTS_INITIAL = 256 };

void cl_events_init(struct cl_events *events)
{
    *events = (struct cl_events){0};
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&events->guard, NULL);
    pthread_cond_init(&events->ready, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void cl_events_free(struct cl_events *events)
{
    free(events->ring);
    pthread_mutex_destroy(&events->guard);
    pthread_cond_destroy(&events->ready);
}

void cl_events_push(struct cl_events *events, uint64_t token, int status)
{
    pthread_mutex_lock(&events->guard);
    if (events->count == events->capacity) {
        size_t capacity = events->capacity == 0 ? EVENTS_INITIAL : 2 * events->capacity;
        struct cl_event *ring = malloc(capacity * sizeof *ring);
        for (size_t i = 0; ring != NULL && i < events->count; i++)
            ring[i] = events->ring[(events->head + i) % events->capacity];
        if (ring != NULL) {
            free(events->ring);
            events->ring = ring;
            events->capacity = capacity;
            events->head = 0;
        }
    }
    if (events->count <
        events->capacity) /* else there was no memory for 24 bytes: the waiter's timeout reports the loss */
        events->ring[(events->head + events->count++) % events->capacity] = (struct cl_event){token, status};
    pthread_cond_signal(&events->ready);
    pthread_mutex_unlock(&events->guard);
}

int cl_events_take(struct cl_events *events, struct cl_event *out, uint32_t capacity, uint64_t timeout_us)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(timeout_us / 1000000);
    until.tv_nsec += (long)(timeout_us % 1000000) * 1000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    uint32_t count = 0;
    pthread_mutex_lock(&events->guard);
    while (events->count == 0 && !events->stopped)
        if (pthread_cond_timedwait(&events->ready, &events->guard, &until) == ETIMEDOUT)
            break;
    while (count < capacity && events->count > 0) {
        out[count++] = events->ring[events->head];
        events->head = (events->head + 1) % events->capacity;
        events->count--;
    }
    bool stopped = events->stopped && count == 0;
    pthread_mutex_unlock(&events->guard);
    return stopped ? CL_ECLOSED : (int)count;
}

void cl_events_stop(struct cl_events *events)
{
    pthread_mutex_lock(&events->guard);
    events->stopped = true;
    pthread_cond_broadcast(&events->ready);
    pthread_mutex_unlock(&events->guard);
}
