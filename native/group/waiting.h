/*
 * Waiting: the operations of a group that wait for packets, with nothing to do until one of their messages ends. A turn
 * does not visit them: thousands may be in flight.
 */
#pragma once

#include "group/operation.h"

struct cl_waiting {
    struct cl_operation *first, *last;
    uint64_t until_us; /* none is due before */
};

void cl_waiting_init(struct cl_waiting *waiting);
/* Takes an operation that is in no list. */
void cl_waiting_add(struct cl_waiting *waiting, struct cl_operation *operation);
/* Moves an operation to the end of a list; one that does not wait stays where it is. */
void cl_waiting_end(struct cl_waiting *waiting, struct cl_operation *operation, struct cl_operation_list *list);
/* Moves those whose deadline has come. */
void cl_waiting_end_due(struct cl_waiting *waiting, uint64_t now_us, struct cl_operation_list *list);
