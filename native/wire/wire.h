/*
 * Wire: a way to move datagrams. A wire knows addresses and links, but no messages, acknowledgements or ranks.
 *
 * A wire has ports (one per local address given to it; an address may be given several times) and links (a local port
 * and a remote address). Datagrams leave on links and arrive at ports. They may be lost, duplicated and reordered: the
 * protocol repairs that. Once the wire is open, all calls but `close` come from the engine thread.
 */
#pragma once

#include <stdbool.h>

#include "commlayer.h"

enum { CL_PORTS_MAX = 64 }; /* 8 sockets for each of 8 interfaces */

struct cl_wire; /* each type has its own */

struct cl_wire_config {
    const char *const *addresses;
    uint32_t address_count;
    uint32_t datagram_bytes;
    bool dscp;            /* udp only: write the traffic class into IP headers, and report the marks of switches */
    const char *provider; /* ofi only: name of libfabric's provider; NULL or empty: its first */
    uint32_t port_first, port_last; /* udp only: the range of local ports; 0: the kernel chooses */
};

/* One datagram: head then payload, contiguous on the wire. */
struct cl_wire_datagram {
    uint32_t link;
    uint32_t head_length, payload_length;
    const uint8_t *head, *payload;
    uint8_t traffic_class; /* IPv4's TOS, IPv6's traffic class: DSCP and ECN bits */
};

/* congested: a switch has marked the datagram (ECN's CE), if the wire can tell. received_us: the kernel's receive time
 * on the engine's clock (CLOCK_MONOTONIC); 0: unknown. */
typedef void (*cl_wire_receive_fn)(void *context, const uint8_t *bytes, size_t length, bool congested,
                                   uint64_t received_us);

struct cl_wire_type {
    const char *name;
    int (*open)(const struct cl_wire_config *config, struct cl_wire **wire);
    void (*close)(struct cl_wire *wire);
    /* A descriptor that polls readable when datagrams wait at the port. It is called again before each sleep. */
    int (*descriptor)(struct cl_wire *wire, uint32_t port);
    int (*port_number)(struct cl_wire *wire, uint32_t port, uint32_t *number);
    /* The remote address, as text, that peers must pass to `link`; NULL: the address with which the port was opened. */
    int (*address)(struct cl_wire *wire, uint32_t port, char *text, size_t size);
    /* The largest datagram that can leave, known once the wire is open; NULL: any up to datagram_bytes. */
    uint32_t (*datagram_limit)(struct cl_wire *wire);
    /* Returns the link's number, or a negative error. */
    int (*link)(struct cl_wire *wire, uint32_t port, const char *remote_address, uint32_t remote_port);
    /* Opens a port at another address of this host, and closes what it was; an error changes nothing. NULL: it cannot.
     */
    int (*move)(struct cl_wire *wire, uint32_t port, const char *address);
    /* Lets a link lead to another remote address; an error changes nothing. NULL: it cannot. */
    int (*relink)(struct cl_wire *wire, uint32_t link, const char *remote_address, uint32_t remote_port);
    /* Sends datagrams in order; returns how many, which is fewer than `count` when the system has no room for more. */
    size_t (*send)(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count);
    /* Hands the datagrams that wait at the port to `handle`, a batch at most; returns whether more may be waiting. */
    bool (*receive)(struct cl_wire *wire, uint32_t port, cl_wire_receive_fn handle, void *context);
    /* Datagrams that the kernel dropped because a port's buffer was full, as far as later ones have told it; a
     * super-packet counts once. NULL: unknown. */
    uint64_t (*overflows)(const struct cl_wire *wire);
};

extern const struct cl_wire_type cl_wire_udp;
extern const struct cl_wire_type cl_wire_ofi;

/* The type of that name, or NULL. */
const struct cl_wire_type *cl_wire_find(const char *name);
