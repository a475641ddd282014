/*
 * Held: the operations of a group that wait until the first of them may start. Its gate, a word that a device writes
 * when its copies are over, is 0 so far. Those behind it keep their order; receives need none, and pass.
 *
 * A device rings no bell. The engine looks again after a sixteenth of the time that the first has waited, 20 us to 1
 * ms, so that it sees a gate open at most 6 % late, or 1 ms, and nothing runs while none is held.
 */
#pragma once

#include "group/operation.h"

enum { CL_HELD_LOOK_MIN_US = 20, CL_HELD_LOOK_MAX_US = 1000 };

struct cl_held {
    struct cl_operation_list list;
    uint64_t since_us; /* the first one waits; 0: it is new */
};

void cl_held_init(struct cl_held *held);
/* Whether an operation has to wait, which comes next. */
bool cl_held_must_wait(const struct cl_held *held, const struct cl_operation *operation);
void cl_held_add(struct cl_held *held, struct cl_operation *operation);
/* Takes out the first operation if it may start, whose time to its deadline begins; else NULL, and *deadline_us is
 * lowered to the next look. */
struct cl_operation *cl_held_next(struct cl_held *held, uint64_t now_us, uint64_t *deadline_us);
/* Whether the gate of this operation, which may have none, is open. */
bool cl_gate_is_open(const struct cl_operation *operation);
