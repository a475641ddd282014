/*
 * History: which messages of one peer are finished, so that a packet that comes again is acknowledged and not stashed.
 *
 * Per group a set of (sequence, index) pairs as ranges: the indices of one operation are dense, so an operation costs
 * one range. Beyond CL_HISTORY_RANGES the oldest are forgotten and everything below counts as finished; the operations
 * of a group start in order, so nothing that old can still be new.
 */
#ifndef CL_CORE_HISTORY_H
#define CL_CORE_HISTORY_H

#include "core/endpoint.h"
#include "core/ranges.h"

enum { CL_HISTORY_RANGES = 4096 };

struct cl_history_group {
    uint32_t group;
    uint64_t floor; /* all below are finished */
    struct cl_ranges finished;
};

struct cl_history {
    struct cl_history_group *groups;
    uint32_t count, capacity;
    uint32_t recent; /* index of the group asked for last */
};

/* False when there is no memory. */
bool cl_history_add(struct cl_history *history, const struct cl_message_id *id);
bool cl_history_add_sequence(struct cl_history *history, uint32_t group, uint32_t sequence);
bool cl_history_contains(struct cl_history *history, const struct cl_message_id *id);
void cl_history_drop_group(struct cl_history *history, uint32_t group);
void cl_history_free(struct cl_history *history);

#endif
