/*
 * Signatures: the operations in flight in this process, each with a signature of the call. DATA packets carry the
 * sender's signature, so that ranks that disagree learn it at once, instead of waiting for messages that do not fit or
 * never come. PINGs carry signatures, too, for ranks that all wait for each other.
 *
 * A signature has 12 bits, as the header has no room for more. It depends on all earlier ones (see cl_group_order in
 * group.c): if two calls that differ have equal signatures, once in 4095 times, the next operation shows it.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "protocol/index.h"

struct cl_signature {
    uint32_t group, sequence;
    uint16_t signature;
};

struct cl_signatures {
    struct cl_signature_entry *first, *last; /* a list in the order they began */
    struct cl_signature_entry *turn;         /* the next one of cl_signatures_next; NULL: the first */
    struct cl_index operations;
};

/* False when there is no memory. */
bool cl_signatures_add(struct cl_signatures *signatures, uint32_t group, uint32_t sequence, uint16_t signature);
/* The signature of an operation in flight; 0 when it is not in flight, or is not compared. */
uint16_t cl_signatures_find(const struct cl_signatures *signatures, uint32_t group, uint32_t sequence);
/* The lowest sequence of a group's operations in flight; UINT32_MAX: there are none. */
uint32_t cl_signatures_oldest(const struct cl_signatures *signatures, uint32_t group);
/* Whether an operation of a group with a sequence from `first` to `last` is in flight. */
bool cl_signatures_any(const struct cl_signatures *signatures, uint32_t group, uint32_t first, uint32_t last);
void cl_signatures_remove(struct cl_signatures *signatures, uint32_t group, uint32_t sequence);
/* The next operation in turn, also while operations begin and end; all zeros when there is none. */
struct cl_signature cl_signatures_next(struct cl_signatures *signatures);
void cl_signatures_free(struct cl_signatures *signatures);

/* Whether two signatures prove that their ranks made different calls. */
static inline bool cl_signatures_differ(uint16_t one, uint16_t other)
{
    return one != other && one != 0 && other != 0;
}
