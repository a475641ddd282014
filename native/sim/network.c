#include "sim/network.h"

#include <stdio.h>

#include "sim/memory.h"

enum { OVERHEAD_BYTES = 42 /* Ethernet, IP and UDP headers */ };

static struct sim_link *make_links(struct sim_network *network, uint32_t hosts, const char *what)
{
    struct sim_link *links = sim_new((size_t)hosts * network->paths, sizeof *links);
    for (uint32_t host = 0; host < hosts; host++) {
        for (uint32_t path = 0; path < network->paths; path++) {
            struct sim_link *link = &links[host * network->paths + path];
            link->medium = &network->medium;
            link->slowdown = 1;
            link->queue.type = &sim_queue_type_droptail;
            link->queue.overhead_bytes = OVERHEAD_BYTES;
            snprintf(link->name, sizeof link->name, "%s %u.%u", what, host, path);
        }
    }
    return links;
}

void sim_network_init(struct sim_network *network, struct sim_clock *clock, struct sim_trace *trace, uint64_t seed,
                      uint32_t hosts, uint32_t paths, bool trunks, uint32_t datagram_bytes)
{
    *network = (struct sim_network){
        .medium = {.clock = clock, .trace = trace}, .hosts = hosts, .paths = paths, .trunks = trunks};
    network->medium.random = sim_random_seeded(seed, 1);
    network->medium.pool.datagram_bytes = datagram_bytes;
    network->egress = make_links(network, hosts, "egress");
    network->ingress = make_links(network, hosts, "ingress");
    for (int way = 0; way < 2; way++)
        network->trunk[way] = make_links(network, 1, way == 0 ? "trunk down" : "trunk up");
}

void sim_network_free(struct sim_network *network)
{
    free(network->egress);
    free(network->ingress);
    free(network->trunk[0]);
    free(network->trunk[1]);
    free(network->cut);
    sim_pool_free(&network->medium.pool);
}

void sim_network_send(struct sim_network *network, struct sim_datagram *datagram, uint32_t from_host, uint32_t to_host)
{
    uint32_t path = datagram->path;
    network->medium.counts.sent++;
    if (network->cut != NULL && network->cut[from_host * network->hosts + to_host] >> path & 1) {
        sim_medium_lose(&network->medium, datagram, SIM_LOST_CUT, "between hosts");
        return;
    }
    datagram->hops = 0;
    datagram->hop = 0;
    if (from_host != to_host) { /* else both ranks are on this host and do not share memory */
        datagram->route[datagram->hops++] = &network->egress[from_host * network->paths + path];
        if (network->trunks && (from_host ^ to_host) & 1)
            datagram->route[datagram->hops++] = &network->trunk[from_host & 1][path];
        datagram->route[datagram->hops++] = &network->ingress[to_host * network->paths + path];
    }
    if (datagram->hops > 0)
        sim_link_send(datagram->route[0], datagram);
    else
        network->medium.deliver(network->medium.context, datagram);
}

void sim_network_cut(struct sim_network *network, uint32_t from_host, uint32_t to_host, uint32_t path, bool cut)
{
    if (network->cut == NULL)
        network->cut = sim_new((size_t)network->hosts * network->hosts, sizeof *network->cut);
    uint8_t *paths = &network->cut[from_host * network->hosts + to_host];
    *paths = (uint8_t)(cut ? *paths | 1u << path : *paths & ~(1u << path));
}
