#include "congestion/active_set.h"

#include <stddef.h>

static void take_out(struct cl_active_set *active_set, struct cl_active_set_member *member)
{
    *(member->previous != NULL ? &member->previous->next : &active_set->first) = member->next;
    *(member->next != NULL ? &member->next->previous : &active_set->last) = member->previous;
    member->previous = member->next = NULL;
}

void cl_active_set_see(struct cl_active_set *active_set, struct cl_active_set_member *member, uint64_t now_us)
{
    member->seen_us = now_us;
    if (active_set->last == member)
        return;
    if (member->counted)
        take_out(active_set, member);
    else
        active_set->count++;
    member->counted = true;
    member->previous = active_set->last;
    *(active_set->last != NULL ? &active_set->last->next : &active_set->first) = member;
    active_set->last = member;
}

void cl_active_set_leave(struct cl_active_set *active_set, struct cl_active_set_member *member)
{
    if (!member->counted)
        return;
    member->counted = false;
    take_out(active_set, member);
    active_set->count--;
}

uint32_t cl_active_set_count(struct cl_active_set *active_set, uint64_t idle_us, uint64_t now_us)
{
    while (active_set->first != NULL && active_set->first->seen_us + idle_us < now_us)
        cl_active_set_leave(active_set, active_set->first);
    return active_set->count;
}
