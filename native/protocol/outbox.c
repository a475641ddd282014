#include "protocol/outbox.h"

#include "protocol/array.h"
#include "protocol/datagram.h"
#include "protocol/message.h"

bool cl_outbox_keep(struct cl_outbox *outbox, const struct cl_datagram *datagram)
{
    struct cl_outbox_port *port = &outbox->ports[datagram->port];
    port->full = true;
    outbox->full |= UINT64_C(1) << datagram->port;
    outbox->waiting &= ~(UINT64_C(1) << datagram->port);
    if (!cl_array_reserve(&port->list, port->count, &port->capacity, sizeof *port->list))
        return false;
    port->list[port->count++] = *datagram;
    return true;
}

void cl_outbox_release(struct cl_outbox *outbox, uint32_t port)
{
    outbox->ports[port].full = false;
    outbox->full &= ~(UINT64_C(1) << port);
    if (outbox->ports[port].count > 0)
        outbox->waiting |= UINT64_C(1) << port;
}

const struct cl_datagram *cl_outbox_take(struct cl_outbox *outbox, size_t room)
{
    if (!outbox->waiting)
        return NULL;
    uint32_t number = (uint32_t)__builtin_ctzll(outbox->waiting);
    struct cl_outbox_port *port = &outbox->ports[number];
    if (port->first == 0 && port->count > room)
        return NULL;
    const struct cl_datagram *next = &port->list[port->first++];
    if (port->first == port->count) {
        port->first = port->count = 0;
        outbox->waiting &= ~(UINT64_C(1) << number);
    }
    return next;
}

void cl_outbox_move(struct cl_outbox *outbox, const struct cl_message *message, const uint8_t *from, const uint8_t *to)
{
    for (uint32_t i = 0; i < CL_OUTBOX_PORTS; i++) {
        const struct cl_outbox_port *port = &outbox->ports[i];
        for (uint32_t j = port->first; j < port->count; j++) {
            struct cl_datagram *datagram = &port->list[j];
            if (datagram->message == message && datagram->generation == message->generation &&
                datagram->payload_length > 0)
                datagram->payload = to + (datagram->payload - from);
        }
    }
}

void cl_outbox_free(struct cl_outbox *outbox)
{
    for (uint32_t i = 0; i < CL_OUTBOX_PORTS; i++)
        free(outbox->ports[i].list);
    *outbox = (struct cl_outbox){0};
}
