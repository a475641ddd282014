/*
 * Outbox: datagrams that the endpoint has handed out and a full port has not taken, by port. They leave first once the
 * port has room again, if they are still in flight: a packet that was declared lost meanwhile has been sent again, and
 * the memory of a message that has ended belongs to somebody else.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cl_datagram;
struct cl_message;

enum { CL_OUTBOX_PORTS = 64 };

struct cl_outbox_port {
    struct cl_datagram *list;
    uint32_t first, count, capacity; /* waiting: [first, count) */
    bool full;                       /* nothing more is handed out for this port */
};

struct cl_outbox {
    struct cl_outbox_port ports[CL_OUTBOX_PORTS];
    uint64_t full;    /* bit per port */
    uint64_t waiting; /* bit per port that has room again, and datagrams that waited for it */
};

/* Marks the port as full and keeps a datagram for it. False when there is no memory: it is lost. */
bool cl_outbox_keep(struct cl_outbox *outbox, const struct cl_datagram *datagram);
/* The port has room again. */
void cl_outbox_release(struct cl_outbox *outbox, uint32_t port);
/* The next datagram that may leave, or NULL; valid until the next call. Those of a port come one after another, and
 * only if all of them fit into `room`: if the port is full again, they are kept again in the same order. */
const struct cl_datagram *cl_outbox_take(struct cl_outbox *outbox, size_t room);
/* Datagrams of the message read its data at `to` from now on, and no longer at `from`, where the same is. */
void cl_outbox_move(struct cl_outbox *outbox, const struct cl_message *message, const uint8_t *from, const uint8_t *to);
void cl_outbox_free(struct cl_outbox *outbox);
