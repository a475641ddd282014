#include "fabric/dlcp.h"

#include <string.h>

#include "sim/memory.h"

enum {
    UDP_BYTES = 28, /* IP and UDP headers: of the MTU, and of the links' overhead */
    BATCH = 64,
    UNEXPECTED_LIMIT_BYTES = 64 << 20,
};

static const uint64_t PEER_TIMEOUT_NS = 10000000000;

static bool emit(struct sim_driver *driver, const struct cl_datagram *from)
{
    struct sim_dlcp_host *host = (struct sim_dlcp_host *)(void *)driver; /* its first member */
    struct sim_dlcp *dlcp = host->dlcp;
    struct sim_datagram *datagram = sim_fabric_take(dlcp->fabric);
    datagram->from = host->id;
    datagram->to = from->peer;
    datagram->protocol = dlcp->protocol;
    datagram->priority = dlcp->config.priorities ? from->priority : 0;
    datagram->ecn = from->droppable && dlcp->config.selective ? SIM_NOT_ECT : SIM_ECT;
    datagram->length = from->head_length + from->payload_length;
    memcpy(datagram->bytes, from->head, from->head_length);
    uint64_t flow = (uint64_t)from->path << 32 | (uint64_t)host->id << 16 | from->peer;
    sim_fabric_send(dlcp->fabric, datagram, (uint64_t)1 << 63 | (dlcp->config.sprays ? ++dlcp->sent : flow));
    return true;
}

static void complete(struct sim_driver *driver, const struct cl_completion *completion)
{
    const struct sim_dlcp_host *host = (struct sim_dlcp_host *)(void *)driver; /* its first member */
    uint64_t missing = 0;
    for (uint32_t i = 0; i < completion->missing_count; i++)
        missing += completion->missing[i].end - completion->missing[i].start;
    if (completion->status != CL_OK) {
        fprintf(stderr, "simulator: a message between hosts %u and %u failed: %s\n", host->id, completion->peer,
                cl_error_text(completion->status));
        exit(2);
    }
    host->dlcp->transport.done(completion->context, missing);
}

static void settle(struct sim_dlcp_host *host)
{
    host->running = true;
    sim_driver_settle(&host->driver);
    host->running = false;
}

static void turn(struct sim_driver *driver)
{
    sim_driver_expire(driver);
    settle((struct sim_dlcp_host *)(void *)driver); /* its first member */
}

static const struct sim_driver_type DRIVER = {.turn = turn, .emit = emit, .complete = complete};

static void deliver(struct sim_transport *transport, struct sim_datagram *datagram)
{
    struct sim_dlcp *dlcp = (struct sim_dlcp *)(void *)transport; /* its first member */
    struct sim_dlcp_host *host = &dlcp->hosts[datagram->to];
    uint32_t length = datagram->length;
    memcpy(dlcp->packet, datagram->bytes, length < SIM_FABRIC_HEAD_BYTES ? length : SIM_FABRIC_HEAD_BYTES);
    bool marked = datagram->ecn == SIM_CE;
    sim_pool_give(&dlcp->fabric->medium.pool, datagram);
    uint64_t now_us = sim_driver_now_us(&host->driver);
    cl_endpoint_receive(host->driver.endpoint, dlcp->packet, length, marked, now_us, now_us);
    settle(host);
}

static void check(int status, const struct sim_message *message)
{
    if (status == CL_OK)
        return;
    fprintf(stderr, "simulator: hosts %u and %u cannot post message %u of job %u: %s\n", message->from, message->to,
            message->index, message->job, cl_error_text(status));
    exit(2);
}

/* Peers are added when first needed: most never are. */
static struct sim_dlcp_host *host_of(struct sim_dlcp *dlcp, uint16_t id, uint16_t peer)
{
    static const uint32_t same_interface[8] = {0};
    struct sim_dlcp_host *host = &dlcp->hosts[id];
    /* CL_EINVAL: added before */
    if (cl_endpoint_add_peer(host->driver.endpoint, peer, (uint16_t)dlcp->config.paths, same_interface) == CL_ENOMEM)
        sim_memory(NULL);
    if (dlcp->config.credit_bytes > 0)
        cl_endpoint_credit_peer(host->driver.endpoint, peer, dlcp->config.unscheduled_bytes);
    return host;
}

static struct cl_qos qos_of(const struct sim_message *message)
{
    return (struct cl_qos){.priority = message->priority, .loss_bound = message->loss_bound};
}

/* A posted message may leave now; a turn under way sends it anyway. */
static void wake(struct sim_dlcp_host *host)
{
    if (!host->running)
        sim_clock_schedule(host->driver.clock, &host->driver.event, host->driver.clock->now_ns);
}

static void send_message(struct sim_transport *transport, const struct sim_message *message, void *context)
{
    static const uint8_t nothing[1]; /* payload is pointed to, but never read */
    struct sim_dlcp_host *host = host_of((struct sim_dlcp *)(void *)transport, message->from, message->to);
    struct cl_message_id id = {1, message->job, message->index};
    struct cl_qos qos = qos_of(message);
    check(cl_endpoint_post_send(host->driver.endpoint, message->to, id, nothing, message->length, &qos,
                                sim_driver_now_us(&host->driver), context),
          message);
    wake(host);
}

static void ignore(void *target, size_t offset, const void *payload, size_t length, void *argument)
{
    (void)target;
    (void)offset;
    (void)payload;
    (void)length;
    (void)argument;
}

static void receive_message(struct sim_transport *transport, const struct sim_message *message, void *context)
{
    struct sim_dlcp_host *host = host_of((struct sim_dlcp *)(void *)transport, message->to, message->from);
    struct cl_message_id id = {1, message->job, message->index};
    struct cl_qos qos = qos_of(message);
    check(cl_endpoint_post_receive(host->driver.endpoint, message->from, id, (struct cl_sink){.deliver = ignore},
                                   message->length, &qos, sim_driver_now_us(&host->driver), context),
          message);
    wake(host);
}

void sim_dlcp_init(struct sim_dlcp *dlcp, const struct sim_dlcp_config *config, struct sim_fabric *fabric,
                   uint8_t protocol)
{
    *dlcp = (struct sim_dlcp){.transport = {.send = send_message, .receive = receive_message, .deliver = deliver},
                              .config = *config,
                              .fabric = fabric,
                              .protocol = protocol};
    dlcp->hosts = sim_new(fabric->hosts, sizeof *dlcp->hosts);
    dlcp->packet = sim_new(config->mtu, 1);
    for (uint32_t i = 0; i < fabric->hosts; i++) {
        struct sim_dlcp_host *host = &dlcp->hosts[i];
        *host = (struct sim_dlcp_host){.driver = {.type = &DRIVER,
                                                  .clock = fabric->medium.clock,
                                                  .tick_ns = config->tick_ns,
                                                  .batch_capacity = BATCH},
                                       .dlcp = dlcp,
                                       .id = (uint16_t)i};
        struct cl_endpoint_config endpoint = {
            .auth = CL_AUTH_OFF,
            .job = 1,
            .self = (uint16_t)i,
            .datagram_bytes = config->mtu - UDP_BYTES,
            .peer_timeout_us = PEER_TIMEOUT_NS / config->tick_ns,
            .credit_bytes = config->credit_bytes,
            .rate_control = config->rate_control,
            .unexpected_limit_bytes = UNEXPECTED_LIMIT_BYTES,
        };
        if (sim_driver_open(&host->driver, &endpoint) != CL_OK)
            sim_memory(NULL);
    }
    fabric->transports[protocol] = &dlcp->transport;
}

void sim_dlcp_free(struct sim_dlcp *dlcp)
{
    for (uint32_t i = 0; i < dlcp->fabric->hosts; i++)
        sim_driver_close(&dlcp->hosts[i].driver);
    free(dlcp->hosts);
    free(dlcp->packet);
}

struct cl_engine_stats sim_dlcp_stats(const struct sim_dlcp *dlcp)
{
    /* All counters, and nothing else: summed as an array. */
    enum { COUNTERS = sizeof(struct cl_engine_stats) / sizeof(uint64_t) };
    union {
        struct cl_engine_stats stats;
        uint64_t counters[COUNTERS];
    } sum = {.counters = {0}}, one;
    for (uint32_t i = 0; i < dlcp->fabric->hosts; i++) {
        one.stats = *cl_endpoint_stats(dlcp->hosts[i].driver.endpoint);
        for (int counter = 0; counter < COUNTERS; counter++)
            sum.counters[counter] += one.counters[counter];
    }
    return sum.stats;
}
