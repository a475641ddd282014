#include "core/crowd.h"

#include <stddef.h>

static void take_out(struct cl_crowd *crowd, struct cl_crowd_member *member)
{
    *(member->previous ? &member->previous->next : &crowd->first) = member->next;
    *(member->next ? &member->next->previous : &crowd->last) = member->previous;
    member->previous = member->next = NULL;
}

void cl_crowd_see(struct cl_crowd *crowd, struct cl_crowd_member *member, uint64_t now_us)
{
    member->seen_us = now_us;
    if (crowd->last == member)
        return;
    if (member->counted)
        take_out(crowd, member);
    else
        crowd->count++;
    member->counted = true;
    member->previous = crowd->last;
    *(crowd->last ? &crowd->last->next : &crowd->first) = member;
    crowd->last = member;
}

void cl_crowd_leave(struct cl_crowd *crowd, struct cl_crowd_member *member)
{
    if (!member->counted)
        return;
    member->counted = false;
    take_out(crowd, member);
    crowd->count--;
}

uint32_t cl_crowd_count(struct cl_crowd *crowd, uint64_t idle_us, uint64_t now_us)
{
    while (crowd->first && crowd->first->seen_us + idle_us < now_us)
        cl_crowd_leave(crowd, crowd->first);
    return crowd->count;
}
