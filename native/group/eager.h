/*
 * Eager: short messages to ranks of other hosts. A send copies its message and is done at once; the copy leaves, and
 * is sent again where packets get lost, while the caller goes on. An eager send of a group that fails later has no
 * error of its own: the group's next operation has it.
 *
 * The copies of a group are limited in size. Beyond the limit a send is done once the receiver has the message.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    CL_EAGER_MESSAGE_BYTES = 65536,           /* the longest message that is copied */
    CL_EAGER_LIMIT_BYTES = 1 << 20,           /* the most of all copies that no receiver has acknowledged yet */
    CL_EAGER_COST_BYTES = 256,                /* what a message costs beside its data */
    CL_EAGER_FLUSH_MAX_US = 20 * 1000 * 1000, /* a process that leaves waits no longer for acknowledgements */
};

struct cl_eager {
    _Atomic uint64_t bytes;
};

/* Whether so many bytes may be copied; then they count until cl_eager_release. */
bool cl_eager_reserve(struct cl_eager *eager, uint64_t length);
/* The same for a message, which may also be too long. */
bool cl_eager_reserve_message(struct cl_eager *eager, uint64_t length);
void cl_eager_release(struct cl_eager *eager, uint64_t length);
