/* Engines: opening and closing, full wires, and what the thread does while nothing happens. The sanitizers see these
 * tests too: half of them are about who frees what, and when. */
#include "tests/world.h"

#include "engine/member.h"

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"

#include <dirent.h>
#include <time.h>
#include <unistd.h>

TEST(test_open_errors)
{
    cl_engine *engine;
    static const uint8_t other_key[16] = "of nobody here";
    struct cl_engine_options options = options_of("pigeon", 0);
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    options = options_of("mem", 0);
    options.auth = 3;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    options = options_of("mem", 0);
    options.address_count = 0;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    options.address_count = CL_PORTS_MAX + 1;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    static const char *const nowhere[] = {"192.0.2.1"};
    options = options_of("udp", 0);
    options.addresses = nowhere;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_ESYSTEM);
    options = options_of("mem", 0);
    CHECK_EQ(cl_engine_open(&options, &engine), CL_OK);
    uint32_t port, local = 7, remote = 3;
    const char *address = "127.0.0.1";
    struct cl_peer_options peer = {
        .peer = 1, .path_count = 1, .local = &local, .remote_addresses = &address, .remote_ports = &remote};
    CHECK_EQ(cl_engine_port(engine, 1, &port), CL_EINVAL);
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL); /* who are we? */
    CHECK_EQ(cl_engine_identify(engine, 5, KEY, 0, 0), CL_OK);
    CHECK_EQ(cl_engine_identify(engine, 5, KEY, 0, 0), CL_OK);
    CHECK_EQ(cl_engine_identify(engine, 6, KEY, 0, 0), CL_EINVAL);
    CHECK_EQ(cl_engine_identify(engine, 5, other_key, 0, 0), CL_EINVAL);
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL); /* no such port of ours */
    peer.peer = CL_PEERS_MAX;
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL);
    cl_engine_close(engine);
    cl_engine_close(NULL);
}

TEST(test_peers)
{
    struct cl_engine_options options = options_of("udp", 0);
    static const char *const address = "127.0.0.1";
    static const uint32_t local[] = {0, 1}, nowhere = 0, port = 9;
    cl_engine *engine;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_OK);
    struct cl_peer_options peer = {
        .peer = 1, .path_count = 1, .local = local, .remote_addresses = &address, .remote_ports = &port};
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL); /* before the engine has its name */
    CHECK_EQ(cl_engine_identify(engine, 1, KEY, 0, 0), CL_OK);
    const struct cl_peer_options good = peer;
    peer.remote_ports = &nowhere;
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL);
    peer = good;
    peer.local = &local[1]; /* the engine has one port */
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL);
    peer = good;
    peer.path_count = 0;
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL);
    peer = good;
    peer.packet_bytes = 800;
    peer.key = KEY;
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_OK);
    peer.packet_bytes = 400;
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_OK); /* known: nothing changes */
    peer.peer = 2;
    peer.packet_bytes = 401; /* no multiple of 8; the engine already sends to the peer */
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL);
    CHECK_EQ(engine->peers.count, 1); /* an error changes nothing: the same peer can be added rightly */
    CHECK(engine->peers.links[2] == NULL);
    peer.packet_bytes = cl_engine_packet_bytes(engine) + 8;
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_EINVAL);
    peer.packet_bytes = 400;
    peer.peer = CL_PEERS_MAX - 1;
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_OK);
    pthread_mutex_lock(&engine->core);
    CHECK_EQ(engine->endpoint->peers.list[CL_PEERS_MAX - 1]->payload_bytes, 400);
    CHECK_EQ(engine->endpoint->peers.list[1]->payload_bytes, 800);
    CHECK(engine->endpoint->peers.list[1]->keyed);
    pthread_mutex_unlock(&engine->core);
    cl_engine_close(engine);
}

/* The interface of rank 1 comes back with another address: groups go on once rank 0 knows it. */
TEST(test_a_port_moves)
{
    static const char *const moved = "127.0.0.3";
    static const uint32_t local = 0;
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct job jobs[2];
    for (uint32_t i = 0; i < 2; i++)
        jobs[i] = (struct job){.team = &team, .rank = i, .rounds = 5, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 2);
    CHECK_EQ(cl_engine_move_port(world.engines[1], 1, moved), CL_EINVAL); /* there is one port */
    CHECK_EQ(cl_engine_move_port(world.engines[1], 0, "::1"), CL_EINVAL);
    CHECK_EQ(cl_engine_move_port(world.engines[1], 0, "192.0.2.1"), CL_ESYSTEM); /* not of this host */
    CHECK_EQ(cl_engine_move_port(world.engines[1], 0, moved), CL_OK);
    uint32_t port;
    CHECK_EQ(cl_engine_port(world.engines[1], 0, &port), CL_OK);
    struct cl_peer_options options = {
        .peer = 1, .path_count = 1, .local = &local, .remote_addresses = &moved, .remote_ports = &port};
    CHECK_EQ(cl_engine_add_peer(world.engines[0], &options), CL_OK);
    run_jobs(jobs, 2);
}

/* Two sockets of one address are two paths that share an interface. */
TEST(test_ports_of_one_interface)
{
    static const char *const addresses[] = {"a", "b", "a"}, *const remote[] = {"c", "c"};
    static const char *const many[] = {"1", "2", "3", "4", "5", "6", "7", "8", "9"};
    static const uint32_t local[] = {2, 0}, ports[] = {0, 1};
    struct cl_engine_options options = options_of("mem", 0);
    cl_engine *engine;
    options.addresses = many;
    options.address_count = 9;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    options.addresses = addresses;
    options.address_count = 3;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_OK);
    CHECK(cl_engine_descriptor(engine, 2) >= 0);
    CHECK_EQ(cl_engine_descriptor(engine, 3), CL_EINVAL);
    struct cl_path_stats paths[2] = {{.port = 9}, {.port = 9}};
    CHECK_EQ(cl_engine_read_paths(engine, 1, paths, 2), CL_EINVAL);
    CHECK_EQ(cl_engine_identify(engine, 5, KEY, 0, 0), CL_OK);
    CHECK_EQ(cl_engine_read_paths(engine, 1, paths, 2), CL_EINVAL);
    struct cl_peer_options peer = {
        .peer = 1, .path_count = 2, .local = local, .remote_addresses = remote, .remote_ports = ports};
    CHECK_EQ(cl_engine_add_peer(engine, &peer), CL_OK);
    CHECK_EQ(cl_engine_read_paths(engine, 1, paths, 1), 2);
    CHECK_EQ(paths[0].port, 2);
    CHECK_EQ(paths[1].port, 9);
    CHECK_EQ(cl_engine_read_paths(engine, 1, paths, 2), 2);
    CHECK_EQ(paths[1].port, 0);
    const struct cl_path *of = engine->endpoint->peers.list[1]->paths;
    CHECK(of[0].nic == of[1].nic);
    cl_engine_close(engine);
}

/* ---- a wire that is full at the wrong moment ---- */

static struct {
    atomic_bool full[2]; /* by engine: the sender (0) and the receiver (1) */
    atomic_bool stuck;   /* the sender has a packet with payload it could not hand over */
    _Atomic(const uint8_t *) freed;
    atomic_uint of_freed; /* packets that still named freed memory */
} jam;
static struct cl_wire_type jammed[2];

static size_t send_or_not(size_t engine, struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    const uint8_t *freed = atomic_load(&jam.freed);
    for (size_t i = 0; i < count; i++) {
        if (freed != NULL && datagrams[i].payload == freed)
            atomic_fetch_add(&jam.of_freed, 1);
        if (engine == 0 && atomic_load(&jam.full[0]) && datagrams[i].payload_length > 0)
            atomic_store(&jam.stuck, true);
    }
    if (atomic_load(&jam.full[engine]))
        return 0;
    size_t sent = mem_wire.send(wire, datagrams, count);
    if (engine == 0 && datagrams[0].payload_length > 0)
        atomic_store(&jam.full[0], true); /* the message is out; what comes next is a repetition */
    return sent;
}

static size_t send_0(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    return send_or_not(0, wire, datagrams, count);
}

static size_t send_1(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    return send_or_not(1, wire, datagrams, count);
}

/* The acknowledgement comes while a repetition still waits for room: after it, the buffer belongs to the caller, and
 * the repetition must not be read from it any more. */
TEST(test_repetition_stuck_in_a_full_wire)
{
    struct world world = open_world(2, "mem", 0);
    jammed[0] = jammed[1] = mem_wire;
    jammed[0].send = send_0;
    jammed[1].send = send_1;
    for (size_t i = 0; i < 2; i++) {
        pthread_mutex_lock(&world.engines[i]->core);
        world.engines[i]->ports.wire_type = &jammed[i];
        pthread_mutex_unlock(&world.engines[i]->core);
    }
    struct team team = open_team(&world, 1, false);
    struct draft draft = {.world_size = 2, .input_bytes = 1000};
    draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = 1, .length = 1000}, DRAFT_NONE);
    cl_plan *sender = draft_finish(&draft);
    draft = (struct draft){.rank = 1, .world_size = 2, .output_bytes = 1000};
    draft_add(&draft, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = 1000}, DRAFT_NONE);
    cl_plan *receiver = draft_finish(&draft);
    uint8_t *data = malloc(1000), target[1000];
    memset(data, 3, 1000);
    atomic_store(&jam.full[1], true); /* no acknowledgement yet */
    cl_operation *sent;
    struct cl_operation_request request = {.plan = sender, .input = data, .dtype = CL_U8, .timeout_us = PATIENCE_US};
    CHECK_EQ(cl_submit(team.groups[0], &request, &sent), CL_OK);
    request.plan = receiver;
    request.output = target;
    CHECK_EQ(cl_run(team.groups[1], &request), CL_OK);
    CHECK_EQ(target[999], 3);
    while (!atomic_load(&jam.stuck))
        usleep(1000);
    atomic_store(&jam.full[1], false);
    CHECK_EQ(cl_operation_wait(sent, 0), CL_OK);
    cl_operation_release(sent);
    atomic_store(&jam.freed, data);
    free(data);
    atomic_store(&jam.full[0], false);
    cl_plan_release(sender);
    cl_plan_release(receiver);
    close_team(&team);
    close_world(&world);
    CHECK_EQ(atomic_load(&jam.of_freed), 0);
}

/* ---- one of two ports takes nothing ---- */

enum { STUCK_LINK = 1 };

static atomic_uint not_taken;

/* Each engine's second link leaves through its second port. */
static size_t send_by_one_port(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (datagrams[i].link == STUCK_LINK) {
            atomic_fetch_add(&not_taken, 1);
            return i > 0 ? mem_wire.send(wire, datagrams, i) : 0;
        }
    return mem_wire.send(wire, datagrams, count);
}

/* A network interface that is stuck, but not down, stops no other: neither data nor acknowledgements. */
TEST(test_a_stuck_port_stops_no_other)
{
    static const char *const addresses[] = {"127.0.0.1", "127.0.0.2"};
    static const uint32_t local[] = {0, 1};
    struct cl_wire_type half = mem_wire;
    half.send = send_by_one_port;
    struct world world = {.size = 2};
    struct cl_engine_options options = options_of("mem", 0);
    options.wire_type = &half;
    options.addresses = addresses;
    options.address_count = 2;
    uint32_t ports[2][2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        CHECK_EQ(cl_engine_open(&options, &world.engines[rank]), CL_OK);
        CHECK_EQ(cl_engine_identify(world.engines[rank], 7, KEY, (uint16_t)rank, 0), CL_OK);
        for (uint32_t port = 0; port < 2; port++)
            CHECK_EQ(cl_engine_port(world.engines[rank], port, &ports[rank][port]), CL_OK);
    }
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct cl_peer_options peer = {.peer = !rank,
                                       .path_count = 2,
                                       .local = local,
                                       .remote_addresses = addresses,
                                       .remote_ports = ports[!rank]};
        CHECK_EQ(cl_engine_add_peer(world.engines[rank], &peer), CL_OK);
    }
    struct team team = open_team(&world, 1, false);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++)
        jobs[rank] = (struct job){.team = &team, .rank = rank, .rounds = 50, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 2); /* checks that every call ends well */
    CHECK(atomic_load(&not_taken) > 0);
    close_team(&team);
    close_world(&world);
}

/* ---- a group that one rank opens late ---- */

/* Rank 0 aborts the group before rank 1 opens it: the operations there end at once, and not with their timeout. */
TEST(test_an_abort_comes_before_the_group)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    cl_engine *late = world.engines[1];
    struct cl_group_options options[2] = {group_options(&world, 1, 0, -1), group_options(&world, 1, 1, -1)};
    struct call *call = make_call(1, 1);
    struct cl_operation_request request = {.plan = draft_exchange(1, 2, 4 * WORDS),
                                           .input = call->input,
                                           .output = call->output,
                                           .dtype = CL_U32,
                                           .timeout_us = PATIENCE_US};
    cl_group *groups[2];
    cl_operation *operation;
    uint32_t culprit = 9;
    CHECK_EQ(cl_group_open(world.engines[0], &options[0], &groups[0]), CL_OK);
    cl_group_abort(groups[0], CL_EABORTED);
    for (bool heard = false; !heard; usleep(1000)) {
        pthread_mutex_lock(&late->core);
        heard = cl_closed_groups_find(&late->endpoint->closed, 1) != NULL;
        pthread_mutex_unlock(&late->core);
    }
    CHECK_EQ(cl_group_open(late, &options[1], &groups[1]), CL_OK);
    CHECK_EQ(cl_submit(groups[1], &request, &operation), CL_OK);
    CHECK_EQ(cl_operation_wait(operation, PATIENCE_US / 2), CL_EABORTED);
    CHECK_EQ(cl_group_status(groups[1], &culprit), CL_EABORTED);
    CHECK_EQ(culprit, 0);
    cl_operation_release(operation);
    cl_group_close(groups[0]);
    cl_group_close(groups[1]);
    cl_plan_release(request.plan);
    free(call);
}

/* ---- what must not happen while nothing happens ---- */

static uint64_t cpu_us(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

enum { WATCH_US = 100000, WAKE_UPS_MAX = 50, CPU_MAX_US = WATCH_US / 4 };

/* No thread is busy while nothing happens: the engines' wake-ups over a while, counted. */
static void check_idle(const struct world *world)
{
    struct cl_engine_stats before[RANKS_MAX], after;
    for (uint32_t rank = 0; rank < world->size; rank++)
        cl_engine_read_stats(world->engines[rank], &before[rank]);
    usleep(WATCH_US);
    for (uint32_t rank = 0; rank < world->size; rank++) {
        cl_engine_read_stats(world->engines[rank], &after);
        CHECK(after.wakeups - before[rank].wakeups < WAKE_UPS_MAX);
        CHECK(after.receive_calls - before[rank].receive_calls < 10 * WAKE_UPS_MAX);
    }
}

TEST(test_idle_engines_sleep)
{
    static const char *const wires[] = {"mem", "udp", "none"};
    for (size_t i = 0; i < 3; i++) {
        SCOPED_WORLD world = open_world(2, wires[i], 0);
        SCOPED_TEAM team = open_team(&world, 1, i == 2);
        struct job jobs[2];
        for (uint32_t rank = 0; rank < 2; rank++)
            jobs[rank] = (struct job){.team = &team, .rank = rank, .rounds = 2, .timeout_us = PATIENCE_US};
        run_jobs(jobs, 2);
        check_idle(&world);
    }
}

/* Rank 0 waits for rank 1, which comes late: in the engine, or in the calling thread. */
static void wait_for_a_late_peer(const char *wire, bool shared, uint32_t submit_every)
{
    SCOPED_WORLD world = open_world(2, wire, 0);
    SCOPED_TEAM team = open_team(&world, 1, shared);
    struct job jobs[2];
    clockid_t clock;
    for (uint32_t rank = 0; rank < 2; rank++)
        jobs[rank] = (struct job){
            .team = &team, .rank = rank, .rounds = 1, .submit_every = submit_every, .timeout_us = PATIENCE_US};
    pthread_create(&jobs[0].thread, NULL, work, &jobs[0]);
    usleep(20000);
    CHECK_EQ(pthread_getcpuclockid(jobs[0].thread, &clock), 0);
    uint64_t before = cpu_us(clock);
    check_idle(&world);
    CHECK(cpu_us(clock) - before < CPU_MAX_US);
    pthread_create(&jobs[1].thread, NULL, work, &jobs[1]);
    pthread_join(jobs[0].thread, NULL);
    pthread_join(jobs[1].thread, NULL);
}

TEST(test_waiting_threads_sleep)
{
    wait_for_a_late_peer("mem", false, 1);
    wait_for_a_late_peer("none", true, 1);
    wait_for_a_late_peer("none", true, 0);
}

/* The engine thread of rank 0 and the calling thread of rank 1 take turns thousands of times: one bell or wake-up that
 * is lost, and this takes as long as a sleep does. */
TEST(test_no_wake_up_is_lost)
{
    SCOPED_WORLD world = open_world(2, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++)
        jobs[rank] = (struct job){
            .team = &team, .rank = rank, .rounds = 2000, .submit_every = 1 + rank, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 2);
}

/* Everything a rank waits for is there before it calls, and nothing comes after: it must not wait for the next packet,
 * which is a heartbeat a second later. */
TEST(test_messages_that_came_early)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    for (uint32_t rank = 0; rank < 2; rank++)
        cl_plan_release(team.plans[rank]);
    struct draft draft = {.world_size = 2, .input_bytes = 4};
    draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = 1, .length = 4}, DRAFT_NONE);
    team.plans[0] = draft_finish(&draft);
    draft = (struct draft){.rank = 1, .world_size = 2, .output_bytes = 4};
    draft_add(&draft, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = 4}, DRAFT_NONE);
    team.plans[1] = draft_finish(&draft);
    struct call *calls[2] = {make_call(0, 1), make_call(1, 1)};
    struct cl_engine_stats before, after;
    int quiet = 0; /* rounds in which no heartbeat came by chance */
    for (int round = 0; round < 5; round++) {
        CHECK_EQ(run_call(&team, 0, calls[0], PATIENCE_US),
                 CL_OK); /* acknowledged: it is among rank 1's unexpected packets */
        cl_engine_read_stats(world.engines[1], &before);
        CHECK_EQ(run_call(&team, 1, calls[1], PATIENCE_US), CL_OK);
        cl_engine_read_stats(world.engines[1], &after);
        quiet += after.packets_received == before.packets_received;
        CHECK_EQ(calls[1]->output[0], calls[0]->input[0]);
    }
    CHECK(quiet > 0);
    free(calls[0]);
    free(calls[1]);
}

static size_t open_descriptors(void)
{
    size_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder != NULL && readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

TEST(test_open_and_close)
{
    size_t before = open_descriptors();
    for (int cycle = 0; cycle < 200; cycle++) {
        struct cl_engine_options options = options_of(cycle % 2 == 0 ? "udp" : "mem", 0);
        cl_engine *engine;
        CHECK_EQ(cl_engine_open(&options, &engine), CL_OK);
        if (cycle % 4 < 2) {
            CHECK_EQ(cl_engine_identify(engine, 1, KEY, 0, 0), CL_OK);
            CHECK_EQ(cl_engine_watch_process(engine, 1, getpid()), CL_OK);
            CHECK_EQ(cl_engine_read_meter(engine, 1, cl_engine_meter(engine)), CL_OK);
        }
        struct world one = {.size = 1, .engines = {engine}};
        struct cl_group_options group = group_options(&one, 1, 0, -1);
        cl_group *unused;
        CHECK_EQ(cl_group_open(engine, &group, &unused), CL_OK);
        cl_engine_close(engine); /* and with it the group */
    }
    for (int cycle = 0; cycle < 10; cycle++) {
        SCOPED_WORLD world = open_world(3, "mem", 0);
        SCOPED_TEAM team = open_team(&world, 1, true), other = open_team(&world, 2, false);
        CHECK(team.world == &world && other.world == &world);
    }
    CHECK_EQ(open_descriptors(), before);
}

/* ---- partial operations ---- */

struct lossy_call {
    struct team *team;
    uint32_t rank;
    uint64_t deadline_us;
    float input[WORDS], output[WORDS];
    cl_operation *operation;
};

static void *lossy_work(void *argument)
{
    struct lossy_call *call = argument;
    struct cl_operation_request request = {.plan = call->team->plans[call->rank],
                                           .input = call->input,
                                           .output = call->output,
                                           .dtype = CL_F32,
                                           .op = CL_SUM,
                                           .qos = {.priority = 4, .loss_bound = 0.5, .deadline_us = call->deadline_us},
                                           .timeout_us = PATIENCE_US};
    CHECK_EQ(cl_submit(call->team->groups[call->rank], &request, &call->operation), CL_OK);
    CHECK_EQ(cl_operation_wait(call->operation, 0), CL_OK);
    return NULL;
}

/* What one rank says was not counted is what the other one's result lacks. */
static uint32_t check_lossy(const struct lossy_call *of, const struct lossy_call *at)
{
    struct cl_range ranges[16];
    int count = cl_operation_missing(of->operation, ranges, 16);
    CHECK(count >= 0 && count <= 16);
    uint32_t wrong = 0, missing = 0;
    for (uint32_t i = 0; i < WORDS; i++) {
        bool counted = true;
        for (int r = 0; r < count; r++)
            counted = counted && (4 * i < ranges[r].start || 4 * i >= ranges[r].end);
        missing += !counted;
        wrong += at->output[i] != at->input[i] + (counted ? of->input[i] : 0);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(of->operation->missing.stale.count, 0);
    return missing;
}

TEST(test_partial_operations)
{
    SCOPED_WORLD world = open_world(2, "mem", 0.1);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint32_t missing = 0;
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint32_t i = 0; i < team.plans[rank]->step_count; i++)
            if (team.plans[rank]->steps[i].kind <= CL_RECV_REDUCE)
                team.plans[rank]->steps[i].flags = CL_STEP_PARTIAL;
    for (uint32_t round = 0; round < 60; round++) {
        struct lossy_call calls[2] = {{.team = &team, .rank = 0}, {.team = &team, .rank = 1}};
        pthread_t threads[2];
        for (uint32_t rank = 0; rank < 2; rank++) {
            calls[rank].deadline_us = round % 3 == 0 ? 0 : UINT64_MAX; /* none, or that of the latest runs */
            for (uint32_t i = 0; i < WORDS; i++)
                calls[rank].input[i] = (float)(1 + rank + round + i);
            pthread_create(&threads[rank], NULL, lossy_work, &calls[rank]);
        }
        for (uint32_t rank = 0; rank < 2; rank++)
            pthread_join(threads[rank], NULL);
        for (uint32_t rank = 0; rank < 2; rank++)
            missing += check_lossy(&calls[rank], &calls[1 - rank]);
        for (uint32_t rank = 0; rank < 2; rank++)
            cl_operation_release(calls[rank].operation);
    }
    CHECK(missing > 0);
    struct cl_engine_stats stats;
    CHECK_EQ(cl_engine_read_stats(world.engines[0], &stats), CL_OK);
    CHECK(stats.packets_given_up > 0);
    CHECK(stats.messages_stopped > 0);
}

TEST(test_loss_bounds_that_are_refused)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint64_t map = 0;
    const struct cl_operation_request BAD[] = {
        {.dtype = CL_I32, .op = CL_SUM, .qos = {.loss_bound = 0.001}},
        {.dtype = CL_F32, .op = CL_MAX, .qos = {.loss_bound = 0.001}},
        {.dtype = CL_F32, .op = CL_SUM, .qos = {.loss_bound = CL_LOSS_BOUND_MAX + 1e-6}},
        {.dtype = CL_F32, .op = CL_SUM, .qos = {.loss_bound = 1e-6, .treatment = CL_ZERO + 1}},
        {.dtype = CL_F32, .op = CL_SUM, .qos = {.loss_bound = 1e-6, .protect = &map}},
        {.dtype = CL_F32, .op = CL_SUM, .qos = {.loss_bound = 1e-6, .priority = CL_CLASS_YIELDS + 1}},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        cl_operation *operation = NULL;
        struct cl_operation_request request = BAD[i];
        request.plan = team.plans[0];
        request.input = request.output = &map;
        CHECK_EQ(cl_submit(team.groups[0], &request, &operation), CL_EINVAL);
        CHECK(operation == NULL);
    }
}

/* Without the option nothing is granted; with it calls end well, also where packets get lost. */
TEST(test_credit_between_engines)
{
    for (uint64_t credit_bytes = 0; credit_bytes <= 16384; credit_bytes += 16384) {
        struct cl_engine_options options = options_of("mem", 0.05);
        options.credit_bytes = credit_bytes;
        SCOPED_WORLD world = open_world_of(2, options);
        SCOPED_TEAM team = open_team(&world, 1, false);
        struct job jobs[2];
        for (uint32_t rank = 0; rank < 2; rank++)
            jobs[rank] = (struct job){.team = &team, .rank = rank, .rounds = 50};
        run_jobs(jobs, 2);
        for (uint32_t rank = 0; rank < 2; rank++) {
            struct cl_engine_stats stats;
            CHECK_EQ(cl_engine_read_stats(world.engines[rank], &stats), CL_OK);
            CHECK_EQ(stats.grants_sent > 0, credit_bytes > 0);
        }
    }
}

/* The calling thread ends the receive of a message that has come before, and the engine thread sleeps on. A timer may
 * wake it now and then. */
TEST(test_receives_of_messages_that_are_there_wake_nobody)
{
    enum { RECEIVES = 50 };
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t out[4096] = {1}, in[4096];
    uint32_t silent = 0;
    for (uint32_t i = 0; i < RECEIVES; i++) {
        cl_operation *send = start_send(&team, 0, 1, 1, out, sizeof out, PATIENCE_US);
        cl_member_flush(cl_member_of(team.groups[0])); /* it has arrived */
        uint64_t before = atomic_load(&world.engines[1]->wakeups);
        cl_operation *receive = start_receive(&team, 1, 0, 1, in, sizeof in, PATIENCE_US);
        silent += cl_operation_status(receive) == CL_OK && atomic_load(&world.engines[1]->wakeups) == before;
        CHECK_EQ(finish(receive), CL_OK);
        CHECK_EQ(finish(send), CL_OK);
    }
    CHECK(silent > 0);
}
