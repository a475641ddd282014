/*
 * Message wait: how calling threads wait for messages of one group that come through shared memory. A thread that waits
 * attends to the group's doorbell: it spins as long as recent waits suggest, then sleeps there, and moves the messages
 * itself, in a turn of the engine. That saves the switch to the engine's thread and back.
 *
 * It outlives its group, since an operation may be waited for after its group has been closed.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct cl_engine;
struct cl_group;
struct cl_doorbell;

struct cl_message_wait {
    atomic_uint references; /* the group's, and of operations */
    atomic_uint inside;     /* threads that wait */
    atomic_bool closed;     /* engine, group and doorbell may be gone */
    struct cl_engine *engine;
    struct cl_group *group;
    struct cl_doorbell *doorbell; /* this rank's */
    bool spins;
    _Atomic uint32_t pause;    /* waits that do not spin before the next one that does */
    _Atomic uint32_t failures; /* grows with spins in vain, one after another */
};

/* `spin`: whether each rank of the host can have a core. NULL: no memory. */
struct cl_message_wait *cl_message_wait_create(struct cl_engine *engine, struct cl_group *group,
                                               struct cl_doorbell *doorbell, bool spin);
void cl_message_wait_retain(struct cl_message_wait *wait);
/* NULL is accepted. */
void cl_message_wait_release(struct cl_message_wait *wait);
/* Sends the threads away, and drops the group's reference. The group's memory may be freed afterwards. */
void cl_message_wait_close(struct cl_message_wait *wait);

/* Waits until *done is not 0, the group is closed, or the deadline has passed. */
void cl_message_wait_for(struct cl_message_wait *wait, const _Atomic uint32_t *done, uint64_t deadline_us);
