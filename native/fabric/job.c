#include "fabric/job.h"

#include "sim/memory.h"

static bool is_receive(const struct cl_step *step)
{
    return step->kind == CL_RECV_COPY || step->kind == CL_RECV_REDUCE;
}

static uint64_t *place(const struct sim_job *job, uint64_t *times, uint32_t from, uint32_t to, uint32_t message)
{
    return &times[job->first[from * job->world + to] + message];
}

static void post(struct sim_job_rank *rank, uint32_t index);

static void finish(struct sim_job_rank *rank, uint32_t index)
{
    struct sim_job *job = rank->job;
    const struct cl_step *step = &rank->plan->steps[index];
    if (--rank->remaining == 0) {
        rank->ended_ns = job->clock->now_ns;
        job->unfinished--;
    }
    for (uint32_t i = 0; i < step->successor_count; i++) {
        uint32_t next = rank->plan->successors[step->successor_first + i];
        if (--rank->steps[next].pending == 0)
            post(rank, next);
    }
}

static void post(struct sim_job_rank *rank, uint32_t index)
{
    struct sim_job *job = rank->job;
    const struct cl_step *step = &rank->plan->steps[index];
    if (step->kind != CL_SEND && !is_receive(step)) {
        finish(rank, index);
        return;
    }
    bool sends = step->kind == CL_SEND;
    struct sim_message message = {.from = (uint16_t)(sends ? rank->id : step->peer),
                                  .to = (uint16_t)(sends ? step->peer : rank->id),
                                  .priority = job->priority,
                                  .job = job->number,
                                  .index = step->message,
                                  .length = (uint32_t)step->length,
                                  .loss_bound = step->flags & CL_STEP_PARTIAL ? job->loss_bound : 0};
    if (sends) {
        *place(job, job->posted_ns, message.from, message.to, message.index) = job->clock->now_ns;
        job->transport->send(job->transport, &message, &rank->steps[index]);
    } else {
        job->transport->receive(job->transport, &message, &rank->steps[index]);
    }
}

void sim_job_done(void *context, uint64_t missing)
{
    struct sim_job_step *done = context;
    struct sim_job_rank *rank = done->rank;
    struct sim_job *job = rank->job;
    uint32_t index = (uint32_t)(done - rank->steps);
    const struct cl_step *step = &rank->plan->steps[index];
    if (is_receive(step)) {
        uint64_t posted_ns = *place(job, job->posted_ns, step->peer, rank->id, step->message);
        *place(job, job->times_ns, step->peer, rank->id, step->message) = job->clock->now_ns - posted_ns;
        job->missing += missing;
    }
    finish(rank, index);
}

static void call(struct sim_event *event)
{
    struct sim_job_rank *rank = (struct sim_job_rank *)(void *)event; /* its first member */
    rank->called_ns = rank->job->clock->now_ns;
    for (uint32_t i = 0; i < rank->plan->root_count; i++)
        post(rank, rank->plan->roots[i]);
}

void sim_job_call(struct sim_job *job, uint32_t rank, uint64_t at_ns)
{
    sim_clock_schedule(job->clock, &job->ranks[rank].call, at_ns);
}

static void count_messages(struct sim_job *job)
{
    job->first = sim_new((size_t)job->world * job->world + 1, sizeof *job->first);
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct cl_plan *plan = job->ranks[rank].plan;
        for (uint32_t i = 0; i < plan->step_count; i++) {
            if (plan->steps[i].kind != CL_SEND)
                continue;
            job->first[rank * job->world + plan->steps[i].peer + 1]++;
            job->message_count++;
            job->bytes += plan->steps[i].length;
        }
    }
    for (uint32_t i = 0; i < job->world * job->world; i++)
        job->first[i + 1] += job->first[i];
    job->posted_ns = sim_new(job->message_count, sizeof *job->posted_ns);
    job->times_ns = sim_new(job->message_count, sizeof *job->times_ns);
}

void sim_job_init(struct sim_job *job, struct sim_clock *clock, struct sim_transport *transport, uint32_t number,
                  struct sim_plans *plans, uint32_t shape, uint8_t priority, double loss_bound)
{
    uint32_t world = plans->shapes[shape].world;
    *job = (struct sim_job){.clock = clock,
                            .transport = transport,
                            .number = number,
                            .world = world,
                            .priority = priority,
                            .loss_bound = loss_bound,
                            .unfinished = world};
    job->ranks = sim_new(world, sizeof *job->ranks);
    for (uint32_t i = 0; i < world; i++) {
        struct sim_job_rank *rank = &job->ranks[i];
        *rank = (struct sim_job_rank){.call = {.fire = call}, .job = job, .id = (uint16_t)i};
        rank->plan = sim_plans_load(plans, shape, i);
        if (rank->plan == NULL) {
            fprintf(stderr, "simulator: cl_plan_create refuses the plan of rank %u\n", i);
            exit(2);
        }
        rank->steps = sim_new(rank->plan->step_count, sizeof *rank->steps);
        rank->remaining = rank->plan->step_count;
        for (uint32_t step = 0; step < rank->plan->step_count; step++)
            rank->steps[step] = (struct sim_job_step){rank, rank->plan->steps[step].dependencies};
    }
    count_messages(job);
}

void sim_job_free(struct sim_job *job)
{
    for (uint32_t i = 0; i < job->world; i++) {
        sim_clock_cancel(job->clock, &job->ranks[i].call);
        free(job->ranks[i].steps);
    }
    free(job->ranks);
    free(job->first);
    free(job->posted_ns);
    free(job->times_ns);
}
