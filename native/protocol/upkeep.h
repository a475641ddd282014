/* Upkeep: the part of the endpoint that acts when time has passed: silent paths and peers, held messages. */
#pragma once

#include <stdint.h>

struct cl_endpoint;
struct cl_peer;

uint64_t cl_endpoint_next_timeout(const struct cl_endpoint *endpoint); /* UINT64_MAX: none */
void cl_endpoint_timeout(struct cl_endpoint *endpoint, uint64_t now_us);
/* Something waits for a peer that was idle. Its silence begins now: so far it may have had no reason to send. */
void cl_endpoint_activate(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us);
