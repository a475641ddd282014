/* Inbound: the part of the endpoint that takes datagrams in. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cl_endpoint;

/* Takes a datagram in. One from outside the job changes nothing but a counter: it gets no reply, takes no memory and is
 * no sign of life.
 * marked: a switch marked it, as its queue is long (ECN's CE).
 * received_us is the kernel's receive time where known, else now_us. The difference is this host's own delay. The
 * acknowledgement reports it, so that the sender's congestion control sees the network and not a busy receiver. */
void cl_endpoint_receive(struct cl_endpoint *endpoint, const uint8_t *bytes, size_t length, bool marked,
                         uint64_t received_us, uint64_t now_us);
/* The fewest packets that all receives from a peer together lacked, of peers from which packets came since the last
 * call; UINT64_MAX: there is none. The peer's link idles when these receives end. */
uint64_t cl_endpoint_lacking(struct cl_endpoint *endpoint);
