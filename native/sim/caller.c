#include "sim/caller.h"

#include <string.h>

#include "group/p2p.h"
#include "sim/data.h"
#include "sim/element.h"
#include "sim/membership.h"
#include "sim/memory.h"
#include "sim/scarcity.h"
#include "sim/world.h"

/* The rank's fault of this kind in a call; NULL: none. */
static const struct sim_fault *fault_of(const struct sim_rank *rank, enum sim_fault_kind kind, uint32_t call)
{
    const struct sim_scenario *scenario = rank->world->scenario;
    for (uint32_t i = 0; i < scenario->fault_count && !rank->world->calm; i++) {
        const struct sim_fault *fault = &scenario->faults[i];
        if (fault->kind == kind && fault->a == rank->id && fault->b == call)
            return fault;
    }
    return NULL;
}

static uint64_t due_ns(const struct sim_rank *rank, uint32_t call)
{
    const struct sim_scenario *scenario = rank->world->scenario;
    const struct sim_fault *late = fault_of(rank, SIM_FAULT_LATE, call);
    uint64_t skew_ns = sim_mix(scenario->seed ^ ((uint64_t)rank->id << 32 | call)) % (scenario->skew_ns + 1);
    return scenario->calls[call].at_ns + skew_ns + (late != NULL ? late->for_ns : 0);
}

/* The class in which the call travels: half of those of the last class yield. */
static uint8_t class_of(const struct sim_world *world, uint32_t call, uint8_t class)
{
    bool yields = class == CL_CLASSES - 1 && sim_mix(world->scenario->seed ^ sim_mix(call)) % 2 == 0;
    return yields ? CL_CLASS_YIELDS : class;
}

/* Makes and fills the buffers of its part. */
static void prepare_collective(struct sim_world *world, struct sim_operation *operation)
{
    const struct sim_shape *shape = &world->plans->shapes[operation->shape];
    uint32_t self = operation->member->group.rank;
    operation->input_bytes = shape->input_bytes;
    operation->output_bytes = shape->output_bytes;
    operation->input = sim_new(shape->input_bytes, 1);
    operation->output = shape->in_place ? operation->input : sim_new(shape->output_bytes, 1);
    if (!shape->in_place)
        memset(operation->output, 0x5A, shape->output_bytes);
    sim_data_fill(world, operation->call, self, operation->input, shape->input_bytes);
}

/* How many messages of this tag went from the same sender to the same receiver before this call. */
static uint32_t number_of_send(const struct sim_world *world, uint32_t number)
{
    const struct sim_call *calls = world->scenario->calls, *call = &calls[number];
    uint32_t before = 0;
    for (uint32_t i = 0; i < number; i++)
        before += calls[i].kind == SIM_CALL_MESSAGE && calls[i].group == call->group && calls[i].from == call->from &&
                  calls[i].to == call->to && calls[i].tag == call->tag;
    return before;
}

static void prepare_message(struct sim_world *world, struct sim_operation *operation, uint32_t length)
{
    const struct sim_call *call = &world->scenario->calls[operation->call];
    bool sends = operation->member->group.rank == call->from;
    operation->input_bytes = sends ? length : 0;
    operation->output_bytes = sends ? 0 : length;
    operation->input = sim_new(operation->input_bytes, 1);
    operation->output = sim_new(operation->output_bytes, 1);
    uint32_t number = number_of_send(world, operation->call);
    for (uint32_t i = 0; i < operation->input_bytes; i++)
        operation->input[i] = sim_data_byte(world, call, call->from, number, i);
    memset(operation->output, 0x5A, operation->output_bytes);
}

static int request_collective(struct sim_rank *rank, struct sim_operation *operation, const struct sim_fault *mismatch)
{
    struct sim_world *world = rank->world;
    const struct sim_call *call = &world->scenario->calls[operation->call];
    struct cl_group *group = &operation->member->group;
    operation->shape = mismatch != NULL ? (uint32_t)mismatch->amount : call->shape;
    const struct sim_shape *shape = &world->plans->shapes[operation->shape];
    struct cl_qos qos = call->qos;
    qos.priority = class_of(world, operation->call, mismatch != NULL ? (uint8_t)mismatch->path : qos.priority);
    sim_trace_say(&world->trace, "rank %u: calls %u: %s of %llu x %s, group %u, operation %u, priority %u%s", rank->id,
                  operation->call, shape->collective, (unsigned long long)shape->numel, sim_element_name(call->dtype),
                  call->group + 1, group->sequence, qos.priority, mismatch != NULL ? ", unlike the others" : "");
    prepare_collective(world, operation);
    struct cl_operation_request request = {
        .plan = sim_plans_load(world->plans, operation->shape, group->rank),
        .input = operation->input,
        .output = operation->output,
        .dtype = shape->encoded ? CL_F32 : (int32_t)call->dtype,
        .op = shape->encoded ? CL_SUM : (int32_t)call->op,
        .qos = qos,
        .timeout_us = world->scenario->timeout_us,
        .codec_key = sim_mix(world->scenario->seed + operation->call),
    };
    sim_scarcity_set(&world->scarcity, rank->scarce);
    int status = cl_group_request(group, &operation->operation, &request, sim_driver_now_us(&rank->driver));
    sim_scarcity_set(NULL, 0);
    return status;
}

static int request_message(struct sim_rank *rank, struct sim_operation *operation, const struct sim_fault *mismatch)
{
    struct sim_world *world = rank->world;
    const struct sim_call *call = &world->scenario->calls[operation->call];
    struct cl_group *group = &operation->member->group;
    bool sends = call->from == group->rank;
    uint32_t length = mismatch != NULL ? (uint32_t)mismatch->amount : call->length;
    sim_trace_say(&world->trace, "rank %u: calls %u: %s %u bytes, group %u, from %u to %u, tag %u%s", rank->id,
                  operation->call, sends ? "sends" : "receives", length, call->group + 1, call->from, call->to,
                  call->tag, mismatch != NULL ? ", unlike the other" : "");
    prepare_message(world, operation, length);
    struct cl_message_request request = {.rank = sends              ? call->to
                                                 : call->any_source ? CL_ANY_SOURCE
                                                                    : call->from,
                                         .tag = call->tag,
                                         .memory = sends ? operation->input : operation->output,
                                         .length = length,
                                         .priority = class_of(world, operation->call, call->qos.priority),
                                         .timeout_us = world->scenario->timeout_us};
    sim_scarcity_set(&world->scarcity, rank->scarce);
    int status =
        cl_group_request_message(group, &operation->operation, sends ? CL_OPERATION_SEND : CL_OPERATION_RECEIVE,
                                 &request, sim_driver_now_us(&rank->driver));
    sim_scarcity_set(NULL, 0);
    return status;
}

/* The call never came to be, or its group is closed. */
static void refuse(struct sim_rank *rank, struct sim_operation *operation, int status)
{
    struct sim_world *world = rank->world;
    sim_trace_say(&world->trace, "rank %u: call %u is refused: %s", rank->id, operation->call, cl_error_text(status));
    operation->operation = (struct cl_operation){0};
    operation->state = SIM_ENDED;
    operation->status = status;
    operation->called_ns = operation->ended_ns = sim_world_now_ns(world);
    world->checks->ended(world, operation);
}

/* The caller learns of the end. */
static void hear(struct sim_operation *operation)
{
    struct sim_rank *rank = operation->member->rank;
    struct sim_world *world = rank->world;
    operation->state = SIM_ENDED;
    operation->ended_ns = sim_world_now_ns(world);
    sim_trace_say(&world->trace, "rank %u: call %u ended: %s%s", rank->id, operation->call,
                  cl_error_text(operation->status), operation->operation.early ? ", early" : "");
    world->checks->ended(world, operation);
    while (rank->first_open < rank->next_call &&
           (rank->operations[rank->first_open].member == NULL || rank->operations[rank->first_open].state == SIM_ENDED))
        rank->first_open++;
}

/* The group has ended it. */
static void leave(struct sim_operation *operation)
{
    struct sim_rank *rank = operation->member->rank;
    operation->member->in_flight--;
    if (operation->early)
        cl_eager_release(&operation->member->eager, cl_operation_copied_bytes(&operation->operation));
    if (!operation->operation.early)
        hear(operation);
    sim_membership_tidy(rank, rank->world->scenario->calls[operation->call].group);
}

static void tell(struct cl_news_item *news)
{
    struct sim_operation *operation = (void *)((char *)news - offsetof(struct sim_operation, news));
    operation->member->rank->in_flight -= !operation->early;
    leave(operation);
}

static void tell_early(struct cl_news_item *news)
{
    struct sim_operation *operation = (void *)((char *)news - offsetof(struct sim_operation, news));
    operation->member->rank->in_flight--;
    operation->trails = true;
    operation->member->rank->world->unfinished++;
    hear(operation);
}

static void tell_last(struct cl_news_item *news)
{
    struct sim_operation *operation = (void *)((char *)news - offsetof(struct sim_operation, last));
    operation->trails = false;
    operation->member->rank->world->unfinished--;
    leave(operation);
}

static bool end_early(void *context, struct cl_operation *of_group)
{
    struct sim_member *member = context;
    struct sim_operation *operation = (struct sim_operation *)of_group; /* its first member */
    if (!cl_eager_reserve(&member->eager, cl_operation_copied_bytes(of_group)))
        return false;
    if (!cl_operation_give_back(of_group)) {
        cl_eager_release(&member->eager, cl_operation_copied_bytes(of_group));
        return false;
    }
    operation->early = true;
    operation->status = CL_OK;
    operation->news.tell = tell_early;
    cl_news_add(&member->rank->news, &operation->news);
    return true;
}

static void note_end(void *context, struct cl_operation *of_group, int status)
{
    const struct sim_member *member = context;
    struct sim_operation *operation = (struct sim_operation *)of_group; /* its first member */
    if (of_group->early) {
        operation->last.tell = tell_last;
        cl_news_add(&member->rank->news, &operation->last);
        return;
    }
    operation->status = status;
    operation->news.tell = tell;
    cl_news_add(&member->rank->news, &operation->news);
}

/* Whether the caller goes on at once, as after an eager send. What it has sent stays as it is, as the copy does. */
static bool ends_early(struct sim_operation *operation)
{
    struct cl_operation *send = &operation->operation;
    return send->kind == CL_OPERATION_SEND && !cl_p2p_may_be_local(send) &&
           atomic_load(&operation->member->group.status) == CL_OK &&
           cl_eager_reserve_message(&operation->member->eager, cl_operation_copied_bytes(send));
}

static void submit(struct sim_rank *rank, struct sim_operation *operation)
{
    struct sim_world *world = rank->world;
    const struct sim_fault *mismatch = fault_of(rank, SIM_FAULT_MISMATCH, operation->call);
    struct cl_group *group = &operation->member->group;
    operation->called_ns = sim_world_now_ns(world);
    bool message = world->scenario->calls[operation->call].kind == SIM_CALL_MESSAGE;
    int status = message ? request_message(rank, operation, mismatch) : request_collective(rank, operation, mismatch);
    if (status != CL_OK) {
        if (status != CL_ENOMEM)
            sim_world_fail(world, "call %u of rank %u is refused", operation->call, rank->id);
        refuse(rank, operation, status);
        cl_group_fail(group, CL_EABORTED, group->rank); /* as callers do that cannot go on */
        return;
    }
    operation->state = SIM_IN_FLIGHT;
    operation->member->in_flight++;
    operation->early = ends_early(operation);
    rank->in_flight += !operation->early;
    cl_group_order(group, &operation->operation);
    cl_group_queue(group, &operation->operation);
    cl_operation_list_append(&rank->handed_over, &operation->operation);
    sim_rank_wake(rank);
}

/* Whether a sender still waits for what it passes on. */
static bool must_wait(const struct sim_rank *rank, const struct sim_operation *operation)
{
    const struct sim_call *call = &rank->world->scenario->calls[operation->call];
    return call->kind == SIM_CALL_MESSAGE && call->from == operation->member->self && call->after != UINT32_MAX &&
           rank->operations[call->after].state != SIM_ENDED;
}

/* Whether the rank goes on after its next call; else it makes it later. */
static bool make_call(struct sim_rank *rank, struct sim_operation *operation)
{
    struct sim_world *world = rank->world;
    const struct sim_scenario *scenario = world->scenario;
    uint32_t group = scenario->calls[rank->next_call].group;
    struct sim_member *member = &rank->members[group];
    uint64_t at_ns = world->start_ns + due_ns(rank, rank->next_call);
    bool opens = member->rank != NULL && member->state < SIM_INSIDE;
    if (operation->member == NULL && !opens)
        return true;
    if (rank->driver.dead || rank->in_flight >= scenario->depth || world->clock.now_ns < rank->paused_until_ns)
        return false;
    if (fault_of(rank, SIM_FAULT_ABSENT, rank->next_call) != NULL && sim_member_status(member) == CL_OK)
        return false; /* the rank is stuck elsewhere until it hears that the group has failed */
    if (operation->member != NULL && must_wait(rank, operation))
        return false;
    if (world->clock.now_ns < at_ns) {
        sim_clock_schedule(&world->clock, &rank->due, at_ns);
        return false;
    }
    if (opens && !sim_membership_enter(rank, group))
        return false;
    if (operation->member != NULL && member->state == SIM_LEFT)
        refuse(rank, operation, CL_ECLOSED);
    else if (operation->member != NULL)
        submit(rank, operation);
    return true;
}

static void make_due_calls(struct sim_event *due)
{
    struct sim_rank *rank = (void *)((char *)due - offsetof(struct sim_rank, due));
    const struct sim_scenario *scenario = rank->world->scenario;
    while (rank->next_call < scenario->call_count && make_call(rank, &rank->operations[rank->next_call])) {
        uint32_t group = scenario->calls[rank->next_call++].group;
        sim_membership_tidy(rank, group);
    }
}

void sim_caller_init(struct sim_rank *rank)
{
    struct sim_world *world = rank->world;
    const struct sim_scenario *scenario = world->scenario;
    if (rank->endpoint == NULL)
        return; /* the world has failed */
    rank->due.fire = make_due_calls;
    sim_membership_init(rank, note_end, end_early);
    bool stuck = false; /* in the call it never makes: the rank may never hear that the others waited in vain */
    for (uint32_t call = 0; call < scenario->call_count; call++) {
        struct sim_member *member = &rank->members[scenario->calls[call].group];
        bool involved = member->rank != NULL && sim_call_involves(&scenario->calls[call], member->self);
        stuck = stuck || fault_of(rank, SIM_FAULT_ABSENT, call) != NULL;
        rank->operations[call] =
            (struct sim_operation){.member = involved ? member : NULL, .call = call, .awaited = involved && !stuck};
        world->unfinished += rank->operations[call].awaited;
    }
    sim_driver_wake(&rank->driver, world->clock.now_ns);
    sim_clock_schedule(&world->clock, &rank->due, world->clock.now_ns);
}
