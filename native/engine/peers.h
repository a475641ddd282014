/*
 * Peers: the other processes of the job: the links to them, and a watch on those of this host.
 */
#pragma once

#include "os/host.h"
#include "os/meter.h"
#include "protocol/endpoint.h"
#include "wire/wire.h"

enum { CL_WATCHED_MAX = CL_HOST_RANKS_MAX };

struct cl_link {
    uint32_t number; /* the wire's number of the link */
    uint32_t port;
};

/* A process of this host. */
struct cl_watched {
    uint16_t peer;
    int32_t pid;
    bool died;             /* its groups have not been told yet */
    int pidfd;             /* -1: it is dead */
    struct cl_meter meter; /* without lines: not known */
};

struct cl_peers {
    struct cl_link **links; /* peer -> path -> link */
    uint32_t capacity;      /* places in `links` */
    uint32_t count;
    struct cl_watched watched[CL_WATCHED_MAX];
    uint32_t watched_count;
};

void cl_peers_free(struct cl_peers *peers);

/* The ports of this process on its wire. */
struct cl_ports {
    const struct cl_wire_type *wire_type;
    struct cl_wire *wire;
    uint32_t count;
    uint32_t interfaces[CL_PORTS_MAX]; /* the number of each port's interface; ports of one address share one */
};
/* Links this process's ports with those of a peer, and adds the peer to the endpoint. Of a known peer only the remote
 * addresses change; an error changes nothing. */
int cl_peers_add(struct cl_peers *peers, const struct cl_peer_options *options, const struct cl_ports *ports,
                 struct cl_endpoint *endpoint);
/* Watches the process of a peer for its death. Watching it again changes nothing. */
int cl_peers_watch(struct cl_peers *peers, uint16_t peer, int32_t pid);
/* Reads the meter of a watched process from now on. */
int cl_peers_read_meter(struct cl_peers *peers, uint16_t peer, int32_t fd);
/* Tells the endpoint what the other processes of this host know of the interfaces of this process's meter. Returns
 * whether one of them sends now. */
bool cl_peers_hear_neighbours(const struct cl_peers *peers, const struct cl_meter *own, struct cl_endpoint *endpoint,
                              uint64_t now_us);
/* Tells them what this process knows. */
void cl_peers_tell_neighbours(const struct cl_peers *peers, const struct cl_meter *own,
                              const struct cl_endpoint *endpoint);
