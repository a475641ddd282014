/*
 * Spray: which path the next packet takes: of those with room, the one over which it should arrive first.
 */
#ifndef CL_PROTOCOL_SPRAY_H
#define CL_PROTOCOL_SPRAY_H

#include "protocol/path.h"

struct cl_spray_packet {
    uint32_t bytes;
    uint8_t class;
    uint8_t first_class; /* the most urgent one that has anything to send: this may be its guard's packet */
};

/* NULL when no path may take the packet now; *ready_us is then when the first pacer will let it (UINT64_MAX:
 * an acknowledgement has to come first). */
struct cl_path *cl_spray_pick(struct cl_path *paths, uint32_t count, const struct cl_spray_packet *packet,
                              uint64_t now_us, uint64_t *ready_us, uint64_t *egress_ready_us);

/* Whether this path may take the packet now. */
bool cl_spray_may(struct cl_path *path, const struct cl_spray_packet *packet, uint64_t now_us);

/* The same among the paths through one interface, which may send; NULL: none has room. */
struct cl_path *cl_spray_through(struct cl_path *paths, uint32_t count, const struct cl_egress *egress,
                                 const struct cl_spray_packet *packet, uint64_t now_us);

/* The live path to prefer for small urgent packets: the one with the shortest round trip. */
struct cl_path *cl_spray_fastest(struct cl_path *paths, uint32_t count);

#endif
