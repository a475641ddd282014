#include "engine/peers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "protocol/peer.h"

_Static_assert((int)CL_METER_INTERFACES == (int)CL_PEER_PATHS_MAX && (int)CL_METER_INTERFACES == (int)CL_NICS_MAX,
               "a line for each interface");
_Static_assert((int)CL_METER_COUNTERS == (int)CL_CLASSES_BETWEEN_HOSTS, "a counter for each class");
_Static_assert((int)CL_NEIGHBOURS_MAX >= (int)CL_WATCHED_MAX, "a neighbour for each place");

void cl_peers_free(struct cl_peers *peers)
{
    for (uint32_t i = 0; i < peers->watched_count; i++) {
        if (peers->watched[i].pidfd >= 0)
            close(peers->watched[i].pidfd);
        cl_meter_close(&peers->watched[i].meter);
    }
    for (uint32_t i = 0; i < peers->capacity; i++)
        free(peers->links[i]);
    free(peers->links);
}

/* Makes room for the links to this peer. */
static bool reserve(struct cl_peers *peers, uint16_t peer)
{
    if (peer < peers->capacity)
        return true;
    uint32_t capacity = peers->capacity == 0 ? 64 : peers->capacity;
    while (capacity <= peer)
        capacity *= 2;
    struct cl_link **links = realloc(peers->links, capacity * sizeof *links);
    if (links == NULL)
        return false;
    memset(links + peers->capacity, 0, (capacity - peers->capacity) * sizeof *links);
    peers->links = links;
    peers->capacity = capacity;
    return true;
}

/* Whether the engine could send to such a peer. Another process wrote the options: any number may stand there. */
static bool are_valid(const struct cl_peer_options *options, const struct cl_ports *ports,
                      const struct cl_endpoint *endpoint)
{
    uint32_t bytes = options->packet_bytes;
    bool valid = options->peer < CL_PEERS_MAX && options->path_count > 0 && options->path_count <= CL_PEER_PATHS_MAX &&
                 (bytes == 0 || cl_endpoint_can_cut(endpoint, bytes));
    for (uint32_t i = 0; valid && i < options->path_count; i++)
        valid = options->local[i] < ports->count;
    return valid;
}

/* Fills in a link per path, and the interfaces they leave through. */
static int make_links(struct cl_link *links, uint32_t *interfaces, const struct cl_peer_options *options,
                      const struct cl_ports *ports)
{
    for (uint32_t i = 0; i < options->path_count; i++) {
        uint32_t port = options->local[i];
        int link = ports->wire_type->link(ports->wire, port, options->remote_addresses[i], options->remote_ports[i]);
        if (link < 0)
            return link;
        links[i] = (struct cl_link){(uint32_t)link, port};
        interfaces[i] = ports->interfaces[port];
    }
    return CL_OK;
}

/* A known peer may have come to another address. */
static int relink(const struct cl_link *links, const struct cl_peer_options *options, const struct cl_ports *ports,
                  const struct cl_endpoint *endpoint)
{
    int count = cl_endpoint_read_paths(endpoint, options->peer, NULL, 0), status = CL_OK;
    for (int i = 0; i < count && (uint32_t)i < options->path_count && ports->wire_type->relink != NULL; i++)
        if (links[i].port == options->local[i] && status == CL_OK)
            status = ports->wire_type->relink(ports->wire, links[i].number, options->remote_addresses[i],
                                              options->remote_ports[i]);
    return status;
}

int cl_peers_add(struct cl_peers *peers, const struct cl_peer_options *options, const struct cl_ports *ports,
                 struct cl_endpoint *endpoint)
{
    uint16_t peer = options->peer;
    if (!are_valid(options, ports, endpoint))
        return CL_EINVAL;
    if (!reserve(peers, peer))
        return CL_ENOMEM;
    if (peers->links[peer] != NULL)
        return relink(peers->links[peer], options, ports, endpoint);
    uint32_t interfaces[CL_PEER_PATHS_MAX];
    struct cl_link *links = calloc(options->path_count, sizeof *links);
    int status = links == NULL ? CL_ENOMEM : make_links(links, interfaces, options, ports);
    peers->links[peer] = links; /* first: the endpoint sends to the peer as soon as it has it */
    if (status == CL_OK)
        status = cl_endpoint_add_peer(endpoint, peer, (uint16_t)options->path_count, interfaces);
    if (status != CL_OK) {
        peers->links[peer] = NULL;
        free(links);
        return status;
    }
    peers->count++;
    cl_endpoint_bind_peer(endpoint, peer, options->local);
    if (options->packet_bytes != 0)
        cl_endpoint_cut_peer(endpoint, peer, options->packet_bytes);
    if (options->grants)
        cl_endpoint_credit_peer(endpoint, peer, 0);
    if (options->key != NULL)
        cl_endpoint_key_peer(endpoint, peer, options->key);
    return CL_OK;
}

/* The place of a further process: where all are taken, that of one whose death the groups know. Jobs that replace their
 * dead (commlayer/elastic) may watch any number in turn. NULL: there is none. */
static struct cl_watched *place(struct cl_peers *peers)
{
    if (peers->watched_count < CL_WATCHED_MAX)
        return &peers->watched[peers->watched_count++];
    for (uint32_t i = 0; i < CL_WATCHED_MAX; i++)
        if (peers->watched[i].pidfd < 0 && !peers->watched[i].died)
            return &peers->watched[i];
    return NULL;
}

int cl_peers_watch(struct cl_peers *peers, uint16_t peer, int32_t pid)
{
    for (uint32_t i = 0; i < peers->watched_count; i++)
        if (peers->watched[i].peer == peer)
            return CL_OK;
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0 && errno != ESRCH)
        return CL_ESYSTEM;
    struct cl_watched *watched = place(peers);
    if (watched == NULL) {
        if (fd >= 0)
            close(fd);
        return CL_ENOMEM;
    }
    cl_meter_close(&watched->meter);
    *watched = (struct cl_watched){.peer = peer, .pid = pid, .died = fd < 0, .pidfd = fd};
    return CL_OK;
}

int cl_peers_read_meter(struct cl_peers *peers, uint16_t peer, int32_t fd)
{
    for (uint32_t i = 0; i < peers->watched_count; i++) {
        struct cl_watched *watched = &peers->watched[i];
        if (watched->peer == peer)
            return watched->pidfd < 0 || watched->meter.lines != NULL
                       ? CL_OK /* it has died, or is read already */
                       : cl_meter_read(watched->pid, fd, &watched->meter);
    }
    return CL_EINVAL;
}

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* The line of that interface; NULL: the process does not use it. */
static const struct cl_meter_line *line_of(const struct cl_meter *meter, uint64_t key)
{
    for (uint32_t i = 0; key != 0 && i < CL_METER_INTERFACES; i++)
        if (load(&meter->lines[i].key) == key)
            return &meter->lines[i];
    return NULL;
}

static struct cl_told read_line(const struct cl_meter_line *line)
{
    struct cl_told told = {.lost = load(&line->lost),
                           .capacity = load(&line->capacity),
                           .owed = load(&line->owed),
                           .depth_us = atomic_load_explicit(&line->depth_us, memory_order_relaxed)};
    for (uint32_t i = 0; i < CL_METER_COUNTERS; i++)
        told.bytes[i] = load(&line->bytes[i]);
    return told;
}

bool cl_peers_hear_neighbours(const struct cl_peers *peers, const struct cl_meter *own, struct cl_endpoint *endpoint,
                              uint64_t now_us)
{
    if (own->lines == NULL || peers->watched_count == 0)
        return false;
    for (uint32_t interface = 0; interface < CL_METER_INTERFACES; interface++) {
        uint64_t key = load(&own->lines[interface].key);
        for (uint32_t i = 0; key != 0 && i < peers->watched_count; i++) {
            const struct cl_meter *meter = &peers->watched[i].meter;
            const struct cl_meter_line *line = meter->lines != NULL ? line_of(meter, key) : NULL;
            if (line == NULL)
                continue;
            struct cl_told told = read_line(line);
            cl_endpoint_hear(endpoint, interface, i, &told, now_us);
        }
    }
    return cl_endpoint_heard(endpoint, now_us);
}

/* A word that stays costs its readers nothing. */
static void store(_Atomic uint64_t *word, uint64_t value)
{
    if (load(word) != value)
        atomic_store_explicit(word, value, memory_order_relaxed);
}

void cl_peers_tell_neighbours(const struct cl_peers *peers, const struct cl_meter *own,
                              const struct cl_endpoint *endpoint)
{
    if (own->lines == NULL || peers->watched_count == 0)
        return; /* nobody reads it */
    for (uint32_t i = 0; i < CL_METER_INTERFACES; i++) {
        struct cl_meter_line *line = &own->lines[i];
        if (load(&line->key) == 0)
            continue;
        struct cl_told told = cl_endpoint_tell(endpoint, i);
        for (uint32_t j = 0; j < CL_METER_COUNTERS; j++)
            store(&line->bytes[j], told.bytes[j]);
        store(&line->lost, told.lost);
        store(&line->capacity, told.capacity);
        store(&line->owed, told.owed);
        atomic_store_explicit(&line->depth_us, told.depth_us, memory_order_relaxed);
    }
}
