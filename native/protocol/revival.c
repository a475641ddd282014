#include "protocol/revival.h"

#include "protocol/ending.h"
#include "protocol/endpoint_state.h"

int cl_endpoint_revive_peer(struct cl_endpoint *endpoint, uint16_t peer, uint32_t incarnation)
{
    struct cl_peer *found = cl_peer_list_find(&endpoint->peers, peer);
    if (found == NULL)
        return CL_EINVAL;
    if (incarnation <= found->incarnation)
        return CL_OK;
    cl_endpoint_peer_lost(endpoint, peer);
    cl_peer_revive(found, incarnation, endpoint->config.datagram_bytes);
    cl_queue_unblock(&endpoint->queue, &found->node);
    cl_peer_list_urge(&endpoint->peers, found); /* PINGs measure the paths */
    cl_endpoint_arm(endpoint, found, 0);
    return CL_OK;
}

int cl_endpoint_incarnation(const struct cl_endpoint *endpoint, uint16_t peer, uint32_t *incarnation)
{
    const struct cl_peer *found = cl_peer_list_find(&endpoint->peers, peer);
    if (found == NULL)
        return CL_EINVAL;
    *incarnation = found->incarnation;
    return found->alive ? CL_OK : CL_EPEERLOST;
}
