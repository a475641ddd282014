#include "group/awaited.h"

/* ---- whether they will come ---- */

/* Whether the gate of an operation stays closed, because one of the ranks that have not come there will not come: the
 * first of them may only be late. */
static int check_gate(struct cl_host_queues *queues, const struct cl_host_turn *turn, uint64_t now_us,
                      struct cl_awaited *found)
{
    const struct cl_host_queue *queue = &queues->queues[turn->queue];
    int status = CL_OK;
    for (uint32_t i = 0; i < queues->local_count && status == CL_OK; i++) {
        if (cl_host_queue_reached(queue, i, turn->gate))
            continue;
        found->late = found->late == UINT32_MAX ? i : found->late;
        found->gone = i;
        status = cl_host_queues_doubt(queues, turn->queue, i, turn->gate, now_us);
    }
    return status;
}

/* The same once it has opened: also for ranks that the operation only waits for after others. */
static int check_steps(struct cl_host_queues *queues, const struct cl_operation *operation, uint64_t now_us,
                       struct cl_awaited *found)
{
    uint32_t queue = operation->turn.queue, rank, value;
    int status = CL_OK;
    for (uint32_t n = 0; status == CL_OK && cl_executor_awaits(operation->executor, n, &rank, &value); n++) {
        found->gone = queues->index[rank];
        found->late = found->late == UINT32_MAX ? found->gone : found->late;
        status = cl_host_queues_doubt(queues, queue, found->gone, value, now_us);
    }
    for (uint32_t i = 0; i < queues->local_count && status == CL_OK; i++) {
        if (!atomic_load(&queues->lost[i]) || !cl_executor_needs(operation->executor, queues->local[i], &value))
            continue;
        found->gone = i;
        status = cl_host_queues_doubt(queues, queue, i, value, now_us);
    }
    return status;
}

int cl_awaited_check(struct cl_host_queues *queues, const struct cl_operation *operation, uint64_t now_us,
                     struct cl_awaited *found)
{
    *found = (struct cl_awaited){UINT32_MAX, UINT32_MAX};
    return operation->executor == NULL ? check_gate(queues, &operation->turn, now_us, found)
                                       : check_steps(queues, operation, now_us, found);
}

/* ---- who they are ---- */

void cl_awaited_list(const struct cl_operation *first, uint8_t *awaited)
{
    for (const struct cl_operation *operation = first; operation != NULL; operation = operation->next)
        if (operation->kind == CL_OPERATION_PLAN && operation->executor != NULL)
            cl_executor_unheard(operation->executor, awaited);
}

void cl_awaited_gate(const struct cl_host_queues *queues, const struct cl_operation *first, uint8_t *awaited)
{
    if (first == NULL || first->kind != CL_OPERATION_PLAN || first->executor != NULL || !first->plan->uses_host)
        return;
    for (uint32_t i = 0; i < queues->local_count; i++)
        if (!cl_host_queue_reached(&queues->queues[first->turn.queue], i, first->turn.gate))
            awaited[queues->local[i]] = 1;
}

/* ---- their bells ---- */

bool cl_awaited_arm(const struct cl_host_queues *queues, const struct cl_group_io *io,
                    const struct cl_operation *operation)
{
    const struct cl_host_turn *turn = &operation->turn;
    const struct cl_host_queue *queue = &queues->queues[turn->queue];
    uint32_t rank, value, behind;
    if (operation->executor == NULL) {
        if (!cl_host_queues_gate_is_open(queues, turn, &behind))
            io->request_bell(io->context, turn->queue, behind);
        /* A calling thread that has taken the queue wakes the engine when it leaves. */
        return atomic_load(&queue->taken) || !cl_host_queues_gate_is_open(queues, turn, &behind);
    }
    for (uint32_t i = 0; cl_executor_awaits(operation->executor, i, &rank, &value); i++) {
        uint32_t index = queues->index[rank];
        io->request_bell(io->context, turn->queue, index);
        if (cl_host_queue_reached(queue, index, value))
            return false;
    }
    return true;
}
