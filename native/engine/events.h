/*
 * Events: a queue of ended operations, for callers that asked to be told. Python's completion thread takes them.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "commlayer.h"

struct cl_events {
    pthread_mutex_t guard;
    pthread_cond_t ready;
    bool stopped;
    struct cl_event *ring;
    size_t head, count, capacity;
};

void cl_events_init(struct cl_events *events);
void cl_events_free(struct cl_events *events);
void cl_events_push(struct cl_events *events, uint64_t token, int status);
/* Waits for events and takes up to `capacity` of them. Returns their number (0: the time is over), or CL_ECLOSED once
 * the queue is stopped and empty. */
int cl_events_take(struct cl_events *events, struct cl_event *out, uint32_t capacity, uint64_t timeout_us);
/* Ends all waits, now and later. */
void cl_events_stop(struct cl_events *events);
