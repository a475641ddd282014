/*
 * Operation: one plan with its buffers, or one point-to-point transfer, from submission to its end. It knows its own
 * order, but not the group that gave it: see group.h.
 */
#pragma once

#include "group/channel.h"
#include "group/host_queue.h"
#include "group/mailbox.h"
#include "plan/executor.h"

struct cl_group;

enum cl_operation_kind { CL_OPERATION_PLAN, CL_OPERATION_SEND, CL_OPERATION_RECEIVE };

struct cl_operation {
    struct cl_group *group;
    enum cl_operation_kind kind;
    struct cl_plan *plan;
    uint8_t *input, *output;
    bool early; /* it has ended for the caller, and acknowledgements are missing: collectives only. The sends of short
                   messages set cl_submission.early alone */
    uint64_t copied_bytes; /* of the caller's memory, to end early */
    struct cl_arithmetic arithmetic;
    struct cl_qos qos;
    uint64_t codec_key;
    struct cl_operation_times times;
    const _Atomic uint32_t *gate; /* NULL, or it is not 0 once the operation may start: see held.h */
    _Atomic uint32_t *done;       /* NULL, or a word that gets 1 at the end */
    uint64_t timeout_us;          /* 0: none */
    uint64_t deadline_us;         /* UINT64_MAX: none */
    uint32_t sequence;            /* names the operation in packets; point-to-point: the tag */
    uint64_t signature;           /* hash of all calls of the group, up to this one: equal on all ranks; 0: unknown */
    struct cl_host_turn turn;     /* the turn of a plan that uses the host */
    struct cl_ticket ticket;      /* point-to-point: the other rank and the name of its messages */
    uint16_t pair[2];             /* point-to-point: peer ids of ranks 0, this one, and 1, the other, of its plan */
    enum { CL_UNNAMED, CL_WAITING, CL_NAMED, CL_LOCAL } name; /* point-to-point; CL_LOCAL: it goes through a channel */
    struct cl_transfer transfer;                              /* its part there */
    struct cl_executor *executor;                             /* there from start to end */
    uint64_t started_us;                                      /* when the executor was made */
    uint32_t last_rank;            /* once it ended, or early: the rank whose data was the last: cl_executor_last */
    uint64_t waited_us;            /* ... and the time from the start until then; 0: it waited for no rank */
    struct cl_missing missing;     /* likewise, once the operation ended well */
    struct cl_operation *next;     /* in the list of whoever holds it */
    struct cl_operation *previous; /* among those that wait: see waiting.h */
    bool waits;                    /* it is one of these */
};

/* Operations in the order of submission, but for those that have waited: see waiting.h. */
struct cl_operation_list {
    struct cl_operation *first, **last;
};

static inline void cl_operation_list_append(struct cl_operation_list *list, struct cl_operation *operation)
{
    operation->next = NULL;
    *list->last = operation;
    list->last = &operation->next;
}

/* The time after timeout_us; UINT64_MAX: never. timeout_us 0 means none. */
uint64_t cl_deadline_after(uint64_t now_us, uint64_t timeout_us);

/* An operation on the bytes `input` and `output`. It holds the plan until cl_operation_free. */
void cl_operation_init(struct cl_operation *operation, struct cl_group *group, enum cl_operation_kind kind,
                       struct cl_plan *plan, void *input, void *output);
/* Sets what the request asks for: arithmetic, loss, deadline, signature. CL_EINVAL for an unknown dtype or op, or a
 * bound on loss that the two do not allow. */
int cl_operation_request(struct cl_operation *operation, const struct cl_operation_request *request, uint64_t now_us);
void cl_operation_free(struct cl_operation *operation);
/* Writes the word `done`, if there is one, and before that NaN to the results of an operation that failed. */
void cl_operation_write_done(struct cl_operation *operation, int status);

/* The place where an operation runs. */
struct cl_operation_place {
    struct cl_endpoint *endpoint;
    struct cl_host_queues *host_queues;
    const uint16_t *peers;
    uint32_t group; /* its id */
};
/* Creates the executor; the operation's order must have been assigned. */
int cl_operation_start(struct cl_operation *operation, const struct cl_operation_place *place, uint64_t now_us);
/* The bytes of the caller's memory that an operation has copied to end early. */
uint64_t cl_operation_copied_bytes(const struct cl_operation *operation);
/* Whether it may end for the caller, though acknowledgements are missing: then give back, and set `early`. It has its
 * result once it has received all parts from the others; they have called the same collective if it has received from
 * each to which it sends. */
bool cl_operation_may_end(struct cl_operation *operation);
/* Copies cl_operation_copied_bytes, so that the caller has its memory back. False: there is no memory. */
bool cl_operation_give_back(struct cl_operation *operation);
/* Takes the time of the first byte and what the operation did not count from the executor, which goes. */
void cl_operation_end(struct cl_operation *operation, int status, uint64_t now_us);
