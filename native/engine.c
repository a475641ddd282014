/*
 * Engine: the only file with a thread. It is where the protocol (core/) meets the sockets (wire/): packets in, plans
 * forward, packets out, sleep until something happens.
 */
#include "engine.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    LINGER_QUIET_US =
        20000, /* at close: until no peer has needed an answer for so long, beyond the time it asks again */
    LINGER_QUIETS_MAX = 15, /* but no longer than so many times that */
    RECEIVE_BATCHES = 8,    /* between two looks at what may be sent */
    NAP_WINDOW_US = 2000,   /* over which the rate of arrivals is measured */
    NAP_PACKETS_LEAST = 16, /* in such a window: a bulk transfer */
    NAP_BATCH = 16,         /* packets to wait for */
    NAP_LEAST_US = 60,      /* less is not worth a system call */
    NAP_MOST_US = 1000,
    FOREVER_US = 1 << 30,
    EVENTS_INITIAL = 256,
};

uint64_t cl_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

const char *cl_error_text(int code)
{
    switch (code) {
    case CL_OK:
        return "success";
    case CL_EINVAL:
        return "invalid argument";
    case CL_ENOMEM:
        return "out of memory";
    case CL_ESYSTEM:
        return "the operating system refused a call the engine needs";
    case CL_ETIMEDOUT:
        return "the operation timed out";
    case CL_EPEERLOST:
        return "a peer died or stopped answering";
    case CL_EABORTED:
        return "the group was aborted because another rank failed first";
    case CL_ECLOSED:
        return "the engine or group is closed";
    case CL_EMISMATCH:
        return "ranks disagree on the operation";
    case CL_EAGAIN:
        return "not done yet";
    case CL_ENOLIBFABRIC:
        return "libfabric is not available";
    case CL_ENODEVICE:
        return "libfabric's provider has no datagram endpoint at this address";
    default:
        return "unknown error";
    }
}

/* ---- completion events ---- */

void cl_engine_push_event(struct cl_engine *engine, uint64_t token, int status)
{
    pthread_mutex_lock(&engine->events);
    if (engine->event_count == engine->event_capacity) {
        size_t capacity = engine->event_capacity == 0 ? EVENTS_INITIAL : 2 * engine->event_capacity;
        struct cl_event *ring = malloc(capacity * sizeof *ring);
        for (size_t i = 0; ring != NULL && i < engine->event_count; i++)
            ring[i] = engine->event_ring[(engine->event_head + i) % engine->event_capacity];
        if (ring != NULL) {
            free(engine->event_ring);
            engine->event_ring = ring;
            engine->event_capacity = capacity;
            engine->event_head = 0;
        }
    }
    if (engine->event_count < engine->event_capacity) /* else no memory for 24 bytes: the waiter's timeout reports it */
        engine->event_ring[(engine->event_head + engine->event_count++) % engine->event_capacity] =
            (struct cl_event){token, status};
    pthread_cond_signal(&engine->events_ready);
    pthread_mutex_unlock(&engine->events);
}

int cl_engine_events(cl_engine *engine, struct cl_event *events, uint32_t capacity, uint64_t timeout_us)
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
    pthread_mutex_lock(&engine->events);
    while (engine->event_count == 0 && !engine->events_stopped)
        if (pthread_cond_timedwait(&engine->events_ready, &engine->events, &until) == ETIMEDOUT)
            break;
    while (count < capacity && engine->event_count > 0) {
        events[count++] = engine->event_ring[engine->event_head];
        engine->event_head = (engine->event_head + 1) % engine->event_capacity;
        engine->event_count--;
    }
    bool stopped = engine->events_stopped && count == 0;
    pthread_mutex_unlock(&engine->events);
    return stopped ? CL_ECLOSED : (int)count;
}

void cl_engine_stop_events(cl_engine *engine)
{
    pthread_mutex_lock(&engine->events);
    engine->events_stopped = true;
    pthread_cond_broadcast(&engine->events_ready);
    pthread_mutex_unlock(&engine->events);
}

/* ---- packets, under core ---- */

void cl_engine_drop_payloads(struct cl_engine *engine)
{
    size_t kept = 0;
    for (size_t i = engine->batch_first; i < engine->batch_count; i++)
        if (engine->batch[i].payload_length == 0)
            engine->batch[kept++] = engine->batch[i];
    engine->batch_first = 0;
    engine->batch_count = kept;
}

struct arrival {
    struct cl_engine *engine;
    uint64_t now_us;
};

static void receive_datagram(void *context, const uint8_t *bytes, size_t length, uint64_t received_us)
{
    const struct arrival *arrival = context;
    uint64_t now = arrival->now_us;
    if (arrival->engine->endpoint == NULL)
        return;
    arrival->engine->arrivals++;
    cl_endpoint_receive(arrival->engine->endpoint, bytes, length,
                        received_us == 0 || received_us > now ? now : received_us, now);
}

static bool flush_batch(struct cl_engine *engine)
{
    struct cl_wire_datagram out[CL_SEND_BATCH];
    size_t count = 0, first = engine->batch_first;
    for (size_t i = first; i < engine->batch_count; i++) {
        const struct cl_datagram *datagram = &engine->batch[i];
        out[count++] = (struct cl_wire_datagram){.link = engine->links[datagram->peer][datagram->path].number,
                                                 .head_length = datagram->head_length,
                                                 .payload_length = datagram->payload_length,
                                                 .head = datagram->head,
                                                 .payload = datagram->payload};
    }
    if (count > 0) {
        engine->batch_first += engine->wire_type->send(engine->wire, out, count);
        atomic_fetch_add_explicit(&engine->send_calls, 1, memory_order_relaxed);
    }
    if (engine->batch_first < engine->batch_count)
        return false;
    engine->batch_count = engine->batch_first = 0;
    return true;
}

/* Returns false when the wire is full: poll for room. */
static bool send_packets(struct cl_engine *engine)
{
    for (;;) {
        if (!flush_batch(engine))
            return false;
        engine->batch_count = cl_endpoint_send(engine->endpoint, cl_now_us(), engine->batch, CL_SEND_BATCH);
        if (engine->batch_count == 0)
            return true;
    }
}

static void receive_packets(struct cl_engine *engine)
{
    for (uint32_t port = 0; port < engine->port_count; port++) {
        bool more = (engine->readable >> port & 1) != 0;
        for (int i = 0; more && i < RECEIVE_BATCHES; i++) {
            struct arrival arrival = {engine, cl_now_us()};
            more = engine->wire_type->receive(engine->wire, port, receive_datagram, &arrival);
            atomic_fetch_add_explicit(&engine->receive_calls, 1, memory_order_relaxed);
            engine->last_heard_us = arrival.now_us;
        }
    }
    engine->readable = 0;
}

/* In a bulk transfer every packet would wake the thread. When they come steadily it naps first, for as long as a batch
 * takes to come in; on fast networks that is no time at all, and with few packets it does not nap. Acknowledgements and
 * pacing are made for batches of this size. */
static uint64_t nap_us(struct cl_engine *engine, uint64_t now_us)
{
    uint64_t passed = now_us - engine->arrivals_since_us;
    if (passed >= NAP_WINDOW_US) {
        engine->arrivals_per_us = (double)engine->arrivals / (double)passed;
        engine->arrivals = 0;
        engine->arrivals_since_us = now_us;
    }
    if (engine->arrivals_per_us * NAP_WINDOW_US < NAP_PACKETS_LEAST)
        return 0;
    double nap = NAP_BATCH / engine->arrivals_per_us;
    return nap < NAP_LEAST_US ? 0 : nap > NAP_MOST_US ? NAP_MOST_US : (uint64_t)nap;
}

/* Returns whether there were any: their operations can go on then. */
static bool take_completions(struct cl_engine *engine)
{
    bool any = false;
    struct cl_completion completion;
    while (cl_endpoint_next_completion(engine->endpoint, &completion)) {
        any = true;
        const struct cl_executor *executor = cl_executor_complete(completion.context, completion.status);
        if (completion.status == CL_OK || completion.status == CL_EABORTED)
            continue; /* of an abort, the reason follows below */
        const struct cl_operation *operation = cl_executor_owner(executor);
        cl_group_fail(operation->group, completion.status, cl_group_rank_of(operation->group, completion.peer));
    }
    uint32_t id;
    uint16_t blame;
    int reason;
    while (cl_endpoint_next_abort(engine->endpoint, &id, &blame, &reason)) {
        any = true;
        for (struct cl_group *group = engine->groups; group != NULL; group = group->next) {
            if (group->id != id)
                continue;
            cl_group_hear(group, reason, cl_group_rank_of(group, blame));
        }
    }
    return any;
}

/* ---- the loop ---- */

static void take_inbox(struct cl_engine *engine)
{
    pthread_mutex_lock(&engine->inbox);
    struct cl_operation *operation = engine->inbox_first;
    engine->inbox_first = NULL;
    engine->inbox_last = &engine->inbox_first;
    pthread_mutex_unlock(&engine->inbox);
    while (operation != NULL) {
        struct cl_operation *next = operation->next;
        operation->next = NULL;
        *operation->group->last = operation;
        operation->group->last = &operation->next;
        operation = next;
    }
}

static bool progress_groups(struct cl_engine *engine, uint64_t *deadline_us)
{
    bool more = false;
    uint64_t now = cl_now_us();
    for (struct cl_group *group = engine->groups; group != NULL; group = group->next)
        more |= cl_group_progress(group, now, deadline_us);
    return more;
}

static bool arm_bells(struct cl_engine *engine, uint64_t *deadline_us)
{
    bool armed = true;
    uint64_t now = cl_now_us();
    for (struct cl_group *group = engine->groups; group != NULL; group = group->next)
        armed &= cl_group_arm_bells(group, now, deadline_us);
    return armed;
}

static void report_deaths(struct cl_engine *engine)
{
    for (uint32_t i = 0; i < engine->watched_count; i++) {
        if (!engine->watched[i].died)
            continue;
        engine->watched[i].died = false;
        if (engine->endpoint != NULL)
            cl_endpoint_peer_lost(engine->endpoint, engine->watched[i].peer);
        for (struct cl_group *group = engine->groups; group != NULL; group = group->next)
            cl_group_peer_died(group, engine->watched[i].peer);
    }
}

/* One turn. Returns until when the thread may sleep (0: not at all) and whether it waits for room on the wire. */
static uint64_t turn(struct cl_engine *engine, bool *wire_full)
{
    uint64_t deadline = UINT64_MAX;
    *wire_full = false;
    take_inbox(engine);
    if (engine->wire != NULL)
        receive_packets(engine);
    report_deaths(engine); /* after what they said last */
    if (engine->endpoint != NULL) {
        uint64_t now = cl_now_us();
        if (cl_endpoint_next_timeout(engine->endpoint) <= now)
            cl_endpoint_timeout(engine->endpoint, now);
        take_completions(engine);
    }
    bool more = progress_groups(engine, &deadline);
    if (engine->endpoint != NULL) {
        *wire_full = !send_packets(engine);
        more |= take_completions(engine); /* of messages that had come before their receive was posted */
        uint64_t next = cl_endpoint_next_timeout(engine->endpoint);
        if (next < deadline && !*wire_full)
            deadline = next;
    }
    return more || !arm_bells(engine, &deadline) ? 0 : deadline;
}

void cl_engine_attend(struct cl_engine *engine)
{
    if (pthread_mutex_trylock(&engine->core) != 0) {
        cl_engine_wake(engine);
        return;
    }
    bool wire_full;
    uint64_t deadline = turn(engine, &wire_full);
    if (wire_full || deadline == 0) {
        cl_engine_wake(engine);
    } else if (deadline < engine->sleeps_until_us) {
        struct itimerspec at = {
            .it_value = {.tv_sec = (time_t)(deadline / 1000000), .tv_nsec = (long)(deadline % 1000000) * 1000}};
        timerfd_settime(engine->timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
        engine->sleeps_until_us = deadline;
    }
    pthread_mutex_unlock(&engine->core);
}

static void sleep_until(struct cl_engine *engine, uint64_t deadline_us, bool wire_full)
{
    struct pollfd fds[3 + CL_PORTS_MAX + CL_WATCHED_MAX];
    nfds_t count = 0;
    fds[count++] = (struct pollfd){.fd = engine->wake_fd, .events = POLLIN};
    fds[count++] = (struct pollfd){.fd = engine->bell_fd, .events = POLLIN};
    fds[count++] = (struct pollfd){.fd = engine->timer_fd, .events = POLLIN};
    nfds_t first_port = count;
    uint32_t full_port = UINT32_MAX; /* room at another one would not help the first packet that waits */
    if (wire_full)
        full_port =
            engine->links[engine->batch[engine->batch_first].peer][engine->batch[engine->batch_first].path].port;
    for (uint32_t i = 0; i < engine->port_count; i++)
        fds[count++] = (struct pollfd){.fd = engine->wire_type->descriptor(engine->wire, i),
                                       .events = (short)(i == full_port ? POLLIN | POLLOUT : POLLIN)};
    nfds_t first_watched = count;
    uint32_t watched = engine->watched_count;
    engine->sleeps_until_us = deadline_us;
    for (uint32_t i = 0; i < watched; i++)
        fds[count++] = (struct pollfd){.fd = engine->watched[i].pidfd, .events = POLLIN};
    pthread_mutex_unlock(&engine->core);

    uint64_t now = cl_now_us();
    uint64_t nap = deadline_us > now && !wire_full ? nap_us(engine, now) : 0;
    uint64_t sleep_us = nap > 0 ? nap : deadline_us <= now ? 0 : deadline_us - now;
    struct timespec timeout = {.tv_sec = (time_t)(sleep_us / 1000000), .tv_nsec = (long)(sleep_us % 1000000) * 1000};
    int ready = ppoll(fds, nap > 0 ? first_port : count, sleep_us >= FOREVER_US ? NULL : &timeout, NULL);
    atomic_fetch_add_explicit(&engine->wakeups, 1, memory_order_relaxed);

    pthread_mutex_lock(&engine->core);
    engine->readable = nap > 0 ? engine->ever_readable : 0;
    if (ready <= 0)
        return;
    for (uint32_t i = 0; i < engine->port_count; i++)
        if ((fds[first_port + i].revents & ~POLLOUT) != 0)
            engine->readable |= 1u << i;
    engine->ever_readable |= engine->readable;
    if (fds[0].revents != 0) {
        eventfd_t ignored;
        eventfd_read(engine->wake_fd, &ignored);
    }
    if (fds[1].revents != 0)
        cl_bell_drain(engine->bell_fd);
    if (fds[2].revents != 0) {
        uint64_t ignored;
        (void)!read(engine->timer_fd, &ignored, sizeof ignored);
    }
    for (uint32_t i = 0; i < watched; i++) {
        if (fds[first_watched + i].revents == 0 || engine->watched[i].pidfd < 0)
            continue;
        close(engine->watched[i].pidfd);
        engine->watched[i].pidfd = -1; /* poll ignores it from now on */
        engine->watched[i].died = true;
    }
}

/* How long the slowest peer that misses an acknowledgement may be silent: it asks again after a probe timeout, and the
 * question needs its time, too. */
static uint64_t quiet_us(const struct cl_engine *engine)
{
    return LINGER_QUIET_US + 2 * (uint64_t)cl_endpoint_slowest_us(engine->endpoint);
}

static void linger(struct cl_engine *engine)
{
    uint64_t start = cl_now_us(), quiet = quiet_us(engine);
    engine->last_heard_us = start;
    for (uint64_t now = start; now - start < LINGER_QUIETS_MAX * quiet && now - engine->last_heard_us < quiet;) {
        bool wire_full;
        uint64_t deadline = turn(engine, &wire_full);
        now = cl_now_us();
        uint64_t until = engine->last_heard_us + quiet;
        sleep_until(engine, deadline < until ? deadline : until, wire_full);
        now = cl_now_us();
    }
}

static void *run(void *argument)
{
    struct cl_engine *engine = argument;
    prctl(PR_SET_NAME, "commlayer");
    prctl(PR_SET_TIMERSLACK, 1000ul); /* ns: pacing needs better than the default 50 us */
    pthread_mutex_lock(&engine->core);
    while (!atomic_load(&engine->stopping)) {
        bool wire_full;
        uint64_t deadline = turn(engine, &wire_full);
        sleep_until(engine, deadline, wire_full);
    }
    if (engine->endpoint != NULL && engine->peer_count > 0)
        linger(engine);
    pthread_mutex_unlock(&engine->core);
    return NULL;
}

void cl_engine_wake(struct cl_engine *engine)
{
    eventfd_write(engine->wake_fd, 1);
}

/* ---- opening and closing ---- */

static void free_engine(struct cl_engine *engine)
{
    for (uint32_t i = 0; i < engine->watched_count; i++)
        if (engine->watched[i].pidfd >= 0)
            close(engine->watched[i].pidfd);
    if (engine->endpoint != NULL)
        cl_endpoint_destroy(engine->endpoint);
    if (engine->wire != NULL)
        engine->wire_type->close(engine->wire);
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    if (engine->bell_fd >= 0)
        close(engine->bell_fd);
    if (engine->timer_fd >= 0)
        close(engine->timer_fd);
    for (uint32_t i = 0; engine->links != NULL && i < CL_PEERS_MAX; i++)
        free(engine->links[i]);
    free(engine->links);
    free(engine->batch);
    free(engine->event_ring);
    pthread_mutex_destroy(&engine->core);
    pthread_mutex_destroy(&engine->inbox);
    pthread_mutex_destroy(&engine->events);
    pthread_cond_destroy(&engine->events_ready);
    free(engine);
}

static int open_wire(struct cl_engine *engine, const struct cl_engine_options *options)
{
    if (strcmp(options->wire, "none") == 0)
        return CL_OK;
    engine->wire_type = cl_wire_find(options->wire);
    if (engine->wire_type == NULL || options->address_count == 0 || options->address_count > CL_PORTS_MAX)
        return CL_EINVAL;
    struct cl_wire_config config = {.addresses = options->addresses,
                                    .address_count = options->address_count,
                                    .datagram_bytes = options->datagram_bytes,
                                    .loss_ppm = options->mem_loss_ppm,
                                    .seed = options->mem_seed,
                                    .provider = options->ofi_provider};
    int status = engine->wire_type->open(&config, &engine->wire);
    if (status != CL_OK)
        return status;
    engine->port_count = options->address_count;
    if (engine->wire_type->datagram_limit != NULL) {
        uint32_t limit = engine->wire_type->datagram_limit(engine->wire);
        if (limit < engine->options.datagram_bytes)
            engine->options.datagram_bytes = limit;
    }
    return CL_OK;
}

int cl_engine_open(const struct cl_engine_options *options, cl_engine **out)
{
    if (options == NULL || out == NULL || options->wire == NULL || options->congestion == NULL ||
        options->auth > CL_AUTH_OFF || strlen(options->congestion) >= sizeof((struct cl_engine *)0)->congestion)
        return CL_EINVAL;
    struct cl_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return CL_ENOMEM;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->core, NULL);
    pthread_mutex_init(&engine->inbox, NULL);
    pthread_mutex_init(&engine->events, NULL);
    pthread_cond_init(&engine->events_ready, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->inbox_last = &engine->inbox_first;
    engine->options = *options;
    strcpy(engine->congestion, options->congestion);
    engine->bell_fd = -1;
    engine->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    engine->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    engine->links = calloc(CL_PEERS_MAX, sizeof *engine->links);
    engine->batch = calloc(CL_SEND_BATCH, sizeof *engine->batch);
    int status = engine->links == NULL || engine->batch == NULL ? CL_ENOMEM : CL_OK;
    if (status == CL_OK)
        status = engine->wake_fd < 0 || engine->timer_fd < 0 ? CL_ESYSTEM : CL_OK;
    if (status == CL_OK) {
        engine->bell_fd = cl_bell_open(engine->bell);
        status = engine->bell_fd < 0 ? CL_ESYSTEM : open_wire(engine, options);
    }
    if (status == CL_OK && pthread_create(&engine->thread, NULL, run, engine) != 0)
        status = CL_ESYSTEM;
    if (status != CL_OK) {
        free_engine(engine);
        return status;
    }
    *out = engine;
    return CL_OK;
}

void cl_engine_close(cl_engine *engine)
{
    if (engine == NULL)
        return;
    for (;;) {
        pthread_mutex_lock(&engine->core);
        struct cl_group *group = engine->groups;
        pthread_mutex_unlock(&engine->core);
        if (group == NULL)
            break;
        cl_group_close(group);
    }
    atomic_store(&engine->stopping, true);
    cl_engine_wake(engine);
    pthread_join(engine->thread, NULL);
    cl_engine_stop_events(engine);
    free_engine(engine);
}

void cl_engine_linger(cl_engine *engine)
{
    uint64_t start = cl_now_us(), heard = start, now = start, quiet = 0;
    do {
        usleep((useconds_t)quiet / 4);
        pthread_mutex_lock(&engine->core);
        quiet = engine->endpoint != NULL && engine->peer_count > 0 ? quiet_us(engine) : 0;
        if (engine->last_heard_us > heard)
            heard = engine->last_heard_us;
        pthread_mutex_unlock(&engine->core);
        now = cl_now_us();
    } while (now - heard < quiet && now - start < LINGER_QUIETS_MAX * quiet);
}

int cl_engine_port(cl_engine *engine, uint32_t index, uint32_t *port)
{
    if (engine->wire == NULL || index >= engine->port_count)
        return CL_EINVAL;
    return engine->wire_type->port_number(engine->wire, index, port);
}

int cl_engine_address(cl_engine *engine, uint32_t index, char *text)
{
    text[0] = '\0';
    if (engine->wire == NULL || index >= engine->port_count)
        return CL_EINVAL;
    return engine->wire_type->address == NULL ? CL_OK
                                              : engine->wire_type->address(engine->wire, index, text, CL_ADDRESS_BYTES);
}

int cl_engine_bell(cl_engine *engine, char *name)
{
    memcpy(name, engine->bell, CL_BELL_BYTES);
    return CL_OK;
}

int cl_engine_identify(cl_engine *engine, uint64_t job, const uint8_t *key, uint16_t self, uint16_t epoch)
{
    pthread_mutex_lock(&engine->core);
    int status = CL_OK;
    if (engine->endpoint != NULL) {
        bool same = engine->job == job && engine->self == self && engine->epoch == epoch &&
                    memcmp(engine->key, key, sizeof engine->key) == 0;
        status = same ? CL_OK : CL_EINVAL;
    } else if (engine->wire != NULL) {
        struct cl_endpoint_config config = {.auth = (enum cl_auth)engine->options.auth,
                                            .job = job,
                                            .self = self,
                                            .epoch = epoch,
                                            .datagram_bytes = engine->options.datagram_bytes,
                                            .stash_limit_bytes = engine->options.stash_bytes,
                                            .peer_timeout_us = engine->options.peer_timeout_us,
                                            .congestion = engine->congestion,
                                            .fixed_rate_bps = engine->options.fixed_rate_bps,
                                            .seed = (uint32_t)job ^ self};
        memcpy(config.key, key, sizeof config.key);
        memcpy(engine->key, key, sizeof engine->key);
        status = cl_endpoint_create(&config, &engine->endpoint);
        engine->job = job;
        engine->self = self;
        engine->epoch = epoch;
    }
    pthread_mutex_unlock(&engine->core);
    return status;
}

int cl_engine_add_peer(cl_engine *engine, uint16_t peer, uint32_t path_count, const uint32_t *local,
                       const char *const *remote_addresses, const uint32_t *remote_ports)
{
    if (peer >= CL_PEERS_MAX || path_count == 0 || path_count > CL_PORTS_MAX)
        return CL_EINVAL;
    pthread_mutex_lock(&engine->core);
    int status = engine->endpoint == NULL ? CL_EINVAL : CL_OK;
    if (status == CL_OK && engine->links[peer] == NULL) {
        struct cl_link *links = calloc(path_count, sizeof *links);
        status = links == NULL ? CL_ENOMEM : CL_OK;
        for (uint32_t i = 0; status == CL_OK && i < path_count; i++) {
            int link = local[i] >= engine->port_count
                           ? CL_EINVAL
                           : engine->wire_type->link(engine->wire, local[i], remote_addresses[i], remote_ports[i]);
            if (link < 0)
                status = link;
            else
                links[i] = (struct cl_link){(uint32_t)link, local[i]};
        }
        if (status == CL_OK)
            status = cl_endpoint_add_peer_through(engine->endpoint, peer, (uint16_t)path_count, local);
        if (status == CL_OK) {
            engine->links[peer] = links;
            engine->peer_count++;
        } else {
            free(links);
        }
    }
    pthread_mutex_unlock(&engine->core);
    return status;
}

int cl_engine_watch_process(cl_engine *engine, uint16_t peer, int32_t pid)
{
    int status = CL_OK;
    pthread_mutex_lock(&engine->core);
    bool known = false;
    for (uint32_t i = 0; i < engine->watched_count; i++)
        known |= engine->watched[i].peer == peer;
    if (!known && engine->watched_count == CL_WATCHED_MAX) {
        status = CL_ENOMEM;
    } else if (!known) {
        int fd = (int)syscall(SYS_pidfd_open, pid, 0);
        if (fd >= 0 || errno == ESRCH)
            engine->watched[engine->watched_count++] = (struct watched){.peer = peer, .died = fd < 0, .pidfd = fd};
        else
            status = CL_ESYSTEM;
    }
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine);
    return status;
}

int cl_engine_read_stats(cl_engine *engine, struct cl_engine_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    pthread_mutex_lock(&engine->core);
    if (engine->endpoint != NULL) {
        const struct cl_endpoint_stats *from = cl_endpoint_stats(engine->endpoint);
        stats->packets_sent = from->packets_sent;
        stats->packets_received = from->packets_received;
        stats->payload_bytes_sent = from->payload_bytes_sent;
        stats->payload_bytes_received = from->payload_bytes_received;
        stats->packets_retransmitted = from->packets_retransmitted;
        stats->packets_lost = from->packets_lost;
        stats->packets_spurious = from->packets_spurious;
        stats->packets_duplicate = from->packets_duplicate;
        stats->packets_foreign = from->packets_foreign;
        stats->packets_forged = from->packets_forged;
        stats->packets_replayed = from->packets_replayed;
        stats->packets_stashed = from->packets_stashed;
        stats->packets_stash_dropped = from->packets_stash_dropped;
        stats->acks_sent = from->acks_sent;
        stats->acks_received = from->acks_received;
        stats->probes_sent = from->probes_sent;
    }
    pthread_mutex_unlock(&engine->core);
    stats->operations_done = atomic_load(&engine->operations_done);
    stats->operations_failed = atomic_load(&engine->operations_failed);
    stats->wakeups = atomic_load(&engine->wakeups);
    stats->send_calls = atomic_load(&engine->send_calls);
    stats->receive_calls = atomic_load(&engine->receive_calls);
    return CL_OK;
}
