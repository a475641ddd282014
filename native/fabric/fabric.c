#include "fabric/fabric.h"

#include <string.h>

#include "sim/memory.h"

enum { OVERHEAD_BYTES = 66 /* preamble, Ethernet, IP and UDP headers, checksum, gap */ };

static void deliver(void *context, struct sim_datagram *datagram)
{
    struct sim_fabric *fabric = context;
    struct sim_transport *transport = fabric->transports[datagram->protocol];
    transport->deliver(transport, datagram);
}

static uint32_t leaf_of(const struct sim_fabric *fabric, uint32_t host)
{
    return host < fabric->hosts ? host / fabric->config.hosts_per_leaf
                                : (host - fabric->hosts) / fabric->config.others_per_leaf;
}

/* The next `count` links. */
static struct sim_link *furnish(struct sim_fabric *fabric, uint32_t count, const char *what, double bps)
{
    struct sim_link *links = &fabric->links[fabric->link_count];
    fabric->link_count += count;
    for (uint32_t i = 0; i < count; i++) {
        struct sim_link *link = &links[i];
        link->medium = &fabric->medium;
        link->ns_per_byte = 8e9 / bps;
        link->slowdown = 1;
        link->delay_ns = fabric->config.delay_ns;
        link->queue = (struct sim_queue){.type = &sim_queue_type_switch,
                                         .limit_bytes = fabric->config.port_bytes,
                                         .overhead_bytes = OVERHEAD_BYTES,
                                         .mark_bytes = (uint64_t)((double)fabric->config.mark_us * bps / 8e6),
                                         .drops = true};
        snprintf(link->name, sizeof link->name, "%s %u", what, i);
    }
    return links;
}

void sim_fabric_init(struct sim_fabric *fabric, const struct sim_fabric_config *config, struct sim_clock *clock,
                     struct sim_trace *trace, uint64_t seed)
{
    uint32_t own = config->leaves * config->hosts_per_leaf, others = config->leaves * config->others_per_leaf;
    uint32_t hosts = own + others, middle = config->leaves * config->spines;
    *fabric = (struct sim_fabric){.config = *config, .hosts = own, .others = others};
    fabric->medium = (struct sim_medium){.clock = clock,
                                         .trace = trace,
                                         .random = sim_random_seeded(seed, 1),
                                         .pool = {.datagram_bytes = SIM_FABRIC_HEAD_BYTES},
                                         .deliver = deliver,
                                         .context = fabric};
    fabric->links = sim_new(2 * ((size_t)hosts + middle), sizeof *fabric->links);
    fabric->nic = furnish(fabric, hosts, "nic", config->host_bps);
    fabric->port = furnish(fabric, hosts, "port", config->host_bps);
    fabric->up = furnish(fabric, middle, "up", config->spine_bps);
    fabric->down = furnish(fabric, middle, "down", config->spine_bps);
    fabric->buffers = sim_new((size_t)config->leaves + config->spines, sizeof *fabric->buffers);
    for (uint32_t i = 0; i < config->leaves + config->spines; i++)
        fabric->buffers[i].limit_bytes = config->switch_bytes;
    for (uint32_t i = 0; i < hosts; i++) {
        /* A host queues in its own memory and drops nothing. */
        fabric->nic[i].queue.limit_bytes = UINT64_MAX / (2 * SIM_CLASS_FACTOR); /* none */
        fabric->nic[i].queue.drops = false;
        fabric->port[i].queue.buffer = &fabric->buffers[leaf_of(fabric, i)];
    }
    for (uint32_t i = 0; i < middle; i++) {
        fabric->up[i].queue.buffer = &fabric->buffers[i / config->spines];
        fabric->down[i].queue.buffer = &fabric->buffers[config->leaves + i % config->spines];
    }
    for (uint32_t i = 0; i < fabric->link_count && config->switch_bytes == 0; i++)
        fabric->links[i].queue.buffer = NULL;
}

void sim_fabric_free(struct sim_fabric *fabric)
{
    free(fabric->links);
    free(fabric->buffers);
    sim_pool_free(&fabric->medium.pool);
}

struct sim_datagram *sim_fabric_take(struct sim_fabric *fabric)
{
    return sim_pool_take(&fabric->medium.pool);
}

void sim_fabric_send(struct sim_fabric *fabric, struct sim_datagram *datagram, uint64_t entropy)
{
    const struct sim_fabric_config *config = &fabric->config;
    uint32_t from_leaf = leaf_of(fabric, datagram->from), to_leaf = leaf_of(fabric, datagram->to);
    fabric->medium.counts.sent++;
    datagram->hops = 0;
    datagram->route[datagram->hops++] = &fabric->nic[datagram->from];
    if (from_leaf != to_leaf) {
        uint32_t spine = (uint32_t)(sim_mix(entropy) % config->spines);
        datagram->route[datagram->hops++] = &fabric->up[from_leaf * config->spines + spine];
        datagram->route[datagram->hops++] = &fabric->down[to_leaf * config->spines + spine];
    }
    datagram->route[datagram->hops++] = &fabric->port[datagram->to];
    sim_link_send(datagram->route[0], datagram);
}

struct sim_fabric_counts sim_fabric_count(const struct sim_fabric *fabric)
{
    struct sim_fabric_counts counts = {.sent = fabric->medium.counts.sent};
    for (uint32_t i = 0; i < fabric->link_count; i++) {
        const struct sim_queue *queue = &fabric->links[i].queue;
        counts.marked += queue->marked;
        counts.selected += queue->selected;
        counts.overflowed += queue->overflowed;
        if (queue->drops && queue->most_bytes > counts.most_port_bytes)
            counts.most_port_bytes = queue->most_bytes;
    }
    return counts;
}
