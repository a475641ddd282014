/*
 * Job: one collective on all hosts of a fabric: the production plan of every rank, run over a transport. Only messages
 * take time; steps within a host take none.
 *
 * The time of a message runs from the posting of its send to the completion of its receive.
 */
#pragma once

#include "fabric/transport.h"
#include "plan/plan.h"
#include "sim/clock.h"
#include "sim/plans.h"

struct sim_job_step {
    struct sim_job_rank *rank;
    uint32_t pending; /* steps to wait for */
};

struct sim_job_rank {
    struct sim_event call; /* its first member: events are cast to ranks */
    struct sim_job *job;
    uint16_t id;
    const struct cl_plan *plan;
    struct sim_job_step *steps;
    uint32_t remaining;
    uint64_t called_ns, ended_ns;
};

struct sim_job {
    struct sim_clock *clock;
    struct sim_transport *transport;
    uint32_t number, world;
    uint8_t priority;
    double loss_bound; /* of partial messages */
    struct sim_job_rank *ranks;
    uint32_t unfinished; /* ranks */
    uint64_t *posted_ns; /* by message: when its send was posted */
    uint64_t *times_ns;  /* by message: its time */
    uint32_t *first;     /* by from * world + to: its first message in these arrays */
    uint64_t message_count, bytes, missing;
};

/* number: unique on the transport, never UINT32_MAX. */
void sim_job_init(struct sim_job *job, struct sim_clock *clock, struct sim_transport *transport, uint32_t number,
                  struct sim_plans *plans, uint32_t shape, uint8_t priority, double loss_bound);
void sim_job_free(struct sim_job *job);
/* The rank calls the collective at that time. */
void sim_job_call(struct sim_job *job, uint32_t rank, uint64_t at_ns);
/* The function of sim_transport.done; the context is a struct sim_job_step. */
void sim_job_done(void *context, uint64_t missing);
