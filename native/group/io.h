/*
 * Group I/O: the functions through which a group reaches its surroundings. The engine supplies threads, futexes and
 * sockets behind them, the simulator a virtual clock and virtual hosts. A group itself has no clock, lock or thread.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct cl_operation;

struct cl_group_io {
    void *context;
    /* The group has failed: asks for cl_groups_call, and a turn. Any thread. */
    void (*wake)(void *context);
    /* Makes this host's threads and engines that wait for a host counter look at their group's state. */
    void (*wake_host)(void *context);
    /* Raises this rank's host counter of a queue and wakes the ranks that wait for it. */
    void (*post)(void *context, uint32_t queue, uint32_t value);
    /* Asks for a wake-up when local rank `index` posts next in a queue. The caller must check that counter once more
     * afterwards. */
    void (*request_bell)(void *context, uint32_t queue, uint32_t index);
    /* Whether local rank `index` has left the group or has been stopped for the peer timeout: it posts no more. */
    bool (*is_gone)(void *context, uint32_t index, uint64_t now_us);
    /* Tells the ranks of this host that the group failed. The first reason stays. */
    void (*abort)(void *context, int reason, uint32_t culprit);
    /* The reason that a rank of this host gave, and the culprit it named; CL_OK: none did. */
    int (*aborted)(void *context, uint32_t *culprit);
    /* The operation has ended. Its buffers are the caller's again, unless they have been since `early`. */
    void (*ended)(void *context, struct cl_operation *operation, int status);
    /* Asks to end the operation for its caller now, with success, while the group goes on with what it sends. After
     * true the group writes the output, so the caller must not be told before the end of the turn. `ended` is called
     * later, too. NULL: never. */
    bool (*early)(void *context, struct cl_operation *operation);
    /* ---- messages between ranks of the host: channel.h ---- */
    /* Tells local rank `index` of entries in its rings (channel.h); at_once: even if it has nothing in flight. */
    void (*notify)(void *context, uint32_t index, bool at_once);
    /* Asks the local ranks for wake-ups: all: of every entry, else of those that say at_once. The caller must look at
     * the rings once more afterwards. */
    void (*listen)(void *context, bool all);
    /* Reads memory of local rank `index`; a status other than CL_OK: this cannot be done. */
    int (*read_memory)(void *context, uint32_t index, uint64_t address, void *target, uint64_t bytes);
};
