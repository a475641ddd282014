/*
 * Awaited: the ranks of its host that an operation waits for. Will they come? Who are they? Which bells do they ring
 * when they come?
 */
#pragma once

#include "group/host_queue.h"
#include "group/io.h"
#include "group/operation.h"

/* Local ranks, by local index; UINT32_MAX: none. */
struct cl_awaited {
    uint32_t late; /* the first one that has not come */
    uint32_t gone; /* the one that will not come, if the status says so */
};

/* CL_OK, or why a local rank that the operation waits for will never come. */
int cl_awaited_check(struct cl_host_queues *queues, const struct cl_operation *operation, uint64_t now_us,
                     struct cl_awaited *found);

/* Sets awaited[rank] to 1 for each rank that a plan of the list waits for and has not heard of. */
void cl_awaited_list(const struct cl_operation *first, uint8_t *awaited);
/* The same for each rank that keeps the gate of a queue's first operation closed, if that is a plan. */
void cl_awaited_gate(const struct cl_host_queues *queues, const struct cl_operation *first, uint8_t *awaited);

/* Asks for the bells of an operation, the first of its queue; false when something moved meanwhile. */
bool cl_awaited_arm(const struct cl_host_queues *queues, const struct cl_group_io *io,
                    const struct cl_operation *operation);
