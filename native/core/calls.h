/*
 * Calls: the operations in flight here, with a signature of what was called. Each DATA packet carries its sender's, so
 * that ranks that disagree learn it at once, instead of waiting for messages that do not fit or never come. PINGs carry
 * them, too: for ranks that all wait for each other.
 *
 * A signature has 12 bits: there is room for no more in the header, and it is mixed with those before it (see
 * assign_order in group.c), so what one operation misses, once in 4095 times, the next one finds.
 */
#ifndef CL_CORE_CALLS_H
#define CL_CORE_CALLS_H

#include <stdbool.h>
#include <stdint.h>

struct cl_call {
    uint32_t group, sequence;
    uint16_t signature;
};

struct cl_calls {
    struct cl_call *list; /* in the order they began */
    uint32_t count, capacity;
    uint32_t turn; /* of cl_calls_next */
};

/* False when there is no memory. */
bool cl_calls_add(struct cl_calls *calls, uint32_t group, uint32_t sequence, uint16_t signature);
/* The signature of an operation in flight; 0 when it is none, or may not be compared. */
uint16_t cl_calls_find(const struct cl_calls *calls, uint32_t group, uint32_t sequence);
void cl_calls_remove(struct cl_calls *calls, uint32_t group, uint32_t sequence);
/* Each in turn, whatever comes and goes; all zeros when there is none. */
struct cl_call cl_calls_next(struct cl_calls *calls);
void cl_calls_free(struct cl_calls *calls);

/* Whether two signatures say that their ranks called different things. */
static inline bool cl_calls_differ(uint16_t one, uint16_t other)
{
    return one != other && one != 0 && other != 0;
}

#endif
