#include "group/held.h"

void cl_held_init(struct cl_held *held)
{
    *held = (struct cl_held){0};
    held->list.last = &held->list.first;
}

bool cl_gate_is_open(const struct cl_operation *operation)
{
    return operation->gate == NULL || atomic_load_explicit(operation->gate, memory_order_acquire) != 0;
}

bool cl_held_must_wait(const struct cl_held *held, const struct cl_operation *operation)
{
    return operation->kind != CL_OPERATION_RECEIVE && (held->list.first != NULL || !cl_gate_is_open(operation));
}

void cl_held_add(struct cl_held *held, struct cl_operation *operation)
{
    cl_operation_list_append(&held->list, operation);
}

struct cl_operation *cl_held_next(struct cl_held *held, uint64_t now_us, uint64_t *deadline_us)
{
    struct cl_operation *first = held->list.first;
    if (first == NULL)
        return NULL;
    if (cl_gate_is_open(first)) {
        held->since_us = 0;
        held->list.first = first->next;
        if (first->next == NULL)
            held->list.last = &held->list.first;
        first->deadline_us = cl_deadline_after(now_us, first->timeout_us);
        return first;
    }
    if (held->since_us == 0)
        held->since_us = now_us;
    uint64_t look_us = (now_us - held->since_us) / 16;
    look_us = look_us < CL_HELD_LOOK_MIN_US ? CL_HELD_LOOK_MIN_US : look_us;
    look_us = look_us > CL_HELD_LOOK_MAX_US ? CL_HELD_LOOK_MAX_US : look_us;
    if (now_us + look_us < *deadline_us)
        *deadline_us = now_us + look_us;
    return NULL;
}
