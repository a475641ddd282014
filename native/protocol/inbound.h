/* Inbound: datagrams that come. Part of the endpoint. */
#ifndef CL_PROTOCOL_INBOUND_H
#define CL_PROTOCOL_INBOUND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cl_endpoint;

/* What comes from outside the job changes nothing but a counter: no reply, no memory, no sign of life.
 * marked: a switch on its way says that its queue is long (ECN's CE).
 * received_us is the kernel's receive time where known, else now_us: the difference is this host's own delay, reported
 * in the acknowledgement so that the sender's congestion control sees the network and not a busy receiver. */
void cl_endpoint_receive(struct cl_endpoint *endpoint, const uint8_t *bytes, size_t length, bool marked,
                         uint64_t received_us, uint64_t now_us);

#endif
