#include "core/spray.h"

/* When a packet of `bytes` sent now would arrive, in us: what is in flight before it drains at the path's rate (one
 * window per round trip), then it travels. */
static uint64_t arrival_us(const struct cl_path *path, uint32_t bytes)
{
    return (path->sent.bytes + bytes) * path->rtt.smoothed_us / path->cc.window + cl_rtt_base_us(&path->rtt) / 2;
}

struct cl_path *cl_spray_pick(struct cl_path *paths, uint32_t count, uint32_t bytes, uint64_t now_us,
                              uint64_t *ready_us)
{
    struct cl_path *best = NULL;
    uint64_t best_us = UINT64_MAX;
    *ready_us = UINT64_MAX;
    for (uint32_t i = 0; i < count; i++) {
        struct cl_path *path = &paths[i];
        if (path->dead)
            continue;
        if (!cl_path_open(path, bytes)) {
            path->limited_until = path->sent.next;
            continue;
        }
        if (!cl_egress_open(path->egress, bytes)) {
            cl_egress_limit(path->egress);
            path->egress->waited_for = true;
            continue;
        }
        uint64_t path_ready_us = cl_pacer_ready_us(&path->pacer, now_us);
        if (path_ready_us > now_us) {
            if (path_ready_us < *ready_us)
                *ready_us = path_ready_us;
            continue;
        }
        uint64_t path_us = count == 1 ? 0 : arrival_us(path, bytes);
        if (path_us < best_us) {
            best = path;
            best_us = path_us;
        }
    }
    return best;
}

struct cl_path *cl_spray_fastest(struct cl_path *paths, uint32_t count)
{
    struct cl_path *best = &paths[0];
    for (uint32_t i = 1; i < count; i++)
        if (!paths[i].dead && (best->dead || paths[i].rtt.smoothed_us < best->rtt.smoothed_us))
            best = &paths[i];
    return best;
}
