#include "group/waiting.h"

void cl_waiting_init(struct cl_waiting *waiting)
{
    *waiting = (struct cl_waiting){.until_us = UINT64_MAX};
}

void cl_waiting_add(struct cl_waiting *waiting, struct cl_operation *operation)
{
    operation->waits = true;
    operation->next = NULL;
    operation->previous = waiting->last;
    *(operation->previous != NULL ? &operation->previous->next : &waiting->first) = operation;
    waiting->last = operation;
    if (operation->deadline_us < waiting->until_us)
        waiting->until_us = operation->deadline_us;
}

void cl_waiting_end(struct cl_waiting *waiting, struct cl_operation *operation, struct cl_operation_list *list)
{
    if (!operation->waits)
        return;
    operation->waits = false;
    *(operation->previous != NULL ? &operation->previous->next : &waiting->first) = operation->next;
    *(operation->next != NULL ? &operation->next->previous : &waiting->last) = operation->previous;
    cl_operation_list_append(list, operation);
    if (waiting->first == NULL)
        waiting->until_us = UINT64_MAX;
}

void cl_waiting_end_due(struct cl_waiting *waiting, uint64_t now_us, struct cl_operation_list *list)
{
    if (now_us < waiting->until_us)
        return;
    waiting->until_us = UINT64_MAX;
    for (struct cl_operation *operation = waiting->first, *next; operation != NULL; operation = next) {
        next = operation->next;
        if (operation->deadline_us <= now_us)
            cl_waiting_end(waiting, operation, list);
        else if (operation->deadline_us < waiting->until_us)
            waiting->until_us = operation->deadline_us;
    }
}
