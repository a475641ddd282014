/*
 * Engine: the thread, the endpoint and the wire of one process. engine.c is the thread's loop, opening.c opens and
 * closes, stats.c reads the counters.
 *
 * Locks, always taken in this order:
 *   engine->core         everything the engine thread works on: endpoint, wire, operations in flight; held while it
 *                        works;
 *   member->submitting   the order of submission to a group, and who may run operations in shared memory (member.h);
 *   engine->inbox        the hand-over from submitting threads, held for a few instructions;
 *   engine->events       completions for Python's completion thread.
 * The port set has a lock of its own, under which no other is taken.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "engine/events.h"
#include "engine/peers.h"
#include "engine/port_set.h"
#include "group/nap.h"
#include "group/turn.h"

struct cl_packet_wait;

enum { CL_SEND_BATCH = 128 }; /* packets, four turns of fast links: see queue.h */

struct cl_engine {
    pthread_t thread;
    pthread_mutex_t core, inbox;
    atomic_bool stopping;
    int wake_fd;
    int timer_fd;             /* moves the end of the thread's sleep forward without waking it */
    uint64_t due_us;          /* (core) its next turn, at the latest */
    uint64_t sleeps_until_us; /* (core) */
    struct cl_bell bell;
    struct cl_meter meter; /* (core; its descriptor stays) */
    struct cl_engine_options options;
    /* network (core) */
    struct cl_ports ports; /* without a wire: shared memory only */
    struct cl_endpoint *endpoint;
    uint64_t job;
    uint8_t key[16];
    uint16_t self, epoch;
    struct cl_peers peers;
    struct cl_datagram *batch;
    uint64_t polled_ports; /* bit per port: the sleeping thread wakes when it has room */
    uint64_t last_heard_us;
    uint64_t readable, ever_readable; /* bit per port: look there in the next turn; what polling has found so far */
    struct cl_nap nap;
    struct cl_packet_wait *packet_wait; /* NULL: only the engine's thread polls the ports */
    atomic_bool ports_taken;            /* a calling thread polls the ports */
    atomic_bool keeps_ports;            /* the engine's thread naps, or waits for room */
    struct cl_port_set port_set;        /* with a packet_wait: the ports on which the engine's thread sleeps */
    struct cl_groups groups;
    struct cl_news news; /* what the turn has to tell */
    /* hand-over (inbox) */
    struct cl_operation_list handed_over;
    struct cl_events events;
    /* counters (core, or atomic where callers add) */
    _Atomic uint64_t operations_done, operations_failed, wakeups, send_calls, receive_calls;
    _Atomic uint64_t shared_bytes_received;
    _Atomic uint64_t eager_messages; /* bytes on their way: copies of short messages, whose sends are done */
};

/* Starts the thread, at the end of opening. */
int cl_engine_start(struct cl_engine *engine);
void cl_engine_wake(struct cl_engine *engine);
/* Has sleeping groups looked at, by the engine's thread. */
void cl_engine_call(struct cl_engine *engine);
/* Has the inbox looked at: by the calling thread if the engine's sleeps, which saves two thread switches; else by the
 * engine's. The calling thread takes two turns if need be, the second for what the first has begun. `unless_busy`: by
 * the engine's also if other operations are in flight or a port is full, as those turns might be long. */
void cl_engine_attend(struct cl_engine *engine, bool unless_busy);
/* Takes the engine's next turn in the calling thread, which visits the group. Returns whether there is more to do at
 * once. Where another thread is amid a long turn, it takes none: the engine's thread does. */
bool cl_engine_take_turn(struct cl_engine *engine, struct cl_group *group);
/* A calling thread is about to poll the ports; the engine's sleeps on without them. False: another one does, or packets
 * come in bulk, for which the engine's thread naps, or waits for room. `unless_busy`: also if that thread is awake. */
bool cl_engine_take_ports(struct cl_engine *engine, bool unless_busy);
/* Takes the engine's next turns in the calling thread, which polls the ports and has found some readable (a bit each).
 * Returns whether it shall go on polling: until *done is not 0, or packets come in bulk. done == NULL: it stops. So
 * it does where another thread is amid a long turn: the engine's has the ports then.
 * `again`: another wait will begin soon, mostly, and no other thread waits for packets now. */
bool cl_engine_take_ports_turn(struct cl_engine *engine, uint64_t readable, const _Atomic uint32_t *done, bool again);
