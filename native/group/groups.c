#include "group/groups.h"

void cl_groups_add(struct cl_groups *groups, struct cl_group *group)
{
    group->next = groups->first;
    groups->first = group;
    group->groups = groups;
    cl_groups_wake(group);
    const struct cl_closed_group *aborted =
        group->endpoint != NULL ? cl_endpoint_find_abort(group->endpoint, group->id) : NULL;
    if (aborted != NULL) /* by a rank that opened it earlier */
        cl_group_hear_of(group, aborted);
}

static void fall_asleep(struct cl_groups *groups, struct cl_group **at)
{
    struct cl_group *group = *at;
    *at = group->next_awake;
    if (*at == NULL)
        groups->last = at;
    group->awake = false;
}

void cl_groups_remove(struct cl_groups *groups, struct cl_group *group)
{
    struct cl_group **at = &groups->first;
    while (*at != group)
        at = &(*at)->next;
    *at = group->next;
    for (at = &groups->awake; group->awake; at = &(*at)->next_awake)
        if (*at == group) {
            fall_asleep(groups, at);
            break;
        }
    group->groups = NULL;
}

void cl_groups_wake(struct cl_group *group)
{
    struct cl_groups *groups = group->groups;
    if (groups == NULL || group->awake)
        return;
    struct cl_group **last = groups->awake != NULL ? groups->last : &groups->awake;
    group->awake = true;
    group->next_awake = NULL;
    *last = group;
    groups->last = &group->next_awake;
}

void cl_groups_take(struct cl_operation *operation)
{
    cl_group_take(operation->group, operation);
    cl_groups_wake(operation->group);
}

void cl_groups_take_all(struct cl_operation *first)
{
    while (first != NULL) {
        struct cl_operation *next = first->next;
        cl_groups_take(first);
        first = next;
    }
}

void cl_groups_call(struct cl_groups *groups)
{
    atomic_store(&groups->called, true);
}

static void answer_call(struct cl_groups *groups)
{
    if (!atomic_load(&groups->called) || !atomic_exchange(&groups->called, false))
        return;
    for (struct cl_group *group = groups->first; group != NULL; group = group->next)
        if (!group->awake && !cl_group_may_sleep(group))
            cl_groups_wake(group);
}

bool cl_groups_progress(struct cl_groups *groups, uint64_t now_us, uint64_t *deadline_us)
{
    bool more = false;
    uint32_t first = CL_CLASSES;
    answer_call(groups);
    for (struct cl_group *group = groups->awake; group != NULL; group = group->next_awake) {
        group->urgent_class = cl_group_urgent_class(group);
        uint32_t class = cl_group_host_class(group);
        first = class < first ? class : first;
    }
    for (uint32_t class = 0; class <= CL_CLASSES; class ++) {
        for (struct cl_group *group = groups->awake; group != NULL; group = group->next_awake) {
            if (group->urgent_class != class)
                continue;
            bool most_urgent = cl_group_host_class(group) == first;
            size_t budget = most_urgent ? CL_WORK_BUDGET_BYTES : CL_WORK_BUDGET_BESIDE_BYTES;
            more |= cl_group_progress(group, budget, now_us, deadline_us);
        }
    }
    for (struct cl_group **at = &groups->awake; *at != NULL;) {
        if (cl_group_may_sleep(*at))
            fall_asleep(groups, at);
        else
            at = &(*at)->next_awake;
    }
    return more;
}

bool cl_groups_are_busy(const struct cl_groups *groups)
{
    const struct cl_group *group = groups->awake;
    while (group != NULL && cl_group_only_trails(group))
        group = group->next_awake;
    return group != NULL;
}

bool cl_groups_arm_bells(struct cl_groups *groups, uint64_t now_us, uint64_t *deadline_us)
{
    bool armed = true;
    for (struct cl_group *group = groups->awake; group != NULL; group = group->next_awake)
        armed &= cl_group_arm_bells(group, now_us, deadline_us);
    return armed;
}

void cl_groups_hear_of(struct cl_groups *groups, const struct cl_closed_group *aborted)
{
    for (struct cl_group *group = groups->first; group != NULL; group = group->next)
        if (group->id == aborted->group)
            cl_group_hear_of(group, aborted);
}

void cl_groups_peer_died(struct cl_groups *groups, uint16_t peer)
{
    cl_groups_call(groups); /* it may have died between a request and the ring */
    for (struct cl_group *group = groups->first; group != NULL; group = group->next)
        cl_group_peer_died(group, peer);
}
