#include "tests/network.h"

#include "protocol/endpoint_state.h"

enum { OVERHEAD_BYTES = 42 /* Ethernet, IP and UDP headers */, BATCH = 32 };

struct sim_link *network_egress(struct network *network, uint32_t host, uint32_t path)
{
    return &network->links.egress[host * network->links.paths + path];
}

struct sim_link *network_ingress(struct network *network, uint32_t host, uint32_t path)
{
    return &network->links.ingress[host * network->links.paths + path];
}

void network_set_link(struct sim_link *link, double mbit_per_s, uint32_t buffer_packets)
{
    link->ns_per_byte = mbit_per_s > 0 ? 8000.0 / mbit_per_s : 0;
    link->queue.limit_bytes = (uint64_t)(buffer_packets - 1) * (NETWORK_DATAGRAM_BYTES + OVERHEAD_BYTES);
}

void network_set_noise(struct network *network, struct sim_noise noise)
{
    for (uint32_t i = 0; i < network->host_count * network->links.paths; i++)
        network->links.egress[i].noise = noise;
}

void network_set_delay(struct network *network, uint64_t delay_us)
{
    for (uint32_t i = 0; i < network->host_count * network->links.paths; i++)
        network->links.egress[i].delay_ns = delay_us * 1000;
}

uint64_t network_now_us(const struct network *network)
{
    return network->clock.now_ns / 1000;
}

double network_random(struct network *network)
{
    return sim_random_real(&network->random);
}

uint64_t network_overflows(const struct network *network)
{
    return network->links.medium.counts.lost[SIM_LOST_QUEUE];
}

bool network_sees(const struct network *network, uint32_t host, uint16_t peer)
{
    return cl_peer_list_find(&network->hosts[host].endpoint->peers, peer)->alive;
}

/* ---- hosts ---- */

/* What the meters of the other endpoints on its host tell. */
static void read_meters(const struct network_host *host)
{
    const struct network *network = host->network;
    uint32_t self = (uint32_t)(host - network->hosts), first = self - self % network->ranks;
    for (uint32_t i = first; i < first + network->ranks && i < network->host_count; i++)
        for (uint32_t path = 0; i != self && path < network->links.paths; path++) {
            struct cl_told told = cl_endpoint_tell(network->hosts[i].endpoint, path);
            cl_endpoint_hear(host->endpoint, path, i - first, &told, sim_driver_now_us(&host->driver));
        }
    cl_endpoint_heard(host->endpoint, sim_driver_now_us(&host->driver));
}

static void turn(struct sim_driver *driver)
{
    const struct network_host *host = (struct network_host *)(void *)driver; /* the driver is its first member */
    struct network *network = host->network;
    read_meters(host);
    sim_driver_turn(driver);
    if (network->sleep_ns > 0)
        sim_driver_sleep(driver, network->clock.now_ns + sim_random_below(&network->random, network->sleep_ns));
}

static void complete(struct sim_driver *driver, const struct cl_completion *completion)
{
    struct network_host *host = (struct network_host *)(void *)driver; /* the driver is its first member */
    host->completed++;
    host->failed += completion->status != CL_OK;
    host->last_status = completion->status;
    host->last_completed_us = network_now_us(host->network);
    if (host->on_completion != NULL)
        host->on_completion(host, completion);
}

struct sim_datagram *network_datagram(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    struct sim_datagram *made = sim_pool_take(&network->links.medium.pool);
    made->from = (uint16_t)from;
    made->to = datagram->peer;
    made->path = datagram->path;
    made->priority = datagram->priority;
    made->ecn = SIM_ECT;
    made->length = sim_driver_flatten(made->bytes, datagram);
    return made;
}

static bool emit(struct sim_driver *driver, const struct cl_datagram *datagram)
{
    struct network_host *host = (struct network_host *)(void *)driver; /* the driver is its first member */
    struct network *network = host->network;
    uint32_t from = (uint32_t)(host - network->hosts);
    if (network->full[from] >> datagram->path & 1)
        return false;
    if (network->drops == NULL || !network->drops(network, from, datagram))
        sim_network_send(&network->links, network_datagram(network, from, datagram), from / network->ranks,
                         datagram->peer / network->ranks);
    return true;
}

static void deliver(void *context, struct sim_datagram *datagram)
{
    struct network *network = context;
    struct sim_driver *driver = &network->hosts[datagram->to].driver;
    if (datagram->protocol == NETWORK_OTHERS) {
        if (network->others != NULL)
            network->others(datagram);
        sim_pool_give(&network->links.medium.pool, datagram);
        return;
    }
    if (driver->dead) {
        sim_medium_lose(&network->links.medium, datagram, SIM_LOST_DEAD, "host");
        return;
    }
    if (network->meddle != NULL)
        network->meddle(network, datagram);
    sim_driver_deliver(driver, datagram);
    sim_driver_wake(driver, network->clock.now_ns);
}

void network_wake(struct network *network, uint32_t host)
{
    sim_driver_wake(&network->hosts[host].driver, network->clock.now_ns);
}

void network_post(struct network *network, struct network_message message)
{
    struct cl_sink sink = {.target = message.target};
    uint64_t now_us = network_now_us(network);
    CHECK_EQ(cl_endpoint_post_send(network->hosts[message.from].endpoint, message.to, message.id, message.source,
                                   message.length, &message.qos, now_us, NULL),
             CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(network->hosts[message.to].endpoint, message.from, message.id, sink,
                                      message.length, &message.qos, now_us, NULL),
             CL_OK);
    network_wake(network, message.from);
    network_wake(network, message.to);
}

void network_add(void *target, size_t offset, const void *payload, size_t length, void *argument)
{
    uint8_t *to = (uint8_t *)target + offset;
    const uint8_t *from = payload;
    (void)argument;
    for (size_t i = 0; i < length; i++)
        to[i] = (uint8_t)(to[i] + from[i]);
}

void network_sleep(struct network *network, uint32_t host, uint64_t us)
{
    sim_driver_sleep(&network->hosts[host].driver, network->clock.now_ns + us * 1000);
}

/* ---- time ---- */

bool network_step(struct network *network, uint64_t until_us)
{
    if (sim_clock_next_ns(&network->clock) <= until_us * 1000)
        return sim_clock_step(&network->clock);
    if (network->clock.now_ns < until_us * 1000)
        network->clock.now_ns = until_us * 1000;
    return false;
}

void network_run_until(struct network *network, uint64_t until_us)
{
    while (network_step(network, until_us))
        ;
}

bool network_run_completions(struct network *network, uint32_t completions, uint64_t until_us)
{
    for (;;) {
        bool all = true;
        for (uint32_t i = 0; i < network->host_count; i++)
            all = all && (network->hosts[i].driver.dead || network->hosts[i].completed >= completions);
        if (all || !network_step(network, until_us))
            return all;
    }
}

/* ---- beginning and end ---- */

static const struct sim_driver_type DRIVER = {.turn = turn, .emit = emit, .complete = complete};

static void open_host(struct network *network, uint16_t self, const struct cl_endpoint_config *config)
{
    struct network_host *host = &network->hosts[self];
    host->network = network;
    host->driver = (struct sim_driver){.type = &DRIVER,
                                       .clock = &network->clock,
                                       .pool = &network->links.medium.pool,
                                       .tick_ns = 1000,
                                       .batch_capacity = BATCH};
    CHECK_EQ(sim_driver_open(&host->driver, config), CL_OK);
    host->endpoint = host->driver.endpoint;
    for (uint16_t peer = 0; peer < network->host_count; peer++)
        if (peer != self)
            CHECK_EQ(cl_endpoint_add_peer(host->endpoint, peer, (uint16_t)network->links.paths, NULL), CL_OK);
    network_wake(network, self);
}

struct network *network_new_with(const char *rate_control, uint32_t hosts, uint16_t paths, double mbit_per_s,
                                 uint32_t buffer_packets, size_t unexpected_limit_bytes, uint64_t seed)
{
    struct network *network = calloc(1, sizeof(*network));
    network->host_count = hosts;
    network->ranks = 1;
    network->clock.now_ns = 5000000000; /* clocks do not start at 0 */
    network->trace.clock = &network->clock;
    network->random = sim_random_seeded(seed, 0);
    sim_network_init(&network->links, &network->clock, &network->trace, seed, hosts, paths, false,
                     NETWORK_DATAGRAM_BYTES);
    network->links.medium.deliver = deliver;
    network->links.medium.context = network;
    for (uint32_t i = 0; i < hosts * paths; i++) {
        network_set_link(&network->links.egress[i], mbit_per_s, buffer_packets);
        network_set_link(&network->links.ingress[i], mbit_per_s, buffer_packets);
    }
    network_set_delay(network, 100);
    for (uint32_t i = 0; i < hosts; i++) {
        struct cl_endpoint_config config = {.job = 77,
                                            .self = (uint16_t)i,
                                            .epoch = 1,
                                            .datagram_bytes = NETWORK_DATAGRAM_BYTES,
                                            .rate_control = rate_control,
                                            .unexpected_limit_bytes = unexpected_limit_bytes};
        open_host(network, (uint16_t)i, &config);
    }
    return network;
}

struct network *network_new(uint32_t hosts, uint16_t paths, double mbit_per_s, uint32_t buffer_packets,
                            size_t unexpected_limit_bytes, uint64_t seed)
{
    return network_new_with(NULL, hosts, paths, mbit_per_s, buffer_packets, unexpected_limit_bytes, seed);
}

void network_free(struct network *network)
{
    for (uint32_t i = 0; i < network->host_count; i++)
        sim_driver_close(&network->hosts[i].driver);
    sim_network_free(&network->links);
    sim_clock_free(&network->clock);
    free(network);
}
