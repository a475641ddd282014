#include "engine/member.h"

#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/clock.h"
#include "os/process.h"

enum { FLUSH_STEP_US = 200 /* time between two looks */ };

_Static_assert(offsetof(struct cl_member, group) == 0, "cl_group is the member's address");
_Static_assert((int)CL_HOST_RING_HEAD_BYTES == (int)CL_RING_HEAD_BYTES, "a host has memory for the head of a ring");
_Static_assert((int)CL_HOST_CLASSES == (int)CL_CLASSES, "a host has memory for each class");
_Static_assert((int)CL_HOST_QUEUES == (int)CL_GROUP_QUEUES, "and counters for each queue");

/* ---- the group's io: see group/io.h ---- */

static void wake(void *context)
{
    const struct cl_member *member = context;
    cl_engine_call(member->engine);
}

static void wake_host(void *context)
{
    const struct cl_member *member = context;
    cl_host_wake_all(member->host);
}

static void post(void *context, uint32_t queue, uint32_t value)
{
    const struct cl_member *member = context;
    cl_host_post(member->host, queue, value);
}

static void request_bell(void *context, uint32_t queue, uint32_t index)
{
    const struct cl_member *member = context;
    cl_host_request_bell(member->host, queue, index);
}

/* Whether the process of a neighbour will not go on: it dies, or has been stopped for the peer timeout, after which a
 * silent rank of another host is lost, too. Waiting threads look at it now and then. After a long time without a look,
 * the stop counts from now. */
static bool has_halted(struct cl_neighbour *neighbour, uint64_t timeout_us, uint64_t now_us)
{
    uint64_t looked_us = atomic_load(&neighbour->looked_us); /* perhaps by another thread, after now_us */
    uint64_t unseen_us = now_us > looked_us ? now_us - looked_us : 0;
    if (neighbour->pid == 0 || unseen_us < CL_SLEEP_MAX_US)
        return false;
    atomic_store(&neighbour->looked_us, now_us);
    uint64_t since_us = atomic_load(&neighbour->stopped_us);
    enum cl_process_state state = cl_process_state(neighbour->pid);
    if (state != CL_PROCESS_STOPPED)
        since_us = 0;
    else if (since_us == 0 || unseen_us > 10 * CL_SLEEP_MAX_US)
        since_us = now_us;
    atomic_store(&neighbour->stopped_us, since_us);
    return state == CL_PROCESS_DIES || (since_us != 0 && timeout_us != 0 && now_us - since_us >= timeout_us);
}

static bool is_gone(void *context, uint32_t index, uint64_t now_us)
{
    const struct cl_member *member = context;
    return cl_host_left(member->host, index) ||
           has_halted(&member->neighbours[index], member->engine->options.peer_timeout_us, now_us);
}

static void abort_host(void *context, int reason, uint32_t culprit)
{
    const struct cl_member *member = context;
    cl_host_abort(member->host, reason, culprit);
}

static int aborted(void *context, uint32_t *culprit)
{
    const struct cl_member *member = context;
    return cl_host_aborted(member->host, culprit);
}

static void notify(void *context, uint32_t index, bool at_once)
{
    const struct cl_member *member = context;
    cl_host_notify(member->host, index, at_once);
}

static void listen_for(void *context, bool all)
{
    const struct cl_member *member = context;
    struct cl_doorbell *doorbell = cl_host_doorbell(member->host, member->group.channels.self);
    uint32_t wish = all ? CL_DOORBELL_ALL : CL_DOORBELL_REQUESTS;
    if (atomic_load(&doorbell->wish) != wish)
        atomic_store(&doorbell->wish, wish);
    atomic_thread_fence(memory_order_seq_cst); /* the rings must not be read before this */
}

static int read_memory(void *context, uint32_t index, uint64_t address, void *target, uint64_t bytes)
{
    const struct cl_member *member = context;
    return cl_host_read_memory(member->host, index, address, target, bytes);
}

/* Adds an operation that ended well to the counters of shared memory and lags. */
static void count_operation(struct cl_member *member, const struct cl_operation *operation)
{
    bool received = operation->kind == CL_OPERATION_RECEIVE && operation->name == CL_LOCAL;
    uint64_t bytes = received ? operation->transfer.length : operation->plan->shared_bytes;
    if (bytes > 0)
        atomic_fetch_add(&member->engine->shared_bytes_received, bytes);
    if (operation->waited_us == 0)
        return;
    atomic_fetch_add(&member->lags[operation->last_rank].last, 1);
    atomic_fetch_add(&member->lags[operation->last_rank].waited_us, operation->waited_us);
}

/* Tells the caller of the end. */
static void tell(struct cl_news_item *news)
{
    struct cl_submission *submission = (void *)((char *)news - offsetof(struct cl_submission, news));
    bool message = submission->operation.kind != CL_OPERATION_PLAN;
    struct cl_member *member = cl_member_of(submission->operation.group);
    cl_submission_end(submission, submission->ended, &member->engine->events); /* which may free it */
    if (message && member->message_wait != NULL)
        cl_doorbell_wake(cl_host_doorbell(member->host, member->group.channels.self));
}

static void tell_early(struct cl_news_item *news)
{
    struct cl_submission *submission = (void *)((char *)news - offsetof(struct cl_submission, news));
    cl_submission_publish_early(submission, &cl_member_of(submission->operation.group)->engine->events);
}

/* The caller knows of the end, and may have let go of the operation. */
static void tell_last(struct cl_news_item *news)
{
    struct cl_submission *submission = (void *)((char *)news - offsetof(struct cl_submission, last));
    cl_submission_end(submission, submission->ended, &cl_member_of(submission->operation.group)->engine->events);
}

static bool end_early(void *context, struct cl_operation *operation)
{
    struct cl_member *member = context;
    struct cl_engine *engine = member->engine;
    struct cl_submission *submission = (struct cl_submission *)operation;
    if (!cl_eager_reserve(&member->eager, cl_operation_copied_bytes(operation)))
        return false;
    if (!cl_operation_give_back(operation)) {
        cl_eager_release(&member->eager, cl_operation_copied_bytes(operation));
        return false;
    }
    atomic_fetch_add(&engine->eager_messages, 1);
    atomic_fetch_add(&engine->operations_done, 1);
    submission->early = true;
    operation->times.ended_us = cl_now_us();
    count_operation(member, operation);
    submission->news.tell = tell_early;
    cl_news_add(&engine->news, &submission->news);
    return true;
}

void cl_member_ended(void *context, struct cl_operation *operation, int status)
{
    struct cl_member *member = context;
    struct cl_engine *engine = member->engine;
    if (status == CL_OK && !operation->early)
        count_operation(member, operation);
    operation->times.ended_us = cl_now_us(); /* its last turn may have been long */
    if (!operation->early)
        atomic_fetch_add(status == CL_OK ? &engine->operations_done : &engine->operations_failed, 1);
    struct cl_submission *submission = (struct cl_submission *)operation;
    if (submission->early) {
        cl_eager_release(&member->eager, cl_operation_copied_bytes(operation));
        atomic_fetch_sub(&engine->eager_messages, 1);
    }
    submission->ended = status;
    if (operation->early) {
        submission->last.tell = tell_last;
        cl_news_add(&engine->news, &submission->last);
        return;
    }
    submission->news.tell = tell;
    if (operation->plan->network_steps > 0)
        cl_news_add(&engine->news, &submission->news);
    else /* no other rank waits for packets; and this thread may be the caller's */
        tell(&submission->news);
}

int cl_group_awaited(cl_group *group, uint8_t *awaited)
{
    struct cl_member *member = cl_member_of(group);
    memset(awaited, 0, group->size);
    pthread_mutex_lock(&member->engine->core); /* executors belong to the engine thread */
    cl_group_await(group, awaited);
    pthread_mutex_unlock(&member->engine->core);
    const struct cl_host_queues *queues = &group->host_queues;
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        for (uint32_t i = 0; i < queues->local_count; i++) {
            uint64_t sleeps_for = atomic_load(&member->neighbours[i].sleeps_for[queue]);
            if (sleeps_for > 0 && !cl_host_queue_reached(&queues->queues[queue], i, (uint32_t)(sleeps_for - 1)))
                awaited[queues->local[i]] = 1;
        }
    awaited[group->rank] = 0;
    return CL_OK;
}

int cl_group_read_lags(cl_group *group, struct cl_lag *lags, uint32_t capacity)
{
    const struct cl_member *member = cl_member_of(group);
    for (uint32_t rank = 0; rank < group->size && rank < capacity; rank++)
        lags[rank] = (struct cl_lag){atomic_load(&member->lags[rank].last), atomic_load(&member->lags[rank].waited_us)};
    return (int)group->size;
}

/* ---- opening ---- */

static void map_queues(struct cl_host_queues *queues, struct cl_host *host)
{
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++) {
        uint32_t class = cl_host_queue_class(queue);
        for (uint32_t i = 0; i < queues->local_count; i++) {
            struct cl_host_place place = {.counter = cl_host_counter(host, queue, i)};
            for (uint32_t parity = 0; parity < 2; parity++) {
                place.staging[parity] = cl_host_staging(host, class, i, cl_host_queue_half(queue, parity));
                place.signatures[parity] = cl_host_signature(host, queue, i, parity);
            }
            cl_host_queues_map(queues, queue, i, &place);
        }
    }
}

static int map_channels(struct cl_member *member)
{
    struct cl_channels *channels = &member->group.channels;
    struct cl_host *host = member->host;
    uint32_t self = channels->self;
    for (uint32_t i = 0; i < channels->count; i++)
        if (i != self)
            cl_channels_map(channels, i, cl_host_ring(host, self, i), cl_host_ring(host, i, self),
                            cl_host_ring_bytes(host));
    cl_channels_listen(channels, &cl_host_doorbell(host, self)->requests);
    member->message_wait =
        cl_message_wait_create(member->engine, &member->group, cl_host_doorbell(host, self), member->spin_us > 0);
    return member->message_wait != NULL ? CL_OK : CL_ENOMEM;
}

/* Maps the memory that the ranks of this host share. A rank alone on its host has some, too: its plans may post. */
static int map_host(struct cl_member *member, const struct cl_group_options *options)
{
    struct cl_host_queues *queues = &member->group.host_queues;
    bool alone = options->local_count == 1;
    int32_t fd = options->host_fd;
    int status = alone ? cl_host_create(1, options->staging_bytes, &fd) : CL_OK;
    if (status == CL_OK)
        status = cl_host_map(fd, options->local_count, queues->self, options->staging_bytes,
                             alone ? member->engine->bell.name : options->bells, &member->engine->bell, &member->host);
    if (alone)
        cl_host_close_fd(fd);
    if (status == CL_OK)
        map_queues(queues, member->host);
    if (status == CL_OK && !alone)
        status = map_channels(member);
    return status;
}

static void free_member(struct cl_member *member)
{
    cl_message_wait_close(member->message_wait);
    cl_group_free(&member->group);
    cl_host_unmap(member->host);
    free(member->neighbours);
    free(member->lags);
    pthread_mutex_destroy(&member->submitting);
    free(member);
}

/* The engine thread runs the group from now on; the caller holds core. */
static void join_engine(struct cl_member *member)
{
    struct cl_engine *engine = member->engine;
    struct cl_group *group = &member->group;
    cl_groups_add(&engine->groups, group);
    for (uint32_t i = 0; i < engine->peers.watched_count; i++) {
        const struct cl_watched *watched = &engine->peers.watched[i];
        for (uint32_t local = 0; local < group->host_queues.local_count; local++)
            if (group->peers[group->host_queues.local[local]] == watched->peer)
                member->neighbours[local].pid = watched->pid;
        if (watched->pidfd < 0)
            cl_group_peer_died(group, watched->peer);
    }
}

int cl_group_open(cl_engine *engine, const struct cl_group_options *options, cl_group **out)
{
    if (engine == NULL || options == NULL || out == NULL || (options->local_count > 1 && options->bells == NULL))
        return CL_EINVAL;
    struct cl_member *member = calloc(1, sizeof *member);
    if (member == NULL)
        return CL_ENOMEM;
    pthread_mutex_init(&member->submitting, NULL);
    member->engine = engine;
    member->spin_us = options->spin_us;
    member->neighbours = calloc(options->local_count, sizeof *member->neighbours);
    member->lags = calloc(options->size, sizeof *member->lags);
    struct cl_group_io io = {member,     wake,    wake_host,       post,      request_bell, is_gone,
                             abort_host, aborted, cl_member_ended, end_early, notify,       listen_for,
                             read_memory};
    pthread_mutex_lock(&engine->core);
    struct cl_endpoint *endpoint = engine->endpoint; /* set once */
    pthread_mutex_unlock(&engine->core);
    int status = cl_group_init(&member->group, options, endpoint, &io);
    if (status == CL_OK)
        status = member->neighbours == NULL || member->lags == NULL ? CL_ENOMEM : map_host(member, options);
    if (status != CL_OK) {
        free_member(member);
        return status;
    }
    pthread_mutex_lock(&engine->core);
    join_engine(member);
    pthread_mutex_unlock(&engine->core);
    *out = &member->group;
    return CL_OK;
}

/* ---- submission ---- */

bool cl_member_hand_over(struct cl_member *member, struct cl_operation *operation)
{
    struct cl_engine *engine = member->engine;
    cl_group_order(&member->group, operation);
    cl_group_queue(&member->group, operation);
    pthread_mutex_lock(&engine->inbox);
    bool was_empty = engine->handed_over.first == NULL;
    cl_operation_list_append(&engine->handed_over, operation);
    pthread_mutex_unlock(&engine->inbox);
    return was_empty;
}

/* Takes the group's operations out of the inbox, which holds pointers to it. The caller holds core. */
static void empty_inbox(struct cl_engine *engine, struct cl_group *group)
{
    pthread_mutex_lock(&engine->inbox);
    struct cl_operation **at = &engine->handed_over.first;
    while (*at != NULL) {
        struct cl_operation *operation = *at;
        if (operation->group == group) {
            *at = operation->next;
            cl_groups_take(operation);
        } else {
            at = &operation->next;
        }
    }
    engine->handed_over.last = at;
    pthread_mutex_unlock(&engine->inbox);
}

/* ---- the end ---- */

void cl_member_flush(const struct cl_member *member)
{
    uint64_t end_us = cl_now_us() + CL_EAGER_FLUSH_MAX_US;
    while (atomic_load(&member->eager.bytes) > 0 && atomic_load(&member->group.status) == CL_OK && cl_now_us() < end_us)
        usleep(FLUSH_STEP_US);
}

void cl_group_close(cl_group *group)
{
    if (group == NULL)
        return;
    struct cl_member *member = cl_member_of(group);
    struct cl_engine *engine = member->engine;
    int32_t open = CL_OK;
    cl_member_flush(member);
    atomic_compare_exchange_strong(&group->status, &open, CL_ECLOSED);
    cl_host_wake_all(member->host); /* ends the wait of a calling thread, which must leave first */
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        while (atomic_load(&group->host_queues.queues[queue].taken))
            sched_yield();
    pthread_mutex_lock(&engine->core);
    empty_inbox(engine, group);
    cl_group_leave(group, cl_now_us());
    cl_news_tell(&engine->news);
    cl_host_leave(member->host);
    cl_groups_remove(&engine->groups, group);
    pthread_mutex_lock(&member->submitting); /* waits for a thread that has just submitted and still holds it */
    pthread_mutex_unlock(&member->submitting);
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine); /* it may have an abort to send to the peers */
    free_member(member);
}

void cl_group_abort(cl_group *group, int reason)
{
    cl_group_fail(group, reason < 0 ? reason : CL_EABORTED, group->rank);
}

int cl_group_status(cl_group *group, uint32_t *peer)
{
    if (peer != NULL)
        *peer = atomic_load(&group->culprit);
    return atomic_load(&group->status);
}

int cl_group_left(cl_group *group, uint32_t rank)
{
    const struct cl_host_queues *queues = &group->host_queues;
    for (uint32_t i = 0; i < queues->local_count; i++) {
        if (i != queues->self && queues->local[i] == rank)
            return cl_host_left(cl_member_of(group)->host, i);
    }
    return 0;
}

int cl_group_classes(cl_group *group, uint32_t *peer, uint32_t *own, uint32_t *theirs)
{
    const struct cl_host_queues *queues = &group->host_queues;
    for (uint32_t i = 0; i < queues->local_count; i++) {
        *peer = queues->local[i];
        if (i != queues->self && cl_host_queues_classes(queues, i, own, theirs))
            return CL_EMISMATCH;
    }
    return CL_OK;
}
