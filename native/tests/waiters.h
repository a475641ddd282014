/*
 * Threads that wait for messages: each for one, or pairs of them that send messages to each other and back.
 */
#pragma once

#include <unistd.h>

#include "tests/world.h"

enum { HANG_US = 5000000 /* what takes so long would last for ever */ };

struct waiter {
    cl_operation *operation;
    uint64_t timeout_us;
    pthread_t thread;
    int status;
    atomic_bool returned;
};

static inline void *wait_for(void *argument)
{
    struct waiter *waiter = argument;
    waiter->status = cl_operation_wait(waiter->operation, waiter->timeout_us);
    atomic_store(&waiter->returned, true);
    return NULL;
}

static inline void await_return(struct waiter *waiter)
{
    for (uint64_t start_us = cl_now_us(); cl_now_us() - start_us < HANG_US && !atomic_load(&waiter->returned);)
        usleep(1000);
}

enum { THREADS = 4, MESSAGES = 300 };

struct talk {
    struct team *team;
    uint32_t rank, tag;
    pthread_t thread;
    int status;
};

static inline void *echo(void *argument)
{
    struct talk *talk = argument;
    for (uint32_t i = 0; i < MESSAGES && talk->status == CL_OK; i++) {
        uint32_t out = i * 100 + talk->tag, in = 0, length = i % 7 == 0 ? 100000 : 4;
        uint8_t *sent = calloc(1, length), *received = calloc(1, length);
        memcpy(sent, &out, sizeof out);
        cl_operation *receive =
            start_receive(talk->team, talk->rank, 1 - talk->rank, talk->tag, received, length, PATIENCE_US);
        cl_operation *send = start_send(talk->team, talk->rank, 1 - talk->rank, talk->tag, sent, length, PATIENCE_US);
        talk->status = finish(receive);
        memcpy(&in, received, sizeof in);
        if (talk->status == CL_OK)
            CHECK_EQ(in, out);
        int status = finish(send);
        talk->status = talk->status == CL_OK ? status : talk->status;
        free(sent);
        free(received);
    }
    return NULL;
}

static inline void start_echoes(struct team *team, struct talk *talks)
{
    for (uint32_t i = 0; i < 2 * THREADS; i++) {
        talks[i] = (struct talk){.team = team, .rank = i % 2, .tag = i / 2};
        pthread_create(&talks[i].thread, NULL, echo, &talks[i]);
    }
}

static inline void check_echoes(struct team *team)
{
    struct talk talks[2 * THREADS];
    start_echoes(team, talks);
    for (uint32_t i = 0; i < 2 * THREADS; i++) {
        pthread_join(talks[i].thread, NULL);
        CHECK_EQ(talks[i].status, CL_OK);
    }
}
