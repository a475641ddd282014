/* Datagram: one datagram on its way from the endpoint to the wire. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct cl_message;

enum { CL_HEAD_BYTES_MAX = 512 };

/* A datagram to be sent: the head, then the payload if there is any. `payload` points into the memory of a posted
 * message and stays valid until that message completes, so the caller sends the datagram, or refuses it, at once. */
struct cl_datagram {
    uint16_t peer;
    uint16_t path;
    uint16_t port; /* the port through which the path leaves: see cl_endpoint_bind_peer */
    uint8_t priority;
    bool droppable; /* a switch that has to drop a packet may drop this one first */
    uint16_t head_length;
    uint32_t payload_length;
    const uint8_t *payload;
    const struct cl_message *message; /* the message of the payload; NULL: none */
    uint32_t generation;              /* the message has ended if its own is another */
    uint8_t head[CL_HEAD_BYTES_MAX];
};
