/*
 * Outcome: applies the fate of packets that this process sent (acknowledged, late, refused, lost) to their messages and
 * control packets.
 */
#pragma once

#include "protocol/endpoint_state.h"

struct cl_outcome {
    struct cl_endpoint *endpoint;
    struct cl_peer *peer;
    uint64_t now_us;
};

/* The callbacks for a path of the peer; valid as long as `outcome`. */
struct cl_path_callbacks cl_outcome_callbacks(struct cl_outcome *outcome);
