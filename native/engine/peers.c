/*
 * Peers: who this process is to the others of its job, how it reaches them, and which of them it watches.
 */
#include "engine/engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "protocol/peer.h"

int cl_engine_identify(cl_engine *engine, uint64_t job, const uint8_t *key, uint16_t self, uint16_t epoch)
{
    pthread_mutex_lock(&engine->core);
    int status = CL_OK;
    if (engine->endpoint != NULL) {
        bool same = engine->job == job && engine->self == self && engine->epoch == epoch &&
                    memcmp(engine->key, key, sizeof engine->key) == 0;
        status = same ? CL_OK : CL_EINVAL;
    } else if (engine->wire != NULL) {
        struct cl_endpoint_config config = {.auth = (enum cl_auth)engine->options.auth,
                                            .job = job,
                                            .self = self,
                                            .epoch = epoch,
                                            .datagram_bytes = engine->options.datagram_bytes,
                                            .unexpected_limit_bytes = engine->options.unexpected_limit_bytes,
                                            .peer_timeout_us = engine->options.peer_timeout_us,
                                            .congestion = engine->congestion,
                                            .fixed_rate_bps = engine->options.fixed_rate_bps,
                                            .seed = (uint32_t)job ^ self};
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

int cl_engine_add_peer(cl_engine *engine, uint16_t peer, uint32_t path_count, const uint32_t *local,
                       const char *const *remote_addresses, const uint32_t *remote_ports, uint32_t packet_bytes,
                       const uint8_t *key)
{
    if (peer >= CL_PEERS_MAX || path_count == 0 || path_count > CL_PEER_PATHS_MAX)
        return CL_EINVAL;
    pthread_mutex_lock(&engine->core);
    int status = engine->endpoint == NULL ? CL_EINVAL : CL_OK;
    if (status == CL_OK && engine->links[peer] == NULL) {
        struct cl_link *links = calloc(path_count, sizeof *links);
        uint32_t interfaces[CL_PEER_PATHS_MAX];
        status = links == NULL ? CL_ENOMEM : CL_OK;
        for (uint32_t i = 0; status == CL_OK && i < path_count; i++) {
            int link = local[i] >= engine->port_count
                           ? CL_EINVAL
                           : engine->wire_type->link(engine->wire, local[i], remote_addresses[i], remote_ports[i]);
            if (link < 0)
                status = link;
            else
                links[i] = (struct cl_link){(uint32_t)link, local[i]};
            interfaces[i] = link < 0 ? 0 : engine->interfaces[local[i]];
        }
        if (status == CL_OK)
            status = cl_endpoint_add_peer_through(engine->endpoint, peer, (uint16_t)path_count, interfaces);
        if (status == CL_OK && packet_bytes != 0)
            status = cl_endpoint_cut_peer(engine->endpoint, peer, packet_bytes);
        if (status == CL_OK && key != NULL)
            status = cl_endpoint_key_peer(engine->endpoint, peer, key);
        if (status == CL_OK) {
            engine->links[peer] = links;
            engine->peer_count++;
        } else {
            free(links);
        }
    }
    pthread_mutex_unlock(&engine->core);
    return status;
}

int cl_engine_watch_process(cl_engine *engine, uint16_t peer, int32_t pid)
{
    int status = CL_OK;
    pthread_mutex_lock(&engine->core);
    bool known = false;
    for (uint32_t i = 0; i < engine->watched_count; i++)
        known |= engine->watched[i].peer == peer;
    if (!known && engine->watched_count == CL_WATCHED_MAX) {
        status = CL_ENOMEM;
    } else if (!known) {
        int fd = (int)syscall(SYS_pidfd_open, pid, 0);
        if (fd >= 0 || errno == ESRCH)
            engine->watched[engine->watched_count++] =
                (struct watched){.peer = peer, .pid = pid, .died = fd < 0, .pidfd = fd};
        else
            status = CL_ESYSTEM;
    }
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine);
    return status;
}
