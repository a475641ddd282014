/* Outbound: the part of the endpoint that fills datagrams. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol/datagram.h"

struct cl_endpoint;

/* Fills up to `capacity` datagrams that may leave now; returns how many. A packet that its path does not carry whole
 * takes up to CL_MTU_FRAGMENTS_MAX of them. */
size_t cl_endpoint_send(struct cl_endpoint *endpoint, uint64_t now_us, struct cl_datagram *out, size_t capacity);
/* Gives a datagram of the latest cl_endpoint_send back: its port is full. Until the port is released nothing leaves
 * through it, and other paths carry what they can. */
void cl_endpoint_refuse(struct cl_endpoint *endpoint, const struct cl_datagram *datagram);
/* The port may have room again. */
void cl_endpoint_release_port(struct cl_endpoint *endpoint, uint32_t port);
/* A bit per full port. */
uint64_t cl_endpoint_full_ports(const struct cl_endpoint *endpoint);
/* Whether urgent packets leave beside others, or did a moment ago: then the caller should not make them wait. */
bool cl_endpoint_has_urgent(const struct cl_endpoint *endpoint, uint64_t now_us);
