/*
 * Stats: an engine's counters, as others read them.
 */
#include "engine/engine.h"

#include <string.h>

int cl_engine_read_stats(cl_engine *engine, struct cl_engine_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    pthread_mutex_lock(&engine->core);
    if (engine->endpoint != NULL) {
        const struct cl_endpoint_stats *from = cl_endpoint_stats(engine->endpoint);
        stats->packets_sent = from->packets_sent;
        stats->packets_received = from->packets_received;
        stats->payload_bytes_sent = from->payload_bytes_sent;
        stats->payload_bytes_received = from->payload_bytes_received;
        stats->packets_retransmitted = from->packets_retransmitted;
        stats->packets_lost = from->packets_lost;
        stats->packets_spurious = from->packets_spurious;
        stats->packets_duplicate = from->packets_duplicate;
        stats->packets_foreign = from->packets_foreign;
        stats->packets_forged = from->packets_forged;
        stats->packets_replayed = from->packets_replayed;
        stats->packets_unexpected = from->packets_unexpected;
        stats->packets_unexpected_dropped = from->packets_unexpected_dropped;
        stats->acks_sent = from->acks_sent;
        stats->acks_received = from->acks_received;
        stats->probes_sent = from->probes_sent;
        stats->packets_given_up = from->packets_given_up;
        stats->packets_late = from->packets_late;
        stats->messages_stopped = from->messages_stopped;
    }
    pthread_mutex_unlock(&engine->core);
    stats->operations_done = atomic_load(&engine->operations_done);
    stats->operations_failed = atomic_load(&engine->operations_failed);
    stats->wakeups = atomic_load(&engine->wakeups);
    stats->send_calls = atomic_load(&engine->send_calls);
    stats->receive_calls = atomic_load(&engine->receive_calls);
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
