/*
 * Engine: the only file with a thread. It is where the protocol (protocol/) meets the sockets (wire/): packets in,
 * plans forward, packets out, sleep until something happens.
 */
#include "engine/engine.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "engine/clock.h"
#include "group/eager.h"
#include "protocol/mtu.h"

_Static_assert((int)CL_SEND_BATCH >= (int)CL_MTU_FRAGMENTS_MAX, "a packet leaves in one batch");

enum {
    /* The engine lingers at close until no peer has asked for an answer for this time, plus the time after which a peer
     * asks again; */
    LINGER_QUIET_US = 20000,
    LINGER_QUIETS_MAX = 15, /* but for at most so many such times */
    RECEIVE_BATCHES = 8,    /* received before the next send */
    SEND_BATCHES = 4,       /* sent before the next receive */
    /* Nobody polls the ports for this time after a calling thread has done so, which mostly comes back; */
    GRACE_US = 1000,
    GRACE_IN_FLIGHT_US = 100, /* or for this, while operations are in flight, whose packets may come. */
    SHORT_TURN_US = 200,      /* a thread that waits for packets waits no longer for the end of another one's turn */
    SLICE_NS = 100000,        /* the shortest slice that Linux gives */
};

const char *cl_error_text(int code)
{
    static const char *const TEXTS[] = {
        [CL_OK] = "success",
        [-CL_EINVAL] = "invalid argument",
        [-CL_ENOMEM] = "out of memory",
        [-CL_ESYSTEM] = "the operating system refused a call the engine needs",
        [-CL_ETIMEDOUT] = "the operation timed out",
        [-CL_EPEERLOST] = "a peer died or stopped answering",
        [-CL_EABORTED] = "the group was aborted",
        [-CL_ECLOSED] = "the engine or group is closed",
        [-CL_EMISMATCH] = "ranks disagree on the operation",
        [-CL_EAGAIN] = "not done yet",
        [-CL_ENOLIBFABRIC] = "libfabric is not available",
        [-CL_ENODEVICE] = "libfabric's provider has no datagram endpoint at this address",
        [-CL_ENOPORT] = "every UDP port of the range is taken",
    };
    const char *text = code <= 0 && code > -(int)(sizeof TEXTS / sizeof *TEXTS) ? TEXTS[-code] : NULL;
    return text != NULL ? text : "unknown error";
}

/* ---- packets, under core ---- */

struct arrival {
    struct cl_engine *engine;
    uint64_t now_us;
};

static void receive_datagram(void *context, const uint8_t *bytes, size_t length, bool congested, uint64_t received_us)
{
    const struct arrival *arrival = context;
    uint64_t now = arrival->now_us;
    if (arrival->engine->endpoint == NULL)
        return;
    if (received_us == 0 || received_us > now)
        received_us = now;
    cl_nap_arrived(&arrival->engine->nap, received_us);
    cl_endpoint_receive(arrival->engine->endpoint, bytes, length, congested, received_us, now);
}

/* DSCP by priority, for switches with several queues: from expedited forwarding over the assured classes down to the
 * scavengers' class; 4, the default, is best effort. A packet that may be lost is not ECN-capable: where a switch (RED
 * with ECN) marks the others, it drops this one. */
static uint8_t traffic_class_of(const struct cl_datagram *datagram)
{
    static const uint8_t DSCP[] = {46, 34, 26, 18, 0, 0, 8, 8};
    enum { ECT0 = 2 };
    return (uint8_t)(DSCP[datagram->priority & 7] << 2 | (datagram->droppable ? 0 : ECT0));
}

/* Sends the datagrams from the first on that leave through one port; returns how many. A full port stops no other: the
 * endpoint gets back the datagrams that it did not take. */
static size_t send_run(struct cl_engine *engine, const struct cl_datagram *datagrams, size_t count)
{
    struct cl_wire_datagram out[CL_SEND_BATCH];
    size_t run = 0, taken = 0;
    for (; run < count && datagrams[run].port == datagrams[0].port; run++) {
        const struct cl_datagram *datagram = &datagrams[run];
        out[run] = (struct cl_wire_datagram){.link = engine->peers.links[datagram->peer][datagram->path].number,
                                             .head_length = datagram->head_length,
                                             .payload_length = datagram->payload_length,
                                             .head = datagram->head,
                                             .payload = datagram->payload,
                                             .traffic_class = traffic_class_of(datagram)};
    }
    if ((cl_endpoint_full_ports(engine->endpoint) >> datagrams[0].port & 1) == 0) {
        taken = engine->ports.wire_type->send(engine->ports.wire, out, run);
        atomic_fetch_add_explicit(&engine->send_calls, 1, memory_order_relaxed);
    }
    for (size_t i = taken; i < run; i++)
        cl_endpoint_refuse(engine->endpoint, &datagrams[i]);
    return run;
}

/* Returns whether there is more to send. The pacers see one time for all packets of a turn. Where a system call takes
 * as long as a packet on the link, a running clock would always allow one more packet, and the thread would never
 * receive. */
static bool send_packets(void *context)
{
    struct cl_engine *engine = context;
    uint64_t now = cl_now_us();
    bool more = true;
    for (int i = 0; more && i < SEND_BATCHES; i++) {
        engine->nap.shared = cl_peers_hear_neighbours(&engine->peers, &engine->meter, engine->endpoint, now);
        size_t count = cl_endpoint_send(engine->endpoint, now, engine->batch, CL_SEND_BATCH);
        for (size_t sent = 0; sent < count;)
            sent += send_run(engine, &engine->batch[sent], count - sent);
        cl_peers_tell_neighbours(&engine->peers, &engine->meter, engine->endpoint); /* of losses, too */
        more = count > 0;
    }
    return more;
}

static void receive_packets(void *context)
{
    struct cl_engine *engine = context;
    for (uint32_t port = 0; port < engine->ports.count; port++) {
        bool more = (engine->readable >> port & 1) != 0;
        for (int i = 0; more && i < RECEIVE_BATCHES; i++) {
            struct arrival arrival = {engine, cl_now_us()};
            more = engine->ports.wire_type->receive(engine->ports.wire, port, receive_datagram, &arrival);
            atomic_fetch_add_explicit(&engine->receive_calls, 1, memory_order_relaxed);
            engine->last_heard_us = arrival.now_us;
        }
    }
    engine->readable = 0;
}

/* How long the thread naps before it polls. */
static uint64_t nap_us(struct cl_engine *engine, uint64_t at_us)
{
    if (engine->endpoint == NULL)
        return 0;
    return cl_nap_us(&engine->nap, cl_endpoint_lacking(engine->endpoint),
                     cl_endpoint_has_urgent(engine->endpoint, at_us), at_us);
}

/* ---- the loop ---- */

static uint64_t now_us(void *context)
{
    (void)context;
    return cl_now_us();
}

static void take_inbox(void *context)
{
    struct cl_engine *engine = context;
    pthread_mutex_lock(&engine->inbox);
    struct cl_operation *first = engine->handed_over.first;
    engine->handed_over = (struct cl_operation_list){.last = &engine->handed_over.first};
    pthread_mutex_unlock(&engine->inbox);
    cl_groups_take_all(first);
}

static void report_deaths(void *context)
{
    struct cl_engine *engine = context;
    for (uint32_t i = 0; i < engine->peers.watched_count; i++) {
        if (!engine->peers.watched[i].died)
            continue;
        engine->peers.watched[i].died = false;
        cl_meter_close(&engine->peers.watched[i].meter);
        if (engine->endpoint != NULL)
            cl_endpoint_peer_lost(engine->endpoint, engine->peers.watched[i].peer);
        cl_groups_peer_died(&engine->groups, engine->peers.watched[i].peer);
    }
}

static uint64_t full_ports(const struct cl_engine *engine)
{
    return engine->endpoint != NULL ? cl_endpoint_full_ports(engine->endpoint) : 0;
}

/* One turn. Returns until when the thread may sleep; 0: not at all. */
static uint64_t take_turn(struct cl_engine *engine)
{
    static const struct cl_turn_io IO = {.now_us = now_us,
                                         .take = take_inbox,
                                         .receive = receive_packets,
                                         .report_deaths = report_deaths,
                                         .send = send_packets};
    struct cl_turn turn = {&IO, engine, engine->endpoint, &engine->groups, &engine->news};
    return cl_turn_take(&turn);
}

/* Whether nobody looks at the ports: a calling thread has left them, and the engine's thread sleeps without them. In
 * naps, and while a port is full, that thread does not sleep on the set, but the set is on. */
static bool ports_are_left(struct cl_engine *engine)
{
    return engine->packet_wait != NULL && !atomic_load(&engine->port_set.on) && !atomic_load(&engine->ports_taken);
}

/* Sets the end of the engine thread's sleep: when its turn is due, or nobody has polled the ports for a while. So that
 * while counts from the last visit, which has looked at them. */
static void set_sleep(struct cl_engine *engine)
{
    uint64_t until_us = engine->due_us;
    if (ports_are_left(engine)) {
        uint64_t left_us = cl_now_us() + (cl_groups_are_busy(&engine->groups) ? GRACE_IN_FLIGHT_US : GRACE_US);
        until_us = left_us < until_us ? left_us : until_us;
    }
    if (until_us == engine->sleeps_until_us)
        return;
    struct itimerspec at = {
        .it_value = {.tv_sec = (time_t)(until_us / 1000000), .tv_nsec = (long)(until_us % 1000000) * 1000}};
    timerfd_settime(engine->timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
    engine->sleeps_until_us = until_us;
}

/* A turn of a thread that is not the engine's, under core. Returns whether there is more to do at once. */
static bool visit(struct cl_engine *engine)
{
    if (engine->readable == 0 && ports_are_left(engine))
        engine->readable = engine->ever_readable;
    uint64_t deadline = take_turn(engine);
    if ((full_ports(engine) & ~engine->polled_ports) != 0)
        cl_engine_wake(engine); /* it has to poll for room */
    else if (deadline > 0 && deadline < engine->due_us)
        engine->due_us = deadline;
    set_sleep(engine);
    return deadline == 0;
}

void cl_engine_attend(struct cl_engine *engine, bool unless_busy)
{
    if (pthread_mutex_trylock(&engine->core) != 0) {
        cl_engine_wake(engine);
        return;
    }
    bool busy = cl_groups_are_busy(&engine->groups) || full_ports(engine) != 0;
    /* Mostly there is more to do because a message had come before its receive: the second turn ends the receive. */
    if ((unless_busy && busy) || (visit(engine) && visit(engine)))
        cl_engine_wake(engine);
    pthread_mutex_unlock(&engine->core);
}

/* Takes core, waiting for the end of another thread's turn if it is short. Turns may come back to back, as long as
 * there is more to do: whoever waits for core then may wait for the whole of a bulk transfer. */
static bool lock_soon(struct cl_engine *engine)
{
    if (pthread_mutex_trylock(&engine->core) == 0)
        return true;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 1000 * SHORT_TURN_US;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return pthread_mutex_timedlock(&engine->core, &until) == 0;
}

bool cl_engine_take_turn(struct cl_engine *engine, struct cl_group *group)
{
    if (!lock_soon(engine)) {
        cl_engine_call(engine);
        return false;
    }
    cl_groups_wake(group);
    bool more = visit(engine);
    pthread_mutex_unlock(&engine->core);
    return more;
}

/* How a calling thread gives the ports back to the engine's. */
enum leaving {
    LEAVE_FOR_NOW, /* mostly it polls again soon: the engine's thread gets them in a while */
    LEAVE_ASLEEP,  /* the engine's thread gets them in its sleep */
    LEAVE_AWAKE,   /* the engine's thread has something to do: it wakes, and has them */
};

/* The caller holds core, unless LEAVE_AWAKE. */
static void leave_ports(struct cl_engine *engine, enum leaving leaving)
{
    /* The order matters: the engine's thread either sees that it has the ports, or is seen to leave them. */
    atomic_store(&engine->ports_taken, false);
    if (leaving == LEAVE_AWAKE) {
        cl_engine_wake(engine);
        return;
    }
    if (leaving == LEAVE_ASLEEP)
        cl_port_set_turn(&engine->port_set, true);
    set_sleep(engine);
}

bool cl_engine_take_ports(struct cl_engine *engine, bool unless_busy)
{
    if (atomic_load(&engine->keeps_ports))
        return false;
    bool asleep = pthread_mutex_trylock(&engine->core) == 0;
    bool takes = (asleep || !unless_busy) && !atomic_exchange(&engine->ports_taken, true);
    if (takes)
        cl_port_set_turn(&engine->port_set, false);
    if (takes && asleep)
        set_sleep(engine);
    if (asleep)
        pthread_mutex_unlock(&engine->core);
    return takes;
}

bool cl_engine_take_ports_turn(struct cl_engine *engine, uint64_t readable, const _Atomic uint32_t *done, bool again)
{
    bool waits = done != NULL && atomic_load(done) == 0;
    if (!(waits ? lock_soon(engine) : pthread_mutex_trylock(&engine->core) == 0)) {
        leave_ports(engine, LEAVE_AWAKE);
        return false;
    }
    engine->readable = readable;
    engine->ever_readable |= readable;
    bool more = readable != 0 && visit(engine);
    if (more && done != NULL && atomic_load(done) == 0)
        more = visit(engine);
    bool bulk = more || full_ports(engine) != 0 || (readable != 0 && nap_us(engine, cl_now_us()) > 0);
    bool stays = done != NULL && atomic_load(done) == 0 && !bulk;
    if (!stays)
        leave_ports(engine, bulk ? LEAVE_AWAKE : again ? LEAVE_FOR_NOW : LEAVE_ASLEEP);
    pthread_mutex_unlock(&engine->core);
    return stays;
}

/* The engine's thread goes to sleep, and has the ports unless a calling thread polls them. */
static void watch_ports(struct cl_engine *engine)
{
    bool taken = atomic_load(&engine->ports_taken);
    cl_port_set_turn(&engine->port_set, !taken);
    if (taken && !atomic_load(&engine->ports_taken)) /* it has left them meanwhile; see leave_ports */
        cl_port_set_turn(&engine->port_set, true);
}

/* Sleeps. Returns as ppoll does. `shared`: the last descriptor is that of the port set. */
static int sleep_on(struct cl_engine *engine, struct pollfd *fds, nfds_t count, uint64_t until_us, bool shared)
{
    for (;;) {
        if (engine->packet_wait != NULL)
            watch_ports(engine);
        uint64_t now = cl_now_us(), sleep_us = until_us <= now ? 0 : until_us - now;
        struct timespec timeout = {.tv_sec = (time_t)(sleep_us / 1000000),
                                   .tv_nsec = (long)(sleep_us % 1000000) * 1000};
        int ready = ppoll(fds, count, until_us == UINT64_MAX ? NULL : &timeout, NULL);
        bool only_ports = shared && ready == 1 && fds[count - 1].revents != 0;
        if (!only_ports || !atomic_load(&engine->ports_taken))
            return ready; /* else a calling thread receives the packets */
    }
}

static void sleep_until(struct cl_engine *engine, uint64_t deadline_us)
{
    struct pollfd fds[3 + CL_PORTS_MAX + CL_WATCHED_MAX];
    nfds_t count = 0;
    fds[count++] = (struct pollfd){.fd = engine->wake_fd, .events = POLLIN};
    fds[count++] = (struct pollfd){.fd = engine->bell.fd, .events = POLLIN};
    fds[count++] = (struct pollfd){.fd = engine->timer_fd, .events = POLLIN};
    nfds_t first_watched = count;
    uint32_t watched = engine->peers.watched_count;
    for (uint32_t i = 0; i < watched; i++)
        fds[count++] = (struct pollfd){.fd = engine->peers.watched[i].pidfd, .events = POLLIN};
    nfds_t first_port = count;
    uint64_t full = engine->polled_ports = full_ports(engine);
    bool shared = engine->packet_wait != NULL && full == 0; /* only this thread waits for room */
    if (shared)
        fds[count++] = (struct pollfd){.fd = engine->port_set.fd, .events = POLLIN};
    for (uint32_t i = 0; !shared && i < engine->ports.count; i++)
        fds[count++] = (struct pollfd){.fd = engine->ports.wire_type->descriptor(engine->ports.wire, i),
                                       .events = (short)(full >> i & 1 ? POLLIN | POLLOUT : POLLIN)};
    uint64_t now = cl_now_us();
    engine->due_us = engine->sleeps_until_us = deadline_us;
    uint64_t nap = deadline_us > now && full == 0 ? nap_us(engine, now) : 0;
    atomic_store(&engine->keeps_ports, nap > 0 || full != 0);
    pthread_mutex_unlock(&engine->core);

    int ready = nap > 0 ? sleep_on(engine, fds, first_port, now + nap, false)
                        : sleep_on(engine, fds, count, deadline_us, shared);
    atomic_fetch_add_explicit(&engine->wakeups, 1, memory_order_relaxed);

    pthread_mutex_lock(&engine->core);
    atomic_store(&engine->keeps_ports, false);
    engine->readable = nap > 0 || (shared && !atomic_load(&engine->port_set.on)) ? engine->ever_readable : 0;
    if (ready <= 0)
        return;
    if (nap == 0 && shared && fds[first_port].revents != 0)
        engine->readable |= cl_port_set_readable(&engine->port_set);
    for (uint32_t i = 0; nap == 0 && !shared && i < engine->ports.count; i++) {
        if ((fds[first_port + i].revents & ~POLLOUT) != 0)
            engine->readable |= UINT64_C(1) << i;
        if ((full >> i & 1) != 0 && fds[first_port + i].revents != 0) /* not every wire's descriptor tells of room */
            cl_endpoint_release_port(engine->endpoint, i);
    }
    engine->ever_readable |= engine->readable;
    if (fds[0].revents != 0) {
        eventfd_t ignored;
        eventfd_read(engine->wake_fd, &ignored);
    }
    if (fds[1].revents != 0 && cl_bell_drain(&engine->bell))
        cl_groups_call(&engine->groups);
    if (fds[2].revents != 0) {
        uint64_t ignored;
        (void)!read(engine->timer_fd, &ignored, sizeof ignored);
    }
    for (uint32_t i = 0; i < watched; i++) {
        if (fds[first_watched + i].revents == 0 || engine->peers.watched[i].pidfd < 0)
            continue;
        close(engine->peers.watched[i].pidfd);
        engine->peers.watched[i].pidfd = -1; /* poll ignores it from now on */
        engine->peers.watched[i].died = true;
    }
}

/* The longest silence of a live peer that misses an acknowledgement: it asks again after a probe timeout, and its
 * question takes time to arrive. */
static uint64_t quiet_us(const struct cl_engine *engine)
{
    return LINGER_QUIET_US + 2 * (uint64_t)cl_endpoint_slowest_us(engine->endpoint);
}

static void linger(struct cl_engine *engine)
{
    uint64_t start = cl_now_us(), quiet = quiet_us(engine);
    engine->last_heard_us = start;
    for (uint64_t now = start; now - start < LINGER_QUIETS_MAX * quiet && now - engine->last_heard_us < quiet;) {
        uint64_t deadline = take_turn(engine);
        now = cl_now_us();
        uint64_t until = engine->last_heard_us + quiet;
        sleep_until(engine, deadline < until ? deadline : until);
        now = cl_now_us();
    }
}

/* Asks for short time slices: on cores that it shares with training the thread needs little time, but soon. Linux 6.12
 * and later give a thread with shorter slices its turn sooner, not more of the core; older kernels ignore the request.
 */
static void ask_for_short_slices(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns, deadline_ns, period_ns;
    } attributes = {.size = sizeof attributes};
    if (syscall(SYS_sched_getattr, 0, &attributes, (unsigned)sizeof attributes, 0u) != 0 ||
        attributes.policy != SCHED_OTHER)
        return; /* the user has chosen a policy */
    attributes.runtime_ns = SLICE_NS;
    (void)syscall(SYS_sched_setattr, 0, &attributes, 0u);
}

static void *run(void *argument)
{
    struct cl_engine *engine = argument;
    prctl(PR_SET_NAME, "commlayer");
    prctl(PR_SET_TIMERSLACK, 1000ul); /* ns: pacing needs better than the default 50 us */
    ask_for_short_slices();
    pthread_mutex_lock(&engine->core);
    while (!atomic_load(&engine->stopping)) {
        uint64_t deadline = take_turn(engine);
        sleep_until(engine, deadline);
    }
    if (engine->endpoint != NULL && engine->peers.count > 0)
        linger(engine);
    pthread_mutex_unlock(&engine->core);
    return NULL;
}

int cl_engine_start(struct cl_engine *engine)
{
    return pthread_create(&engine->thread, NULL, run, engine) == 0 ? CL_OK : CL_ESYSTEM;
}

void cl_engine_wake(struct cl_engine *engine)
{
    eventfd_write(engine->wake_fd, 1);
}

void cl_engine_call(struct cl_engine *engine)
{
    cl_groups_call(&engine->groups);
    cl_engine_wake(engine);
}

void cl_engine_linger(cl_engine *engine)
{
    uint64_t start = cl_now_us(), heard = start, now = start, quiet = 0;
    do {
        usleep((useconds_t)quiet / 4);
        pthread_mutex_lock(&engine->core);
        quiet = engine->endpoint != NULL && engine->peers.count > 0 ? quiet_us(engine) : 0;
        if (engine->last_heard_us > heard)
            heard = engine->last_heard_us;
        pthread_mutex_unlock(&engine->core);
        now = cl_now_us();
    } while ((now - heard < quiet && now - start < LINGER_QUIETS_MAX * quiet) ||
             (atomic_load(&engine->eager_messages) > 0 && now - start < CL_EAGER_FLUSH_MAX_US));
}

int cl_engine_events(cl_engine *engine, struct cl_event *events, uint32_t capacity, uint64_t timeout_us)
{
    return cl_events_take(&engine->events, events, capacity, timeout_us);
}

void cl_engine_stop_events(cl_engine *engine)
{
    cl_events_stop(&engine->events);
}
