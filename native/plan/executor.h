/*
 * Executor: runs one plan for one operation. It moves no packets itself (the endpoint does) and never blocks: it does
 * what is ready, and says what it waits for.
 *
 * A step is done once all that it promises holds: a SEND when acknowledged, a RECV when every byte is delivered, an
 * AWAIT when the peer's host counter has come far enough. Ready steps run in the order in which they became ready, so
 * a plan's early segments leave first.
 */
#ifndef CL_PLAN_EXECUTOR_H
#define CL_PLAN_EXECUTOR_H

#include "plan/missing.h"
#include "plan/plan.h"
#include "protocol/endpoint.h"

/* The memory ranks of one host share, as the executor sees it. Arrays are indexed by group rank; NULL for ranks of
 * other hosts. */
struct cl_host_view {
    uint8_t **staging;           /* each rank's staging for this operation */
    _Atomic uint32_t **counters; /* each rank's host counter */
    _Atomic uint64_t **calls;    /* which operation each rank runs in this half of its staging; NULL: not compared */
    uint64_t call;               /* what must be there */
    uint32_t base;               /* counters' value at the start of this operation: POST and AWAIT count from it */
    void (*post)(void *context, uint32_t value); /* publishes this rank's counter and wakes who waits for it */
    void *context;
};

/* What the kernels do for this operation: element size, target (op) source, target / divisor. */
struct cl_arithmetic {
    size_t element_bytes;
    void (*reduce)(void *target, const void *source, size_t count);
    void (*scale)(void *target, size_t count, uint32_t divisor);
    void (*copy)(void *target, const void *source, size_t length);
};

struct cl_executor;

struct cl_executor_config {
    struct cl_plan *plan; /* must outlive the executor */
    uint8_t *input, *output;
    struct cl_arithmetic arithmetic;
    const struct cl_host_view *host; /* NULL when the plan does not use the host */
    struct cl_endpoint *endpoint;    /* NULL when the plan has no network steps */
    const uint16_t *peers;           /* group rank -> peer id */
    uint32_t group, sequence;        /* name of the operation in packets */
    uint32_t first_message;          /* added to the steps' message numbers; point-to-point: see group/mailbox.h */
    uint16_t signature;              /* see calls.h */
    uint8_t priority;
    struct cl_qos qos; /* of the steps marked CL_STEP_PARTIAL; its priority is not looked at. All zero: reliable */
};

int cl_executor_create(const struct cl_executor_config *config, struct cl_executor **executor);
/* The caller cancels the operation at the endpoint first: packets must not be delivered into it any more. */
void cl_executor_destroy(struct cl_executor *executor);

enum cl_progress {
    CL_PROGRESS_BLOCKED, /* nothing to do until a counter moves or a message completes */
    CL_PROGRESS_MORE,    /* the byte budget is used up: call again */
    CL_PROGRESS_DONE,
    CL_PROGRESS_FAILED,
};
/* Does what is ready, about `budget` bytes of it (so that an engine thread gets back to its packets). */
enum cl_progress cl_executor_poll(struct cl_executor *executor, size_t budget, uint64_t now_us);
/* A message of this executor ended; `context` is that of the endpoint's completion. Returns the executor. */
struct cl_executor *cl_executor_complete(void *context, int status);
/* The same message, just before: what of it was not counted (struct cl_completion). */
void cl_executor_missed(void *context, const struct cl_range *ranges, uint32_t count);
/* What the operation did not count so far. */
struct cl_missing *cl_executor_missing(struct cl_executor *executor);
int cl_executor_status(const struct cl_executor *executor);
/* The rank that runs another operation in shared memory (CL_EMISMATCH), or that was lost before its message could be
 * posted (CL_EPEERLOST); else UINT32_MAX. */
uint32_t cl_executor_culprit(const struct cl_executor *executor);
/* The n-th unmet AWAIT: its rank and the counter value it needs; false when there are no more. */
bool cl_executor_awaits(const struct cl_executor *executor, uint32_t n, uint32_t *rank, uint32_t *value);
void cl_executor_set_owner(struct cl_executor *executor, void *owner);
void *cl_executor_owner(const struct cl_executor *executor);

#endif
