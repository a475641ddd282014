/* Outbound: the part of the endpoint that fills datagrams. */
#ifndef CL_PROTOCOL_OUTBOUND_H
#define CL_PROTOCOL_OUTBOUND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cl_endpoint;

enum { CL_HEAD_BYTES_MAX = 512 };

/* A datagram to be sent: the head, then the payload if there is any. `payload` points into the memory of a posted
 * message and stays valid until that message completes. */
struct cl_datagram {
    uint16_t peer;
    uint16_t path;
    uint8_t priority;
    bool droppable; /* a switch that has to drop a packet may drop this one first */
    uint16_t head_length;
    uint32_t payload_length;
    const uint8_t *payload;
    uint8_t head[CL_HEAD_BYTES_MAX];
};

/* Fills up to `capacity` datagrams that may leave now; returns how many. */
size_t cl_endpoint_send(struct cl_endpoint *endpoint, uint64_t now_us, struct cl_datagram *out, size_t capacity);
/* Whether urgent packets leave beside others, or did a moment ago: then the caller should not make them wait. */
bool cl_endpoint_has_urgent(const struct cl_endpoint *endpoint, uint64_t now_us);

#endif
