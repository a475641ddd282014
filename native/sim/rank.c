#include "sim/rank.h"

#include <string.h>

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "sim/data.h"
#include "sim/element.h"
#include "sim/memory.h"

enum {
    RECEIVE_PACKETS = 512,         /* most received in one turn */
    DATAGRAM_OVERHEAD_BYTES = 512, /* charged to the socket's buffer per datagram, beside its bytes */
};

/* ---- the clock: every rank has its own, with another start and another speed ---- */

static struct sim_rank *rank_of(const struct sim_driver *driver)
{
    return (struct sim_rank *)(uintptr_t)driver; /* the driver is its first member */
}

static uint64_t clock_us(const struct sim_driver *driver, uint64_t at_ns)
{
    const struct sim_rank *rank = rank_of(driver);
    const struct sim_speed *speed = &rank->world->scenario->speeds[rank->id];
    uint64_t passed_ns = at_ns - rank->world->start_ns;
    int64_t drift_ns = (int64_t)(passed_ns / 1000000) * speed->drift_ppm;
    return speed->clock_us + (passed_ns + (uint64_t)drift_ns) / 1000;
}

/* ---- turns ---- */

void sim_rank_wake(struct sim_rank *rank)
{
    struct sim_world *world = rank->world;
    const struct sim_event *turn = &rank->driver.event;
    if (rank->driver.dead || (turn->slot != 0 && turn->at_ns <= world->clock.now_ns))
        return;
    uint64_t wake_ns = world->scenario->speeds[rank->id].wake_ns;
    sim_driver_wake(&rank->driver, world->clock.now_ns + sim_random_below(&world->random, wake_ns + 1));
}

void sim_rank_receive(struct sim_rank *rank, struct sim_datagram *datagram)
{
    struct sim_world *world = rank->world;
    const struct sim_driver *driver = &rank->driver;
    uint64_t bytes = driver->inbox_bytes + datagram->length + (driver->inbox_count + 1) * DATAGRAM_OVERHEAD_BYTES;
    if (driver->dead) {
        sim_medium_lose(&world->network.medium, datagram, SIM_LOST_DEAD, "rank");
    } else if (bytes > world->scenario->socket_bytes) {
        sim_medium_lose(&world->network.medium, datagram, SIM_LOST_SOCKET, "rank");
    } else {
        sim_driver_deliver(&rank->driver, datagram);
        sim_rank_wake(rank);
    }
}

static void note_received(struct sim_driver *driver, const struct sim_datagram *datagram)
{
    struct sim_rank *rank = rank_of(driver);
    struct sim_world *world = rank->world;
    world->network.medium.counts.delivered++;
    if (world->ranks[datagram->from].driver.dead)
        world->last_words_ns = sim_world_now_ns(world);
    sim_trace_mark(&world->trace, (uint64_t)rank->id << 32 | datagram->length);
    sim_trace_datagram(&world->trace, "received", "", datagram->from, datagram->to, datagram->bytes, datagram->length);
    if (rank->specimen != NULL) {
        rank->specimen_length = datagram->length;
        memcpy(rank->specimen, datagram->bytes, datagram->length);
    }
}

static bool emit(struct sim_driver *driver, const struct cl_datagram *from)
{
    struct sim_rank *rank = rank_of(driver);
    struct sim_world *world = rank->world;
    uint32_t length = from->head_length + from->payload_length;
    if (sim_random_chance(&world->random, world->scenario->full_chance))
        return false;
    if (from->peer >= world->scenario->world || from->peer == rank->id || from->path >= world->scenario->paths) {
        sim_world_fail(world, "rank %u sends a datagram to peer %u on path %u, which does not exist", rank->id,
                       from->peer, from->path);
        return true;
    }
    uint32_t most = sim_wiring_datagram_bytes(&world->scenario->wiring, rank->id, from->peer);
    if (length > most) {
        sim_world_fail(world, "rank %u sends a datagram of %u bytes to rank %u; %u are allowed", rank->id, length,
                       from->peer, most);
        return true;
    }
    world->checks->path(world, rank, from);
    struct sim_datagram *datagram = sim_pool_take(&world->network.medium.pool);
    datagram->from = rank->id;
    datagram->to = from->peer;
    datagram->path = from->path;
    datagram->priority = from->priority;
    datagram->ecn = from->droppable ? SIM_NOT_ECT : SIM_ECT;
    datagram->length = sim_driver_flatten(datagram->bytes, from);
    sim_trace_datagram(&world->trace, "sent", "", datagram->from, datagram->to, datagram->bytes, datagram->length);
    sim_network_send(&world->network, datagram, rank->host, world->ranks[from->peer].host);
    return true;
}

static void check_batch(struct sim_driver *driver)
{
    struct sim_rank *rank = rank_of(driver);
    const struct cl_queue *queue = &rank->endpoint->queue;
    rank->world->checks->batch(rank->world, rank, rank->queue_classes, queue->packets - rank->queue_packets);
    rank->queue_classes = queue->classes;
    rank->queue_packets = queue->packets;
}

static uint64_t now_us(void *context)
{
    const struct sim_rank *rank = context;
    return sim_driver_now_us(&rank->driver);
}

static void take(void *context)
{
    struct sim_rank *rank = context;
    struct cl_operation *first = rank->handed_over.first;
    rank->handed_over = (struct cl_operation_list){.last = &rank->handed_over.first};
    cl_groups_take_all(first);
}

static void receive(void *context)
{
    struct sim_rank *rank = context;
    rank->packets = sim_driver_receive(&rank->driver, RECEIVE_PACKETS);
}

/* The rank sees that processes of its host are gone. */
static void see_deaths(void *context)
{
    struct sim_rank *rank = context;
    struct sim_world *world = rank->world;
    for (; rank->deaths < world->death_count; rank->deaths++) {
        const struct sim_rank *dead = &world->ranks[world->deaths[rank->deaths]];
        if (dead->host != rank->host)
            continue;
        cl_endpoint_peer_lost(rank->endpoint, dead->id);
        cl_groups_peer_died(&rank->groups, dead->id);
    }
}

static bool send_packets(void *context)
{
    struct sim_rank *rank = context;
    uint64_t emitted = rank->driver.emitted;
    rank->queue_classes = rank->endpoint->queue.classes;
    rank->queue_packets = rank->endpoint->queue.packets;
    if (!sim_driver_send(&rank->driver))
        sim_driver_wake(&rank->driver, rank->world->clock.now_ns + SIM_FULL_US * 1000);
    rank->packets += (uint32_t)(rank->driver.emitted - emitted);
    return false;
}

static void note_timer(void *context)
{
    const struct sim_rank *rank = context;
    sim_trace_say(&rank->world->trace, "rank %u: timer", rank->id);
}

static void note_completion(void *context, const struct cl_completion *completion)
{
    const struct sim_rank *rank = context;
    sim_trace_say(&rank->world->trace, "rank %u: a message with %u: %s", rank->id, completion->peer,
                  cl_error_text(completion->status));
    if (completion->status == CL_EPEERLOST)
        rank->world->checks->lost(rank->world, rank, completion->peer);
}

static void note_abort(void *context, const struct cl_closed_group *aborted)
{
    const struct sim_rank *rank = context;
    sim_trace_say(&rank->world->trace, "rank %u: hears that group %u failed by %d: %s", rank->id, aborted->group,
                  aborted->culprit == UINT16_MAX ? -1 : aborted->culprit, cl_error_text(aborted->reason));
}

static const struct cl_turn_io TURN_IO = {.now_us = now_us,
                                          .take = take,
                                          .receive = receive,
                                          .report_deaths = see_deaths,
                                          .send = send_packets,
                                          .expired = note_timer,
                                          .completed = note_completion,
                                          .aborted = note_abort};

static void turn(struct sim_driver *driver)
{
    struct sim_rank *rank = rank_of(driver);
    struct sim_world *world = rank->world;
    const struct sim_speed *speed = &world->scenario->speeds[rank->id];
    uint64_t at_us = sim_driver_now_us(driver), now_ns = world->clock.now_ns;
    struct cl_turn of_rank = {&TURN_IO, rank, rank->endpoint, &rank->groups, &rank->news};
    world->counts.turns++;
    uint64_t deadline_us = cl_turn_take(&of_rank);
    rank->busy = deadline_us == 0;
    sim_rank_call(rank);
    sim_driver_sleep(driver, now_ns + speed->turn_ns + rank->packets * speed->packet_ns);
    rank->spins = rank->packets == 0 && !rank->busy && deadline_us <= at_us ? rank->spins + 1 : 0;
    if (rank->busy || driver->inbox != NULL)
        sim_driver_wake(driver, now_ns);
    else if (deadline_us != UINT64_MAX)
        sim_driver_wake(driver, sim_driver_ns_at(driver, deadline_us > at_us ? deadline_us : at_us + 1));
    world->checks->turn(world, rank);
}

static const struct sim_driver_type DRIVER = {
    .turn = turn, .emit = emit, .received = note_received, .filled = check_batch, .clock_us = clock_us};

/* ---- calls ---- */

static const struct sim_fault *fault_of_call(const struct sim_rank *rank, enum sim_fault_kind kind, uint32_t call)
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
    const struct sim_fault *late = fault_of_call(rank, SIM_FAULT_LATE, call);
    uint64_t skew_ns = sim_mix(scenario->seed ^ ((uint64_t)rank->id << 32 | call)) % (scenario->skew_ns + 1);
    return scenario->calls[call].at_ns + skew_ns + (late != NULL ? late->for_ns : 0);
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
    if (mismatch != NULL)
        qos.priority = (uint8_t)mismatch->path;
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
    };
    return cl_group_request(group, &operation->operation, &request, sim_driver_now_us(&rank->driver));
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
                                         .priority = call->qos.priority,
                                         .timeout_us = world->scenario->timeout_us};
    return cl_group_request_message(group, &operation->operation, sends ? CL_OPERATION_SEND : CL_OPERATION_RECEIVE,
                                    &request, sim_driver_now_us(&rank->driver));
}

static void submit(struct sim_rank *rank, struct sim_operation *operation)
{
    struct sim_world *world = rank->world;
    const struct sim_fault *mismatch = fault_of_call(rank, SIM_FAULT_MISMATCH, operation->call);
    struct cl_group *group = &operation->member->group;
    operation->called_ns = sim_world_now_ns(world);
    operation->state = SIM_IN_FLIGHT;
    rank->in_flight++;
    bool message = world->scenario->calls[operation->call].kind == SIM_CALL_MESSAGE;
    int status = message ? request_message(rank, operation, mismatch) : request_collective(rank, operation, mismatch);
    if (status != CL_OK) {
        sim_world_fail(world, "call %u of rank %u is refused", operation->call, rank->id);
        return;
    }
    cl_group_order(group, &operation->operation);
    cl_group_queue(group, &operation->operation);
    cl_operation_list_append(&rank->handed_over, &operation->operation);
    sim_rank_wake(rank);
}

/* Whether a sender still waits for what it passes on. */
static bool must_wait(const struct sim_rank *rank, const struct sim_operation *operation)
{
    const struct sim_call *call = &rank->world->scenario->calls[operation->call];
    return call->kind == SIM_CALL_MESSAGE && call->from == operation->member->group.rank && call->after != UINT32_MAX &&
           rank->operations[call->after].state != SIM_ENDED;
}

void sim_rank_call(struct sim_rank *rank)
{
    struct sim_world *world = rank->world;
    const struct sim_scenario *scenario = world->scenario;
    for (; rank->next_call < scenario->call_count; rank->next_call++) {
        struct sim_operation *operation = &rank->operations[rank->next_call];
        if (operation->member == NULL)
            continue;
        if (rank->driver.dead || rank->in_flight >= scenario->depth || world->clock.now_ns < rank->paused_until_ns)
            return;
        if (fault_of_call(rank, SIM_FAULT_ABSENT, rank->next_call) != NULL && operation->member->group.status == CL_OK)
            return; /* the rank is stuck elsewhere until it hears that the group has failed */
        if (must_wait(rank, operation))
            return;
        uint64_t at_ns = world->start_ns + due_ns(rank, rank->next_call);
        if (world->clock.now_ns < at_ns) {
            sim_clock_schedule(&world->clock, &rank->due, at_ns);
            return;
        }
        submit(rank, operation);
    }
}

static void call_due(struct sim_event *event)
{
    struct sim_rank *rank = (struct sim_rank *)(void *)((char *)event - offsetof(struct sim_rank, due));
    sim_rank_call(rank);
}

void sim_rank_pause(struct sim_rank *rank, uint64_t until_ns)
{
    if (rank->driver.dead || until_ns <= rank->paused_until_ns)
        return;
    rank->paused_until_ns = until_ns;
    sim_driver_sleep(&rank->driver, until_ns);
    sim_clock_schedule(&rank->world->clock, &rank->due, until_ns);
}

void sim_rank_kill(struct sim_rank *rank)
{
    struct sim_world *world = rank->world;
    if (rank->driver.dead)
        return;
    sim_driver_kill(&rank->driver);
    sim_clock_cancel(&world->clock, &rank->due);
    for (uint32_t call = 0; call < world->scenario->call_count; call++)
        world->unfinished -= rank->operations[call].awaited && rank->operations[call].state != SIM_ENDED;
    world->deaths[world->death_count++] = rank->id;
    for (uint32_t i = 0; i < world->scenario->world; i++) /* the other ranks of the host see it at once */
        if (i != rank->id && world->ranks[i].host == rank->host)
            sim_rank_wake(&world->ranks[i]);
}

/* ---- groups: see group/io.h ---- */

static void wake_for_group(void *context)
{
    struct sim_member *member = context;
    if (!member->failed && member->group.status != CL_OK)
        sim_trace_say(&member->rank->world->trace, "rank %u: group %u fails: %s (rank %d of it)", member->rank->id,
                      member->group.id, cl_error_text(member->group.status),
                      member->group.culprit == UINT32_MAX ? -1 : (int)member->group.culprit);
    member->failed = member->group.status != CL_OK;
    cl_groups_call(&member->rank->groups);
    sim_rank_wake(member->rank);
}

static void ring_bell(struct sim_member *member)
{
    sim_rank_wake(member->rank);
}

/* In every third group the kernel does not allow it. */
static int read_memory(void *context, uint32_t index, uint64_t address, void *target, uint64_t bytes)
{
    const struct sim_member *member = context, *from = member->host->members[index];
    if (sim_mix(member->rank->world->scenario->seed + member->group.id) % 3 == 0 || from->rank->driver.dead)
        return CL_ESYSTEM;
    memcpy(target, (const void *)(uintptr_t)address, bytes);
    return CL_OK;
}

/* The caller learns of the end. */
static void tell(struct cl_news_item *news)
{
    struct sim_operation *operation = (void *)((char *)news - offsetof(struct sim_operation, news));
    struct sim_rank *rank = operation->member->rank;
    struct sim_world *world = rank->world;
    operation->state = SIM_ENDED;
    operation->ended_ns = sim_world_now_ns(world);
    rank->in_flight--;
    sim_trace_say(&world->trace, "rank %u: call %u ended: %s", rank->id, operation->call,
                  cl_error_text(operation->status));
    world->checks->ended(world, operation);
}

static void ended(void *context, struct cl_operation *of_group, int status)
{
    const struct sim_member *member = context;
    struct sim_operation *operation = (struct sim_operation *)of_group; /* its first member */
    operation->status = status;
    operation->news.tell = tell;
    cl_news_add(&member->rank->news, &operation->news);
}

static void join_group(struct sim_rank *rank, uint32_t index, uint32_t self)
{
    const struct sim_group *group = &rank->world->scenario->groups[index];
    struct sim_world_group *made = &rank->world->groups[index];
    struct sim_host *host = &made->hosts[made->place_of[self]];
    struct cl_group_options options = {.id = index + 1,
                                       .rank = self,
                                       .size = group->size,
                                       .peers = group->members,
                                       .local = host->local,
                                       .local_count = host->local_count};
    struct cl_group_io io = {.wake = wake_for_group, .ended = ended, .read_memory = read_memory};
    sim_member_open(&rank->members[index], rank, host, &options, rank->endpoint, io);
    rank->members[index].ring = ring_bell;
    cl_groups_add(&rank->groups, &rank->members[index].group);
}

/* ---- beginning and end ---- */

/* Peers: all other ranks; in large worlds only those that some plan sends to or receives from. */
static void add_peers(struct sim_rank *rank)
{
    enum { LARGE = 64 };
    struct sim_world *world = rank->world;
    const struct sim_scenario *scenario = world->scenario;
    bool *wanted = sim_new(scenario->world, sizeof *wanted);
    for (uint32_t i = 0; i < scenario->world; i++)
        wanted[i] = scenario->world <= LARGE;
    for (uint32_t call = 0; scenario->world > LARGE && call < scenario->call_count; call++) {
        const struct sim_shape *shape = &world->plans->shapes[scenario->calls[call].shape];
        const struct sim_part *part = sim_plans_part(world->plans, shape, rank->id);
        const struct cl_step *steps = sim_plans_steps(world->plans, part);
        for (uint32_t i = 0; i < part->step_count; i++)
            if (steps[i].kind <= CL_RECV_REDUCE)
                wanted[steps[i].peer] = true;
    }
    for (uint16_t i = 0; i < scenario->world; i++)
        if (wanted[i] && i != rank->id &&
            (cl_endpoint_add_peer(rank->endpoint, i, (uint16_t)scenario->paths, NULL) != CL_OK ||
             !sim_wiring_set_up(&scenario->wiring, scenario->seed, rank->endpoint, rank->id, i)))
            sim_world_fail(world, "rank %u cannot add its peer %u", rank->id, i);
    free(wanted);
}

void sim_rank_init(struct sim_rank *rank, struct sim_world *world, uint16_t id)
{
    const struct sim_scenario *scenario = world->scenario;
    *rank = (struct sim_rank){.world = world, .id = id, .host = scenario->host_of[id]};
    rank->due.fire = call_due;
    rank->handed_over.last = &rank->handed_over.first;
    rank->driver = (struct sim_driver){.type = &DRIVER,
                                       .clock = &world->clock,
                                       .pool = &world->network.medium.pool,
                                       .tick_ns = 1000,
                                       .batch_capacity = scenario->world > SIM_BATCH ? SIM_BATCH / 8 : SIM_BATCH};
    rank->members = sim_new(scenario->group_count, sizeof *rank->members);
    rank->operations = sim_new(scenario->call_count, sizeof *rank->operations);
    struct cl_endpoint_config config = {.auth = scenario->auth,
                                        .job = sim_mix(scenario->seed),
                                        .self = id,
                                        .epoch = (uint16_t)(scenario->seed % 7),
                                        .datagram_bytes = scenario->wiring.datagram_bytes[id],
                                        .peer_timeout_us = scenario->peer_timeout_us,
                                        .unexpected_limit_bytes = scenario->unexpected_limit_bytes};
    memcpy(config.key, &config.job, sizeof config.job);
    if (sim_driver_open(&rank->driver, &config) != CL_OK) {
        sim_world_fail(world, "rank %u cannot create its endpoint", id);
        return;
    }
    rank->endpoint = rank->driver.endpoint;
    add_peers(rank);
    for (uint32_t group = scenario->group_count; group-- > 0;)
        for (uint32_t i = 0; i < scenario->groups[group].size; i++)
            if (scenario->groups[group].members[i] == id)
                join_group(rank, group, i);
    bool stuck = false; /* in the call it never makes: the rank may never hear that the others waited in vain */
    for (uint32_t call = 0; call < scenario->call_count; call++) {
        struct sim_member *member = &rank->members[scenario->calls[call].group];
        bool involved = member->rank != NULL && sim_call_involves(&scenario->calls[call], member->group.rank);
        stuck = stuck || fault_of_call(rank, SIM_FAULT_ABSENT, call) != NULL;
        rank->operations[call] =
            (struct sim_operation){.member = involved ? member : NULL, .call = call, .awaited = involved && !stuck};
        world->unfinished += rank->operations[call].awaited;
    }
    for (uint32_t i = 0; i < scenario->fault_count && rank->specimen == NULL; i++)
        if (scenario->faults[i].kind == SIM_FAULT_ATTACK && scenario->faults[i].a == id)
            rank->specimen = sim_new(scenario->datagram_bytes, 1);
    sim_driver_wake(&rank->driver, world->clock.now_ns);
    sim_clock_schedule(&world->clock, &rank->due, world->clock.now_ns);
}

void sim_rank_free(struct sim_rank *rank)
{
    const struct sim_scenario *scenario = rank->world->scenario;
    for (uint32_t call = 0; call < scenario->call_count; call++) {
        struct sim_operation *operation = &rank->operations[call];
        cl_executor_destroy(operation->operation.executor); /* of operations still in flight */
        if (operation->operation.plan != NULL)
            cl_operation_free(&operation->operation);
        if (operation->output != operation->input)
            free(operation->output);
        free(operation->input);
        free(operation->result);
    }
    for (struct cl_group *group = rank->groups.first; group != NULL; group = group->next)
        cl_group_free(group);
    sim_driver_close(&rank->driver);
    free(rank->specimen);
    free(rank->members);
    free(rank->operations);
}
