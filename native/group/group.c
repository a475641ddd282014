#include "group/group.h"

#include <stdlib.h>
#include <string.h>

#include "group/awaited.h"
#include "group/p2p.h"

enum { TELL_AGAIN_US = 1000 /* the time after which peers are told of a failure for which there was no memory */ };

int cl_group_init(struct cl_group *group, const struct cl_group_options *options, struct cl_endpoint *endpoint,
                  const struct cl_group_io *io)
{
    *group = (struct cl_group){
        .id = options->id, .rank = options->rank, .size = options->size, .endpoint = endpoint, .io = *io};
    group->in_flight.last = &group->in_flight.first;
    cl_held_init(&group->held);
    cl_waiting_init(&group->waiting);
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        group->host_flight[queue].last = &group->host_flight[queue].first;
    atomic_init(&group->culprit, UINT32_MAX);
    if (options->rank >= options->size || options->peers == NULL || (options->id & CL_GROUP_P2P) != 0)
        return CL_EINVAL;
    int status = cl_host_queues_init(&group->host_queues, group->size, group->rank, options->local,
                                     options->local_count, &group->io);
    if (status != CL_OK)
        return status;
    group->peers = calloc(group->size, sizeof *group->peers);
    if (group->peers == NULL)
        return CL_ENOMEM;
    memcpy(group->peers, options->peers, group->size * sizeof *group->peers);
    cl_mailbox_init(&group->mailbox, endpoint, group->id, group->size, group->peers);
    group->mailbox.channels = &group->channels;
    struct cl_channels_options channels = {.size = group->size,
                                           .count = group->host_queues.local_count,
                                           .self = group->host_queues.self,
                                           .local = group->host_queues.local,
                                           .lost = group->host_queues.lost,
                                           .io = &group->io};
    return cl_channels_init(&group->channels, &channels);
}

void cl_group_free(struct cl_group *group)
{
    cl_mailbox_free(&group->mailbox);
    cl_channels_free(&group->channels);
    cl_host_queues_free(&group->host_queues);
    free(group->peers);
}

static uint32_t rank_of(const struct cl_group *group, uint16_t peer)
{
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->peers[rank] == peer)
            return rank;
    return UINT32_MAX;
}

/* ---- submission ---- */

int cl_group_request(struct cl_group *group, struct cl_operation *operation, const struct cl_operation_request *request,
                     uint64_t now_us)
{
    const struct cl_plan *plan = request->plan;
    if (plan == NULL || plan->world_size != group->size || plan->rank != group->rank ||
        (plan->network_steps > 0 && group->endpoint == NULL))
        return CL_EINVAL;
    for (uint32_t i = 0; i < plan->host_rank_count; i++)
        if (group->host_queues.index[plan->host_ranks[i]] == UINT32_MAX)
            return CL_EINVAL; /* a rank of another host */
    cl_operation_init(operation, group, CL_OPERATION_PLAN, request->plan, request->input, request->output);
    int status = cl_operation_request(operation, request, now_us);
    if (status != CL_OK)
        cl_operation_free(operation);
    return status;
}

int cl_group_request_message(struct cl_group *group, struct cl_operation *operation, enum cl_operation_kind kind,
                             const struct cl_message_request *request, uint64_t now_us)
{
    bool any = kind == CL_OPERATION_RECEIVE && request->rank == CL_ANY_SOURCE;
    if (group->endpoint == NULL || group->size < 2 ||
        (!any && (request->rank >= group->size || request->rank == group->rank)))
        return CL_EINVAL;
    return cl_p2p_request(operation, group, &group->channels, kind, request, now_us);
}

void cl_group_order(struct cl_group *group, struct cl_operation *operation)
{
    if (operation->kind != CL_OPERATION_PLAN)
        return;
    operation->sequence = group->sequence++;
    if (operation->signature != 0) {
        group->signature = (group->signature ^ operation->signature) * 0xD6E8FEB86659FD93u;
        group->signature ^= group->signature >> 32;
        operation->signature = group->signature;
    }
    if (operation->plan->uses_host)
        cl_host_queues_order(&group->host_queues, &operation->turn, cl_class_within_host(operation->qos.priority),
                             operation->plan->posts, group->signature);
}

void cl_group_queue(struct cl_group *group, struct cl_operation *operation)
{
    if (operation->plan->uses_host)
        atomic_fetch_add(&group->host_queues.queues[operation->turn.queue].queued, 1);
}

/* Takes an operation that may start into the list of those in flight. */
static void let_start(struct cl_group *group, struct cl_operation *operation)
{
    struct cl_operation_list *list =
        operation->plan->uses_host ? &group->host_flight[operation->turn.queue] : &group->in_flight;
    if (operation->plan->uses_host && operation->plan->network_steps > 0)
        cl_endpoint_delay(group->endpoint, group->id, operation->sequence);
    cl_operation_list_append(list, operation);
}

void cl_group_take(struct cl_group *group, struct cl_operation *operation)
{
    if (cl_held_must_wait(&group->held, operation))
        cl_held_add(&group->held, operation);
    else
        let_start(group, operation);
}

int cl_group_start(struct cl_group *group, struct cl_operation *operation, uint64_t now_us)
{
    struct cl_operation_place place = {group->endpoint, &group->host_queues, group->peers, group->id};
    return cl_operation_start(operation, &place, now_us);
}

/* ---- failure ---- */

/* The culprit for the other ranks: the known culprit, or this rank if it failed by itself. */
static uint32_t culprit_for_others(const struct cl_group *group, int reason)
{
    bool shared = reason == CL_EPEERLOST || reason == CL_EMISMATCH || reason == CL_EABORTED;
    return shared ? atomic_load(&group->culprit) : group->rank;
}

void cl_group_fail(struct cl_group *group, int reason, uint32_t culprit)
{
    int32_t open = CL_OK;
    uint32_t nobody = UINT32_MAX;
    if (atomic_load(&group->status) == CL_OK) /* before the status: readers that see the status read the culprit */
        atomic_compare_exchange_strong(&group->culprit, &nobody, culprit);
    if (!atomic_compare_exchange_strong(&group->status, &open, reason))
        return;
    group->io.abort(group->io.context, reason, culprit_for_others(group, reason));
    group->io.wake(group->io.context); /* cl_group_progress tells the peers and ends what is in flight */
}

void cl_group_hear(struct cl_group *group, int reason, uint32_t culprit)
{
    /* A lost peer or a mismatch is the reason on all ranks; a timeout elsewhere is an abort here. */
    bool shared = reason == CL_EPEERLOST || reason == CL_EMISMATCH;
    cl_group_fail(group, shared ? reason : CL_EABORTED, culprit);
}

void cl_group_hear_of(struct cl_group *group, const struct cl_closed_group *aborted)
{
    cl_group_hear(group, aborted->reason, rank_of(group, aborted->culprit));
}

void cl_group_peer_died(struct cl_group *group, uint16_t peer)
{
    struct cl_host_queues *queues = &group->host_queues;
    for (uint32_t i = 0; i < queues->local_count; i++) {
        if (i == queues->self || group->peers[queues->local[i]] != peer)
            continue;
        atomic_store(&queues->lost[i], true);
        group->io.wake_host(group->io.context);
    }
}

void cl_group_complete(const struct cl_completion *completion)
{
    if (completion->missing_count > 0)
        cl_executor_missed(completion->context, completion->missing, completion->missing_count);
    cl_executor_moved(completion->context, completion->first_us);
    const struct cl_executor *executor = cl_executor_complete(completion->context, completion->status);
    struct cl_operation *operation = cl_executor_owner(executor);
    struct cl_group *group = operation->group;
    cl_waiting_end(&group->waiting, operation, &group->in_flight);
    if (completion->status == CL_OK || completion->status == CL_EABORTED)
        return; /* of an abort, the reason follows: cl_group_hear_of */
    cl_group_fail(group, completion->status, rank_of(group, completion->peer));
}

/* Whether the group has failed, here or on another rank of this host. */
static int heard(struct cl_group *group)
{
    uint32_t culprit;
    int aborted = group->io.aborted(group->io.context, &culprit);
    if (aborted != CL_OK)
        cl_group_hear(group, aborted, culprit);
    return atomic_load(&group->status);
}

int cl_group_check(struct cl_group *group)
{
    int status = atomic_load(&group->status);
    return status == CL_OK ? heard(group) : status;
}

int cl_group_check_host(struct cl_group *group, const struct cl_operation *operation, uint64_t now_us,
                        uint64_t deadline_us)
{
    struct cl_awaited found;
    int status = cl_group_check(group);
    if (status != CL_OK)
        return status;
    status = cl_awaited_check(&group->host_queues, operation, now_us, &found);
    if (status == CL_EPEERLOST && heard(group) != CL_OK) /* a rank that leaves aborts the group just before */
        return atomic_load(&group->status);
    bool expired = status == CL_OK && found.late != UINT32_MAX && now_us >= deadline_us;
    if (expired)
        status = CL_ETIMEDOUT;
    if (status != CL_OK)
        cl_group_fail(group, status, group->host_queues.local[expired ? found.late : found.gone]);
    return status;
}

void cl_group_await(const struct cl_group *group, uint8_t *awaited)
{
    cl_awaited_list(group->in_flight.first, awaited);
    cl_awaited_list(group->waiting.first, awaited);
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++) {
        cl_awaited_list(group->host_flight[queue].first, awaited);
        cl_awaited_gate(&group->host_queues, group->host_flight[queue].first, awaited);
    }
}

/* ---- the end ---- */

static void tell_peers(struct cl_group *group, int reason)
{
    uint32_t culprit = culprit_for_others(group, reason);
    group->io.abort(group->io.context, reason, culprit);
    /* those of this host, too: their engines may wait for packets only */
    group->announced =
        group->endpoint == NULL || cl_endpoint_abort(group->endpoint, group->id, group->peers, group->size, reason,
                                                     culprit == UINT32_MAX ? UINT16_MAX : group->peers[culprit]);
}

/* Whether the operation is in a host queue. One that has ended early has left the queue: only its packets remain. */
static bool is_queued(const struct cl_operation *operation)
{
    return operation->plan->uses_host && !operation->early;
}

/* Ends an operation that has left the list. */
static void end(struct cl_group *group, struct cl_operation *operation, int status, uint64_t now_us)
{
    if (is_queued(operation))
        atomic_fetch_sub(&group->host_queues.queues[operation->turn.queue].queued, 1);
    cl_operation_end(operation, status, now_us);
    if (operation->plan->uses_host && operation->plan->network_steps > 0)
        cl_endpoint_end(group->endpoint, group->id, operation->sequence);
    group->io.ended(group->io.context, operation, status);
}

/* Forgets the messages of the group, on their way and yet to come. */
static void forget_messages(struct cl_group *group)
{
    cl_mailbox_free(&group->mailbox);
    cl_channels_forget(&group->channels);
    if (group->endpoint == NULL)
        return;
    cl_endpoint_cancel(group->endpoint, group->id, UINT32_MAX);
}

static void end_list(struct cl_group *group, struct cl_operation_list *list, int status, uint64_t now_us)
{
    while (list->first != NULL) {
        struct cl_operation *operation = list->first;
        list->first = operation->next;
        int own = operation->executor != NULL ? cl_executor_status(operation->executor) : CL_OK;
        end(group, operation, own != CL_OK && own != CL_EABORTED ? own : status, now_us);
    }
    list->last = &list->first;
}

static bool is_idle(const struct cl_group *group)
{
    bool idle = group->in_flight.first == NULL && group->waiting.first == NULL && group->held.list.first == NULL;
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        idle = idle && group->host_flight[queue].first == NULL;
    return idle;
}

/* Ends every operation of the group and tells the peers: always of a failure, of the group's closing only if operations
 * are in flight, which the peers may wait for. */
static void end_all(struct cl_group *group, int status, uint64_t now_us)
{
    bool idle = is_idle(group);
    if (!group->announced && (status != CL_ECLOSED || !idle))
        tell_peers(group, status == CL_ECLOSED ? CL_EABORTED : status);
    if (idle)
        return;
    forget_messages(group);
    cl_waiting_end_due(&group->waiting, UINT64_MAX, &group->in_flight); /* all of them */
    end_list(group, &group->in_flight, status, now_us);
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        end_list(group, &group->host_flight[queue], status, now_us);
}

/* Ends those that are held of a group that has failed, up to the first whose gate is closed: the device may still copy
 * its inputs, over the NaN of its results if the two are in the same memory. */
static void end_held(struct cl_group *group, int status, uint64_t now_us, uint64_t *deadline_us)
{
    for (struct cl_operation *operation; (operation = cl_held_next(&group->held, now_us, deadline_us)) != NULL;)
        end(group, operation, status, now_us);
}

void cl_group_leave(struct cl_group *group, uint64_t now_us)
{
    int status = atomic_load(&group->status);
    end_all(group, status, now_us);
    end_list(group, &group->held.list, status, now_us);
    forget_messages(group);
}

/* ---- progress ---- */

/* One call of cl_group_progress. */
struct progress {
    uint64_t now_us;
    uint64_t *deadline_us; /* lowered to those of the operations */
    bool more;             /* an operation has used up its budget, or the starts were used up */
    uint32_t starts;       /* that are left */
    bool waits;            /* the latest operation waits for packets */
};

/* The caller gets its result, and the operation leaves its host queue. It stays with the group until its packets are
 * acknowledged. */
static void end_early(struct cl_group *group, struct cl_operation *operation)
{
    if (is_queued(operation)) {
        cl_host_queues_end(&group->host_queues, &operation->turn);
        atomic_fetch_sub(&group->host_queues.queues[operation->turn.queue].queued, 1);
    }
    operation->early = true;
}

static int step_operation(struct cl_group *group, struct cl_operation *operation, size_t budget,
                          struct progress *progress)
{
    uint64_t now_us = progress->now_us;
    if (operation->executor == NULL) {
        int status = operation->kind == CL_OPERATION_PLAN ? CL_OK : cl_p2p_bind(operation, &group->mailbox, now_us);
        if (status == CL_OK && operation->name == CL_LOCAL)
            return operation->transfer.status;
        if (status == CL_OK)
            status = cl_group_start(group, operation, now_us);
        if (status != CL_OK)
            return status;
    }
    switch (cl_executor_poll(operation->executor, budget, now_us)) {
    case CL_PROGRESS_DONE:
        if (is_queued(operation))
            cl_host_queues_end(&group->host_queues, &operation->turn);
        return CL_OK;
    case CL_PROGRESS_FAILED:
        return cl_executor_status(operation->executor);
    case CL_PROGRESS_MORE:
        progress->more = true;
        return CL_EAGAIN;
    default:
        if (group->io.early != NULL && cl_operation_may_end(operation) && group->io.early(group->io.context, operation))
            end_early(group, operation);
        progress->waits = !is_queued(operation);
        return CL_EAGAIN;
    }
}

/* The rank to name when an operation fails: the one that disagrees or is late; UINT32_MAX: unknown. */
static uint32_t culprit_of(const struct cl_group *group, const struct cl_operation *operation, int status)
{
    uint32_t rank = UINT32_MAX, value, behind;
    if (operation->kind != CL_OPERATION_PLAN && operation->ticket.source == CL_ANY_SOURCE)
        return status == CL_EPEERLOST ? group->rank == 0 : UINT32_MAX; /* all others are lost: the first of them */
    if (operation->kind != CL_OPERATION_PLAN)
        return status == CL_ETIMEDOUT || status == CL_EPEERLOST || operation->name == CL_LOCAL
                   ? operation->ticket.source
                   : UINT32_MAX;
    if (operation->executor == NULL) {
        bool gated =
            operation->plan->uses_host && !cl_host_queues_gate_is_open(&group->host_queues, &operation->turn, &behind);
        return status == CL_ETIMEDOUT && gated ? group->host_queues.local[behind] : UINT32_MAX;
    }
    if (status != CL_ETIMEDOUT)
        return cl_executor_culprit(operation->executor);
    if (!cl_executor_awaits(operation->executor, 0, &rank, &value) && operation->plan->network_steps > 0)
        rank = rank_of(group, cl_endpoint_late_peer(group->endpoint, group->id, operation->sequence));
    return rank;
}

/* Whether the operation may run now: if it uses the host's memory, only as the first in its queue, with no calling
 * thread there, and with the gate open. */
static bool may_run(const struct cl_group *group, const struct cl_operation *operation, bool first)
{
    uint32_t behind;
    if (!is_queued(operation))
        return true;
    /* queued > 0 keeps calling threads out from here on */
    return first && !atomic_load(&group->host_queues.queues[operation->turn.queue].taken) &&
           cl_host_queues_gate_is_open(&group->host_queues, &operation->turn, &behind);
}

/* Takes an operation out of its list. */
static struct cl_operation *leave(struct cl_operation_list *list, struct cl_operation **at)
{
    struct cl_operation *operation = *at;
    *at = operation->next;
    if (operation->next == NULL)
        list->last = at;
    return operation;
}

/* Runs one point-to-point operation that has just got its name. */
static void begin_message(struct cl_group *group, struct cl_operation *operation, int status, struct progress *progress)
{
    if (status == CL_OK)
        status = step_operation(group, operation, CL_WORK_BUDGET_BYTES, progress);
    if (status != CL_OK && status != CL_EAGAIN)
        cl_group_fail(group, status, culprit_of(group, operation, status));
}

/* Names the point-to-point operations that are new, in the order of their submission, moves messages within the host,
 * and runs receives from any source whose message has come. */
static void move_messages(struct cl_group *group, struct progress *progress)
{
    struct cl_operation *operation;
    uint32_t culprit;
    for (operation = group->in_flight.first; operation != NULL && atomic_load(&group->status) == CL_OK;
         operation = operation->next)
        if (operation->kind != CL_OPERATION_PLAN && operation->name == CL_UNNAMED)
            begin_message(group, operation, CL_OK, progress);
    if (atomic_load(&group->status) != CL_OK)
        return;
    bool waiting = group->mailbox.queues != NULL;
    int status = cl_channels_progress(&group->channels, progress->now_us, waiting, &progress->more,
                                      progress->deadline_us, &culprit);
    if (status != CL_OK)
        cl_group_fail(group, status, culprit);
    while (group->mailbox.queues != NULL && atomic_load(&group->status) == CL_OK) {
        status = cl_p2p_next(&group->mailbox, &operation);
        if (operation == NULL)
            return;
        begin_message(group, operation, status, progress);
        progress->more |= operation->name == CL_LOCAL; /* its data may have to be fetched */
    }
}

/* Runs an operation as far as it can, or only looks whether it must end. `first`: no operation of its list is before
 * it. CL_EAGAIN: it is still in flight; an error: the group has failed. */
static int advance(struct cl_group *group, struct cl_operation *operation, bool first, size_t budget,
                   struct progress *progress)
{
    uint64_t now_us = progress->now_us;
    int status = CL_EAGAIN;
    bool starts = operation->executor == NULL && operation->kind == CL_OPERATION_PLAN && !operation->plan->uses_host;
    progress->waits = false;
    if (starts && progress->starts == 0)
        progress->more = true;
    else if (budget > 0 && may_run(group, operation, first))
        status = step_operation(group, operation, budget, progress);
    progress->starts -= starts && progress->starts > 0;
    /* The others of a queue wait for the first one. */
    if (status == CL_EAGAIN && first && is_queued(operation) &&
        cl_group_check_host(group, operation, now_us, UINT64_MAX) != CL_OK)
        return CL_EABORTED;
    if (status == CL_EAGAIN && now_us >= operation->deadline_us)
        status = CL_ETIMEDOUT;
    if (status == CL_EAGAIN && operation->deadline_us < *progress->deadline_us)
        *progress->deadline_us = operation->deadline_us;
    /* CL_EABORTED: heard while it started. The reason follows, see cl_group_complete. */
    if (status != CL_OK && status != CL_EAGAIN && status != CL_EABORTED)
        cl_group_fail(group, status, culprit_of(group, operation, status));
    return status;
}

/* Runs the operations of a list. False when the group has failed. */
static bool advance_list(struct cl_group *group, struct cl_operation_list *list, size_t budget,
                         struct progress *progress)
{
    struct cl_operation **at = &list->first;
    while (*at != NULL && atomic_load(&group->status) == CL_OK) {
        int status = advance(group, *at, at == &list->first, budget, progress);
        if (status == CL_OK)
            end(group, leave(list, at), CL_OK, progress->now_us);
        else if (status == CL_EAGAIN && progress->waits)
            cl_waiting_add(&group->waiting, leave(list, at));
        else if (status == CL_EAGAIN)
            at = &(*at)->next;
        else
            return false;
    }
    return atomic_load(&group->status) == CL_OK;
}

/* The first of the two queues of a class: that with the older operation. */
static uint32_t older_queue(const struct cl_group *group, uint32_t class)
{
    const struct cl_operation *first = group->host_flight[2 * class].first;
    const struct cl_operation *second = group->host_flight[2 * class + 1].first;
    bool swapped = second != NULL && (first == NULL || (int32_t)(second->sequence - first->sequence) < 0);
    return 2 * class + swapped;
}

/* Runs the host queues, the most urgent ones first. Once a queue has used up its budget, the others have to wait, but
 * for one turn now and then. */
static void advance_queues(struct cl_group *group, size_t budget, struct progress *progress)
{
    bool used_up = false;
    uint32_t older = 0;
    for (uint32_t i = 0; i < CL_GROUP_QUEUES; i++) {
        older = i & 1 ? older : older_queue(group, cl_host_queue_class(i));
        struct cl_operation_list *list = &group->host_flight[i & 1 ? older ^ 1 : older];
        if (list->first == NULL)
            continue;
        progress->more = false;
        if (!advance_list(group, list, budget, progress))
            return;
        if (progress->more && !used_up) {
            used_up = true;
            bool pass_by = ++group->host_queues.passed_by % CL_HOST_QUEUE_GUARD != 0;
            budget = pass_by ? 0 : CL_WORK_BUDGET_BESIDE_BYTES;
        } else if (!used_up) {
            budget = CL_WORK_BUDGET_BESIDE_BYTES;
        }
    }
    progress->more = used_up;
}

bool cl_group_progress(struct cl_group *group, size_t budget, uint64_t now_us, uint64_t *deadline_us)
{
    struct progress progress = {.now_us = now_us, .deadline_us = deadline_us, .starts = CL_STARTS_BUDGET};
    uint32_t culprit;
    int aborted = group->io.aborted(group->io.context, &culprit);
    if (aborted != CL_OK)
        cl_group_hear(group, aborted, culprit);
    cl_waiting_end_due(&group->waiting, now_us, &group->in_flight);
    if (atomic_load(&group->status) == CL_OK)
        for (struct cl_operation *operation; (operation = cl_held_next(&group->held, now_us, deadline_us)) != NULL;)
            let_start(group, operation);
    move_messages(group, &progress);
    if (advance_list(group, &group->in_flight, CL_WORK_BUDGET_BYTES, &progress)) {
        bool more = progress.more;
        advance_queues(group, budget, &progress);
        progress.more |= more;
    }
    int failed = atomic_load(&group->status);
    if (failed != CL_OK) {
        end_all(group, failed, now_us);
        end_held(group, failed, now_us, deadline_us);
        if (!group->announced && failed != CL_ECLOSED && now_us + TELL_AGAIN_US < *deadline_us)
            *deadline_us = now_us + TELL_AGAIN_US;
        return false;
    }
    if (group->waiting.until_us < *deadline_us)
        *deadline_us = group->waiting.until_us;
    return progress.more;
}

uint32_t cl_group_host_class(const struct cl_group *group)
{
    uint32_t queue = 0;
    while (queue < CL_GROUP_QUEUES && group->host_flight[queue].first == NULL)
        queue++;
    return cl_host_queue_class(queue);
}

uint32_t cl_group_urgent_class(const struct cl_group *group)
{
    uint32_t urgent = cl_group_host_class(group);
    for (const struct cl_operation *operation = group->in_flight.first; operation != NULL; operation = operation->next)
        urgent = operation->qos.priority < urgent ? operation->qos.priority : urgent;
    return urgent;
}

bool cl_group_may_sleep(struct cl_group *group)
{
    if (!is_idle(group))
        return false;
    if (atomic_load(&group->status) != CL_OK)
        return group->announced;
    return cl_channels_may_sleep(&group->channels);
}

static bool all_early(const struct cl_operation *first)
{
    while (first != NULL && first->early)
        first = first->next;
    return first == NULL;
}

bool cl_group_only_trails(const struct cl_group *group)
{
    bool trails = group->in_flight.first != NULL || group->waiting.first != NULL;
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        trails = trails && group->host_flight[queue].first == NULL;
    return trails && group->held.list.first == NULL && all_early(group->in_flight.first) &&
           all_early(group->waiting.first);
}

bool cl_group_arm_bells(struct cl_group *group, uint64_t now_us, uint64_t *deadline_us)
{
    bool waiting = group->mailbox.queues != NULL;
    if (atomic_load(&group->status) == CL_OK && !cl_channels_arm(&group->channels, waiting))
        return false;
    if (cl_channels_listens(&group->channels, waiting) && now_us + CL_SLEEP_MAX_US < *deadline_us)
        *deadline_us = now_us + CL_SLEEP_MAX_US;
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++) {
        const struct cl_operation *operation = group->host_flight[queue].first;
        if (operation == NULL)
            continue;
        if (now_us + CL_SLEEP_MAX_US < *deadline_us)
            *deadline_us = now_us + CL_SLEEP_MAX_US;
        if (!cl_awaited_arm(&group->host_queues, &group->io, operation))
            return false;
    }
    return true;
}
