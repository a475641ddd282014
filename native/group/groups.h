/*
 * Groups: all groups of one process, and which of them have work. A turn visits those that are awake, so idle groups
 * cost nothing.
 *
 * A group falls asleep when it has no operation in flight and owes the ranks of its host nothing. Nothing is missed:
 *   - Packets, timers and host counters concern operations in flight, and a group that has one is awake:
 *     cl_groups_take wakes it.
 *   - A rank of the host that wants something (a message through a full ring, an abort) raises this rank's count of
 *     requests, and then looks whether it is to ring the bell. A group that falls asleep asks for the bell, and then
 *     looks at the count (cl_channels_arm). So it stays awake, or the bell rings. A rank that dies before it rings has
 *     taken the wish with it, also from ranks that want something later: its death makes all groups look at the count.
 *   - A thread that fails a group sets its status first.
 *   - Bells and such threads name no group: they have cl_groups_call called, after which the next turn asks each group
 *     that sleeps whether it still may. A call that comes while it asks counts for the turn after it.
 *
 * Calls must be serialised, except those marked "any thread".
 */
#pragma once

#include "group/group.h"

/* All zero: none. */
struct cl_groups {
    struct cl_group *first;         /* all, by `next` */
    struct cl_group *awake, **last; /* a list by `next_awake`, in the order in which they woke */
    atomic_bool called;
};

/* Adds a group, which is awake. It fails at once if a peer has aborted it before. */
void cl_groups_add(struct cl_groups *groups, struct cl_group *group);
void cl_groups_remove(struct cl_groups *groups, struct cl_group *group);
/* Wakes a group; one of no list stays as it is. */
void cl_groups_wake(struct cl_group *group);
/* Takes a queued operation into its group, which wakes. They go in the order in which they were queued. */
void cl_groups_take(struct cl_operation *operation);
/* Takes the queued operations from the first of a list on, which may belong to several groups. */
void cl_groups_take_all(struct cl_operation *first);
/* The next turn must look for groups that have to wake. Any thread; whoever calls has a turn taken afterwards. */
void cl_groups_call(struct cl_groups *groups);

/* Runs what can run, in the group with the most urgent operation first. Beside a more urgent operation in shared
 * memory, the other groups have the budget CL_WORK_BUDGET_BESIDE_BYTES. Returns whether there is more to do at once.
 * *deadline_us is lowered to the next one. */
bool cl_groups_progress(struct cl_groups *groups, uint64_t now_us, uint64_t *deadline_us);
/* Whether a caller waits, or may wait, for one of them. */
bool cl_groups_are_busy(const struct cl_groups *groups);
/* Asks for bells for whatever waits, and lowers *deadline_us in case one is lost; false when something moved meanwhile.
 */
bool cl_groups_arm_bells(struct cl_groups *groups, uint64_t now_us, uint64_t *deadline_us);
/* Notes that a peer has aborted a group. */
void cl_groups_hear_of(struct cl_groups *groups, const struct cl_closed_group *aborted);
/* Notes that the process of a local peer died. */
void cl_groups_peer_died(struct cl_groups *groups, uint16_t peer);
