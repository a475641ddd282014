/*
 * Spray: chooses the path of the next packet: of the paths with room, the one over which it should arrive first. A path
 * whose port is full has none. A paused path is used only while no other one lives.
 */
#pragma once

#include "protocol/path.h"

struct cl_spray_packet {
    uint32_t bytes;
    uint8_t class;
    uint8_t first_class; /* the most urgent class with data; a less urgent packet is the guard's: see queue.h */
};

/* NULL when no path may take the packet now. Then *ready_us is when the first path's pacer lets it go, and
 * *egress_ready_us when the first interface's does (UINT64_MAX: an acknowledgement has to come first). */
struct cl_path *cl_spray_pick(struct cl_path *paths, uint32_t count, const struct cl_spray_packet *packet,
                              uint64_t now_us, uint64_t *ready_us, uint64_t *egress_ready_us);

/* Whether this path, which is neither dead nor paused, may take the packet now. */
bool cl_spray_may(struct cl_path *path, const struct cl_spray_packet *packet, uint64_t now_us);

/* A path through one interface, whose pacer allows the packet; NULL: none has room. */
struct cl_path *cl_spray_through(struct cl_path *paths, uint32_t count, const struct cl_nic *nic,
                                 const struct cl_spray_packet *packet, uint64_t now_us);

/* The live path with the shortest round trip, for small urgent packets; a dead one only if none lives. NULL: the
 * ports of all live paths are full. */
struct cl_path *cl_spray_fastest(struct cl_path *paths, uint32_t count);
