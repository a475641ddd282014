/*
 * Opening and closing of an engine; its addresses, its name in the job, and its peers.
 */
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "engine/packet_wait.h"
#include "protocol/packet.h"
#include "protocol/peer.h"

static void free_engine(struct cl_engine *engine)
{
    cl_packet_wait_release(engine->packet_wait);
    cl_port_set_close(&engine->port_set);
    cl_peers_free(&engine->peers);
    if (engine->endpoint != NULL)
        cl_endpoint_destroy(engine->endpoint);
    if (engine->ports.wire != NULL)
        engine->ports.wire_type->close(engine->ports.wire);
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    cl_bell_close(&engine->bell);
    cl_meter_close(&engine->meter);
    if (engine->timer_fd >= 0)
        close(engine->timer_fd);
    free(engine->batch);
    pthread_mutex_destroy(&engine->core);
    pthread_mutex_destroy(&engine->inbox);
    cl_events_free(&engine->events);
    free(engine);
}

/* Numbers the interfaces by address; false when there are more of them than a peer can have paths. */
static bool number_interfaces(struct cl_engine *engine, const struct cl_engine_options *options)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < options->address_count; i++) {
        uint32_t same = 0;
        while (same < i && strcmp(options->addresses[same], options->addresses[i]) != 0)
            same++;
        engine->ports.interfaces[i] = same < i ? engine->ports.interfaces[same] : count++;
    }
    return count <= CL_PEER_PATHS_MAX;
}

static void name_interface(struct cl_engine *engine, uint32_t port, const char *address)
{
    if (engine->meter.lines != NULL)
        atomic_store(&engine->meter.lines[engine->ports.interfaces[port]].key, cl_meter_key(address));
}

static int open_wire(struct cl_engine *engine, const struct cl_engine_options *options)
{
    if (strcmp(options->wire, "none") == 0)
        return CL_OK;
    engine->ports.wire_type = options->wire_type != NULL ? options->wire_type : cl_wire_find(options->wire);
    if (engine->ports.wire_type == NULL || options->address_count == 0 || options->address_count > CL_PORTS_MAX ||
        !number_interfaces(engine, options))
        return CL_EINVAL;
    struct cl_wire_config config = {.addresses = options->addresses,
                                    .address_count = options->address_count,
                                    .datagram_bytes = options->datagram_bytes,
                                    .dscp = options->dscp != 0,
                                    .provider = options->ofi_provider,
                                    .port_first = options->port_first,
                                    .port_last = options->port_last};
    int status = engine->ports.wire_type->open(&config, &engine->ports.wire);
    if (status != CL_OK)
        return status;
    engine->ports.count = options->address_count;
    for (uint32_t i = 0; i < options->address_count; i++)
        name_interface(engine, i, options->addresses[i]);
    if (engine->ports.wire_type == &cl_wire_udp) { /* other wires' descriptors may be for one thread */
        engine->packet_wait = cl_packet_wait_create(engine);
        if (engine->packet_wait == NULL)
            return CL_ENOMEM;
        status = cl_port_set_open(&engine->port_set);
        for (uint32_t i = 0; status == CL_OK && i < engine->ports.count; i++)
            status = cl_port_set_add(&engine->port_set, i, engine->ports.wire_type->descriptor(engine->ports.wire, i));
        if (status != CL_OK)
            return status;
    }
    if (engine->ports.wire_type->datagram_limit != NULL) {
        uint32_t limit = engine->ports.wire_type->datagram_limit(engine->ports.wire);
        if (limit < engine->options.datagram_bytes)
            engine->options.datagram_bytes = limit;
    }
    return CL_OK;
}

int cl_engine_open(const struct cl_engine_options *options, cl_engine **out)
{
    if (options == NULL || out == NULL || options->wire == NULL || options->auth > CL_AUTH_OFF)
        return CL_EINVAL;
    struct cl_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return CL_ENOMEM;
    pthread_mutex_init(&engine->core, NULL);
    pthread_mutex_init(&engine->inbox, NULL);
    cl_events_init(&engine->events);
    engine->handed_over.last = &engine->handed_over.first;
    engine->options = *options;
    engine->bell.fd = -1;
    engine->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    engine->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    engine->batch = calloc(CL_SEND_BATCH, sizeof *engine->batch);
    int status = engine->batch != NULL ? CL_OK : CL_ENOMEM;
    if (status == CL_OK)
        status = engine->wake_fd < 0 || engine->timer_fd < 0 ? CL_ESYSTEM : CL_OK;
    if (status == CL_OK) {
        status = cl_bell_open(&engine->bell);
        if (cl_meter_open(&engine->meter) != CL_OK)
            engine->meter.fd = -1; /* the ranks of this host find their shares by their queue */
        if (status == CL_OK)
            status = open_wire(engine, options);
    }
    if (status == CL_OK)
        status = cl_engine_start(engine);
    if (status != CL_OK) {
        free_engine(engine);
        return status;
    }
    *out = engine;
    return CL_OK;
}

void cl_engine_close(cl_engine *engine)
{
    if (engine == NULL)
        return;
    for (;;) {
        pthread_mutex_lock(&engine->core);
        struct cl_group *group = engine->groups.first;
        pthread_mutex_unlock(&engine->core);
        if (group == NULL)
            break;
        cl_group_close(group);
    }
    if (engine->packet_wait != NULL)
        cl_packet_wait_close(engine->packet_wait);
    atomic_store(&engine->stopping, true);
    cl_engine_wake(engine);
    pthread_join(engine->thread, NULL);
    cl_engine_stop_events(engine);
    free_engine(engine);
}

/* ---- this process and its peers ---- */

int cl_engine_port(cl_engine *engine, uint32_t index, uint32_t *port)
{
    if (engine->ports.wire == NULL || index >= engine->ports.count)
        return CL_EINVAL;
    return engine->ports.wire_type->port_number(engine->ports.wire, index, port);
}

int cl_engine_move_port(cl_engine *engine, uint32_t index, const char *address)
{
    pthread_mutex_lock(&engine->core);
    bool can = index < engine->ports.count && address != NULL && engine->ports.wire_type->move != NULL;
    if (can && engine->packet_wait != NULL)
        cl_port_set_remove(&engine->port_set, engine->ports.wire_type->descriptor(engine->ports.wire, index));
    int status = can ? engine->ports.wire_type->move(engine->ports.wire, index, address) : CL_EINVAL;
    if (can && engine->packet_wait != NULL) {
        int fd = engine->ports.wire_type->descriptor(engine->ports.wire, index), added;
        cl_packet_wait_move(engine->packet_wait, index, fd);
        added = cl_port_set_add(&engine->port_set, index, fd);
        status = status == CL_OK ? added : status;
    }
    if (status == CL_OK)
        name_interface(engine, index, address);
    if (status == CL_OK && engine->endpoint != NULL)
        cl_endpoint_release_port(engine->endpoint, index); /* the new socket has room */
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine); /* it may be asleep on the former socket */
    return status;
}

int cl_engine_descriptor(cl_engine *engine, uint32_t index)
{
    if (engine->ports.wire == NULL || index >= engine->ports.count)
        return CL_EINVAL;
    return engine->ports.wire_type->descriptor(engine->ports.wire, index);
}

int cl_engine_address(cl_engine *engine, uint32_t index, char *text)
{
    text[0] = '\0';
    if (engine->ports.wire == NULL || index >= engine->ports.count)
        return CL_EINVAL;
    return engine->ports.wire_type->address == NULL
               ? CL_OK
               : engine->ports.wire_type->address(engine->ports.wire, index, text, CL_ADDRESS_BYTES);
}

uint32_t cl_engine_packet_bytes(cl_engine *engine)
{
    return cl_packet_payload_bytes(engine->options.datagram_bytes);
}

int cl_engine_bell(cl_engine *engine, char *name)
{
    memcpy(name, engine->bell.name, CL_BELL_BYTES);
    return CL_OK;
}

int cl_engine_identify(cl_engine *engine, uint64_t job, const uint8_t *key, uint16_t self, uint16_t epoch)
{
    pthread_mutex_lock(&engine->core);
    int status = CL_OK;
    if (engine->endpoint != NULL) {
        bool same = engine->job == job && engine->self == self && engine->epoch == epoch &&
                    memcmp(engine->key, key, sizeof engine->key) == 0;
        status = same ? CL_OK : CL_EINVAL;
    } else if (engine->ports.wire != NULL) {
        struct cl_endpoint_config config = {.auth = (enum cl_auth)engine->options.auth,
                                            .job = job,
                                            .self = self,
                                            .epoch = epoch,
                                            .datagram_bytes = engine->options.datagram_bytes,
                                            .unexpected_limit_bytes = engine->options.unexpected_limit_bytes,
                                            .credit_bytes = engine->options.credit_bytes,
                                            .peer_timeout_us = engine->options.peer_timeout_us};
        memcpy(config.key, key, sizeof config.key);
        memcpy(engine->key, key, sizeof engine->key);
        status = cl_endpoint_create(&config, &engine->endpoint);
        engine->job = job;
        engine->self = self;
        engine->epoch = epoch;
    }
    pthread_mutex_unlock(&engine->core);
    return status;
}

int cl_engine_add_peer(cl_engine *engine, const struct cl_peer_options *options)
{
    pthread_mutex_lock(&engine->core);
    int status =
        engine->endpoint == NULL ? CL_EINVAL : cl_peers_add(&engine->peers, options, &engine->ports, engine->endpoint);
    pthread_mutex_unlock(&engine->core);
    return status;
}

int cl_engine_ping(cl_engine *engine, uint16_t peer)
{
    pthread_mutex_lock(&engine->core);
    int status = engine->endpoint == NULL ? CL_EINVAL : cl_endpoint_ping(engine->endpoint, peer);
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine);
    return status;
}

int cl_engine_pause(cl_engine *engine, uint16_t peer, uint32_t path, int paused)
{
    pthread_mutex_lock(&engine->core);
    int status = engine->endpoint == NULL ? CL_EINVAL : cl_endpoint_pause(engine->endpoint, peer, path, paused);
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine);
    return status;
}

int cl_engine_incarnation(cl_engine *engine, uint16_t peer, uint32_t *incarnation)
{
    pthread_mutex_lock(&engine->core);
    int status = engine->endpoint == NULL ? CL_EINVAL : cl_endpoint_incarnation(engine->endpoint, peer, incarnation);
    pthread_mutex_unlock(&engine->core);
    return status;
}

int cl_engine_revive_peer(cl_engine *engine, uint16_t peer, uint32_t incarnation)
{
    pthread_mutex_lock(&engine->core);
    int status = engine->endpoint == NULL ? CL_EINVAL : cl_endpoint_revive_peer(engine->endpoint, peer, incarnation);
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine);
    return status;
}

int cl_engine_watch_process(cl_engine *engine, uint16_t peer, int32_t pid)
{
    pthread_mutex_lock(&engine->core);
    int status = cl_peers_watch(&engine->peers, peer, pid);
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine);
    return status;
}

int cl_engine_meter(cl_engine *engine)
{
    return engine->meter.fd;
}

int cl_engine_read_meter(cl_engine *engine, uint16_t peer, int32_t fd)
{
    pthread_mutex_lock(&engine->core);
    int status = cl_peers_read_meter(&engine->peers, peer, fd);
    pthread_mutex_unlock(&engine->core);
    return status;
}
