/*
 * A UDP wire that tests look at: it counts its sends, and can refuse or lose the packets.
 */
#pragma once

#include "tests/world.h"

static _Thread_local uint32_t own_sends; /* calls of `send` in this thread */
static atomic_bool refuses;              /* there is no room */
static atomic_bool loses;                /* the network loses everything */

static inline size_t send_watched(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    own_sends++;
    if (atomic_load(&loses))
        return count;
    return atomic_load(&refuses) ? 0 : cl_wire_udp.send(wire, datagrams, count);
}

static inline void watch(const struct world *world, uint32_t rank)
{
    static struct cl_wire_type type;
    cl_engine *engine = world->engines[rank];
    pthread_mutex_lock(&engine->core);
    type = cl_wire_udp;
    type.send = send_watched;
    engine->ports.wire_type = &type;
    pthread_mutex_unlock(&engine->core);
}
