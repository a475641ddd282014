/*
 * History: the finished messages of one peer. A packet that comes again for one of them is acknowledged and dropped.
 *
 * Per group a set of (sequence, index) pairs as ranges: the indices of one operation are dense, so an operation costs
 * one range, and operations that have ended as a whole share one. Beyond CL_HISTORY_RANGES the oldest are forgotten,
 * and everything below counts as finished, but for operations in flight: urgent operations may overtake others for a
 * long time. Between operations in flight the ranges are then merged.
 *
 * Point-to-point messages (CL_GROUP_P2P) have tags for sequences, which come in any order. But the receives of one tag
 * are posted in order, so the number of posted receives is enough: messages with a lower index are finished, unless
 * they are still in the endpoint's table.
 */
#pragma once

#include "protocol/message_id.h"
#include "protocol/ranges.h"
#include "protocol/signatures.h"
#include "protocol/tags.h"

enum { CL_HISTORY_RANGES = 4096 };

struct cl_history_group {
    uint32_t group;
    uint64_t floor; /* all below are finished */
    struct cl_ranges finished;
    struct cl_tags posted; /* point-to-point, instead of these two */
};

struct cl_history {
    struct cl_history_group *groups;
    uint32_t count, capacity;
    uint32_t recent;                       /* index of the group looked up last */
    const struct cl_signatures *in_flight; /* operations of this process; NULL: not known */
};

/* False when there is no memory. */
bool cl_history_add(struct cl_history *history, const struct cl_message_id *id);
bool cl_history_add_sequence(struct cl_history *history, uint32_t group, uint32_t sequence);
bool cl_history_contains(struct cl_history *history, const struct cl_message_id *id);
/* Point-to-point: notes that the next receive of its tag was posted. Such messages are not added when they finish. */
bool cl_history_add_posted(struct cl_history *history, const struct cl_message_id *id);
uint32_t cl_history_next_index(const struct cl_history *history, uint32_t group, uint32_t tag);
void cl_history_drop_group(struct cl_history *history, uint32_t group);
void cl_history_free(struct cl_history *history);
