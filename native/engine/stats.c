/*
 * Stats: an engine's counters, as others read them.
 */
#include "engine/engine.h"

#include <string.h>

int cl_engine_read_stats(cl_engine *engine, struct cl_engine_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    pthread_mutex_lock(&engine->core);
    if (engine->endpoint != NULL)
        *stats = *cl_endpoint_stats(engine->endpoint);
    if (engine->ports.wire != NULL && engine->ports.wire_type->overflows != NULL)
        stats->packets_overflowed = engine->ports.wire_type->overflows(engine->ports.wire);
    pthread_mutex_unlock(&engine->core);
    stats->operations_done = atomic_load(&engine->operations_done);
    stats->operations_failed = atomic_load(&engine->operations_failed);
    stats->wakeups = atomic_load(&engine->wakeups);
    stats->send_calls = atomic_load(&engine->send_calls);
    stats->receive_calls = atomic_load(&engine->receive_calls);
    stats->shared_bytes_received = atomic_load(&engine->shared_bytes_received);
    return CL_OK;
}

int cl_engine_read_paths(cl_engine *engine, uint16_t peer, struct cl_path_stats *paths, uint32_t capacity)
{
    pthread_mutex_lock(&engine->core);
    int count = engine->endpoint == NULL ? CL_EINVAL : cl_endpoint_read_paths(engine->endpoint, peer, paths, capacity);
    for (int i = 0; i < count && (uint32_t)i < capacity; i++)
        paths[i].port = engine->peers.links[peer][i].port;
    pthread_mutex_unlock(&engine->core);
    return count;
}
