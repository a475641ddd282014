#include "protocol/spray.h"

/* Whether data may take the path, of all paths to its peer: not if it is dead, nor paused while another one lives. */
static bool is_usable(const struct cl_path *path, const struct cl_path *paths, uint32_t count)
{
    if (path->dead || !path->paused)
        return !path->dead;
    for (uint32_t i = 0; i < count; i++)
        if (!paths[i].dead && !paths[i].paused)
            return false;
    return true;
}

static void lower(uint64_t *least, uint64_t value)
{
    if (value < *least)
        *least = value;
}

/* The time when a packet would arrive: after the packets queued before it, at the interface and beyond. */
static uint64_t arrival_us(const struct cl_path *path)
{
    return cl_congestion_delay_us(&path->congestion) + cl_rtt_base_us(&path->rtt) / 2;
}

struct cl_path *cl_spray_pick(struct cl_path *paths, uint32_t count, const struct cl_spray_packet *packet,
                              uint64_t now_us, uint64_t *ready_us, uint64_t *egress_ready_us)
{
    struct cl_path *best = NULL;
    uint64_t best_us = UINT64_MAX;
    *ready_us = *egress_ready_us = UINT64_MAX;
    for (uint32_t i = 0; i < count; i++) {
        struct cl_path *path = &paths[i];
        if (!is_usable(path, paths, count) || cl_path_is_full(path))
            continue;
        if (!cl_path_open(path, packet->class, packet->bytes)) {
            *(packet->class == CL_CLASS_YIELDS ? &path->yields_limited_until : &path->limited_until) = path->sent.next;
            continue;
        }
        uint64_t path_ready_us = cl_congestion_ready_us(&path->congestion, packet->first_class, now_us);
        if (path_ready_us > now_us) {
            lower(ready_us, path_ready_us);
            continue;
        }
        uint64_t interface_ready_us = cl_congestion_nic_ready_us(&path->nic->congestion, packet->first_class, now_us);
        if (interface_ready_us > now_us) {
            lower(egress_ready_us, interface_ready_us);
            continue;
        }
        if (count == 1)
            return path;
        uint64_t path_us = arrival_us(path);
        if (path_us < best_us) {
            best = path;
            best_us = path_us;
        }
    }
    return best;
}

/* Whether the path itself allows the packet, whatever the interface does. */
static bool is_free(struct cl_path *path, const struct cl_spray_packet *packet, uint64_t now_us)
{
    return !cl_path_is_full(path) && cl_path_open(path, packet->class, packet->bytes) &&
           cl_congestion_ready_us(&path->congestion, packet->first_class, now_us) <= now_us;
}

bool cl_spray_may(struct cl_path *path, const struct cl_spray_packet *packet, uint64_t now_us)
{
    return !path->dead && !path->paused && is_free(path, packet, now_us) &&
           cl_congestion_nic_ready_us(&path->nic->congestion, packet->first_class, now_us) <= now_us;
}

struct cl_path *cl_spray_through(struct cl_path *paths, uint32_t count, const struct cl_nic *nic,
                                 const struct cl_spray_packet *packet, uint64_t now_us)
{
    struct cl_path *best = NULL;
    for (uint32_t i = 0; i < count; i++) {
        struct cl_path *path = &paths[i];
        if (path->nic == nic && is_usable(path, paths, count) && is_free(path, packet, now_us) &&
            (best == NULL || arrival_us(path) < arrival_us(best)))
            best = path;
    }
    return best;
}

struct cl_path *cl_spray_fastest(struct cl_path *paths, uint32_t count)
{
    struct cl_path *best = NULL;
    bool waits = false;
    for (uint32_t i = 0; i < count; i++) {
        struct cl_path *path = &paths[i];
        if (cl_path_is_full(path)) {
            waits = waits || !path->dead;
            continue;
        }
        bool usable = is_usable(path, paths, count), best_usable = best != NULL && is_usable(best, paths, count);
        if (best == NULL || (best->dead && !path->dead) ||
            (usable && (!best_usable || path->rtt.smoothed_us < best->rtt.smoothed_us)))
            best = path;
    }
    /* Nothing detects the loss of a packet on a dead path. */
    return best != NULL && best->dead && waits ? NULL : best;
}
