/* Sink: the destination of a received message. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Delivers the payload of a packet from `offset` of the message on. Offsets and lengths are multiples of 8 bytes, or of
 * a block of encoded values, except at the end of the message, so elements are never split. */
typedef void (*cl_deliver_fn)(void *target, size_t offset, const void *payload, size_t length, void *argument);
struct cl_sink {
    uint8_t *target;
    cl_deliver_fn deliver; /* NULL: memcpy */
    void *argument;
};
