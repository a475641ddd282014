#include "engine/peers.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "protocol/peer.h"

bool cl_peers_init(struct cl_peers *peers)
{
    peers->links = calloc(CL_PEERS_MAX, sizeof *peers->links);
    return peers->links != NULL;
}

void cl_peers_free(struct cl_peers *peers)
{
    for (uint32_t i = 0; i < peers->watched_count; i++)
        if (peers->watched[i].pidfd >= 0)
            close(peers->watched[i].pidfd);
    for (uint32_t i = 0; peers->links != NULL && i < CL_PEERS_MAX; i++)
        free(peers->links[i]);
    free(peers->links);
}

/* Fills in a link per path, and the interfaces they leave through. */
static int make_links(struct cl_link *links, uint32_t *interfaces, const struct cl_peer_options *options,
                      const struct cl_ports *ports)
{
    for (uint32_t i = 0; i < options->path_count; i++) {
        uint32_t port = options->local[i];
        if (port >= ports->count)
            return CL_EINVAL;
        int link = ports->wire_type->link(ports->wire, port, options->remote_addresses[i], options->remote_ports[i]);
        if (link < 0)
            return link;
        links[i] = (struct cl_link){(uint32_t)link, port};
        interfaces[i] = ports->interfaces[port];
    }
    return CL_OK;
}

int cl_peers_add(struct cl_peers *peers, const struct cl_peer_options *options, const struct cl_ports *ports,
                 struct cl_endpoint *endpoint)
{
    uint16_t peer = options->peer;
    if (peer >= CL_PEERS_MAX || options->path_count == 0 || options->path_count > CL_PEER_PATHS_MAX)
        return CL_EINVAL;
    if (peers->links[peer] != NULL)
        return CL_OK;
    uint32_t interfaces[CL_PEER_PATHS_MAX];
    struct cl_link *links = calloc(options->path_count, sizeof *links);
    int status = links == NULL ? CL_ENOMEM : make_links(links, interfaces, options, ports);
    if (status == CL_OK)
        status = cl_endpoint_add_peer(endpoint, peer, (uint16_t)options->path_count, interfaces);
    if (status == CL_OK)
        status = cl_endpoint_bind_peer(endpoint, peer, options->local);
    if (status != CL_OK) {
        free(links);
        return status;
    }
    peers->links[peer] = links; /* the endpoint sends to the peer from here on */
    peers->count++;
    if (options->packet_bytes != 0)
        status = cl_endpoint_cut_peer(endpoint, peer, options->packet_bytes);
    if (status == CL_OK && options->key != NULL)
        status = cl_endpoint_key_peer(endpoint, peer, options->key);
    return status;
}

int cl_peers_watch(struct cl_peers *peers, uint16_t peer, int32_t pid)
{
    for (uint32_t i = 0; i < peers->watched_count; i++)
        if (peers->watched[i].peer == peer)
            return CL_OK;
    if (peers->watched_count == CL_WATCHED_MAX)
        return CL_ENOMEM;
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0 && errno != ESRCH)
        return CL_ESYSTEM;
    peers->watched[peers->watched_count++] = (struct cl_watched){.peer = peer, .pid = pid, .died = fd < 0, .pidfd = fd};
    return CL_OK;
}
