/*
 * Call: one thing that ranks of a group do together: a collective of all of them, or a message from one to another.
 */
#ifndef CL_SIM_CALL_H
#define CL_SIM_CALL_H

#include <stdbool.h>

#include "commlayer.h"

enum sim_call_kind { SIM_CALL_COLLECTIVE, SIM_CALL_MESSAGE };

struct sim_call {
    enum sim_call_kind kind;
    uint32_t group;
    struct cl_qos qos;
    uint64_t at_ns; /* from the start; ranks differ by up to skew_ns, and are later still when they are not done */
    /* a collective */
    uint32_t shape;
    enum cl_dtype dtype;
    enum cl_op op;
    bool nan; /* some of the elements are NaN */
    /* a message: group ranks */
    uint32_t from, to, tag, length;
    bool any_source; /* the receive takes the message of any rank */
    uint32_t after;  /* the sender waits for the end of that earlier call; UINT32_MAX: of none */
};

/* Whether a rank of the call's group takes part. */
static inline bool sim_call_involves(const struct sim_call *call, uint32_t rank)
{
    return call->kind == SIM_CALL_COLLECTIVE || rank == call->from || rank == call->to;
}

#endif
