/*
 * Executor: runs one plan for one operation. It moves no packets itself (the endpoint does) and never blocks: it runs
 * the ready steps and reports the counters it waits for.
 *
 * A SEND is done when it is acknowledged, which an operation need not wait for (see cl_executor_may_release); a RECV
 * when every byte is delivered, an AWAIT when the peer's host counter has reached its value. Ready steps run in the
 * order in which they became ready, so a plan's early segments leave first.
 */
#pragma once

#include "plan/missing.h"
#include "plan/plan.h"
#include "protocol/endpoint.h"

/* The memory of one rank that the ranks of its host share, for operations of one queue. */
struct cl_host_place {
    _Atomic uint32_t *counter;       /* the host counter */
    uint8_t *staging[2];             /* by the operation's parity */
    _Atomic uint64_t *signatures[2]; /* of the operation in that half of the staging; NULL: not compared */
};

/* The memory that the ranks of one host share, for one operation. */
struct cl_host_view {
    const struct cl_host_place *places; /* by local index */
    const uint32_t *index;              /* group rank -> local index */
    uint32_t parity;                    /* of this operation */
    uint64_t signature;                 /* likewise */
    uint32_t base;  /* value of the counters at the start of the operation: POST and AWAIT count from it */
    uint32_t queue; /* given to `post`, which publishes this rank's counter and wakes the ranks that wait */
    void (*post)(void *context, uint32_t queue, uint32_t value);
    void *context;
};

/* The kernels of the operation: element size, target (op) source, target / divisor. */
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
    uint16_t signature;              /* see signatures.h */
    uint8_t priority;
    uint64_t codec_key;
    struct cl_qos qos; /* of the steps marked CL_STEP_PARTIAL; of all others only its order. Its priority is not used */
};

int cl_executor_create(const struct cl_executor_config *config, struct cl_executor **executor);
/* The caller must first cancel the operation at the endpoint, so that no packet is delivered into it any more. */
void cl_executor_destroy(struct cl_executor *executor);

enum cl_progress {
    CL_PROGRESS_BLOCKED, /* nothing to do until a counter moves or a message completes */
    CL_PROGRESS_MORE,    /* the byte budget is used up: call again */
    CL_PROGRESS_DONE,
    CL_PROGRESS_FAILED,
};
/* Runs ready steps, about `budget` bytes of them, so that an engine thread gets back to its packets. */
enum cl_progress cl_executor_poll(struct cl_executor *executor, size_t budget, uint64_t now_us);
/* A message of this executor ended; `context` is that of the endpoint's completion. Returns the executor. */
struct cl_executor *cl_executor_complete(void *context, int status);
/* Whether the caller may have its memory back: nothing is left but sends, of little altogether, and little of that lies
 * in the caller's memory: so many *copied_bytes. */
bool cl_executor_may_release(const struct cl_executor *executor, uint64_t *copied_bytes);
/* Then copies these bytes to memory of the executor, once. False: there is none. */
bool cl_executor_release(struct cl_executor *executor, uint64_t copied_bytes);
/* Notes when the first packet of that message was sent or received; 0: none was. */
void cl_executor_moved(void *context, uint64_t first_us);
/* The time when the first packet was sent or received, or shared memory was first used, as far as the executor was
 * told; 0: neither. */
uint64_t cl_executor_first_us(const struct cl_executor *executor);
/* The rank whose first data, or host counter, came last of all ranks, and when; false: none was heard of. */
bool cl_executor_last(const struct cl_executor *executor, uint32_t *rank, uint64_t *at_us);
/* Sets awaited[rank] to 1 for each rank that the plan receives from, or awaits, and that was not heard of so far. */
void cl_executor_unheard(const struct cl_executor *executor, uint8_t *awaited);
/* Tells, just before it ended, that bytes of the message were not counted: the ranges of struct cl_completion. */
void cl_executor_missed(void *context, const struct cl_range *ranges, uint32_t count);
/* The ranges that the operation did not count so far. */
struct cl_missing *cl_executor_missing(struct cl_executor *executor);
int cl_executor_status(const struct cl_executor *executor);
/* The rank that runs another operation in shared memory (CL_EMISMATCH), or that was lost before its message could be
 * posted (CL_EPEERLOST); else UINT32_MAX. */
uint32_t cl_executor_culprit(const struct cl_executor *executor);
/* The n-th unmet AWAIT: its rank and the counter value it needs; false when there are no more. */
bool cl_executor_awaits(const struct cl_executor *executor, uint32_t n, uint32_t *rank, uint32_t *value);
/* Whether steps that cannot begin yet await the host counter of this rank, and the largest value that they await. */
bool cl_executor_needs(const struct cl_executor *executor, uint32_t rank, uint32_t *value);
void cl_executor_set_owner(struct cl_executor *executor, void *owner);
void *cl_executor_owner(const struct cl_executor *executor);
