/* Endpoint configuration: what a process says of itself and its job when it opens an endpoint. */
#ifndef CL_PROTOCOL_ENDPOINT_CONFIG_H
#define CL_PROTOCOL_ENDPOINT_CONFIG_H

#include "commlayer.h"

struct cl_endpoint_config {
    enum cl_auth auth;        /* the same in the whole job */
    uint64_t job;             /* with CL_AUTH_OFF every packet carries it */
    uint8_t key[16];          /* otherwise this secret of the job makes the packets' tags */
    uint16_t self;            /* this process's peer id, unique within the job */
    uint16_t epoch;           /* every packet carries it: those of the job's former lives are known by it */
    uint32_t datagram_bytes;  /* largest UDP payload, header included (1472 for MTU 1500) */
    uint64_t peer_timeout_us; /* without an answer from a peer that is waited for, after which it is lost; 0: 3 s */
    size_t unexpected_limit_bytes; /* bound on memory for packets that came before their receive was posted */
};

#endif
