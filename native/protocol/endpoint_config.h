/* Endpoint configuration: the process, its job and its limits. */
#pragma once

#include "commlayer.h"

enum { CL_ENDPOINT_DATAGRAM_BYTES_MAX = 65000 };

struct cl_endpoint_config {
    enum cl_auth auth;             /* the same in the whole job */
    uint64_t job;                  /* the number of the job; with CL_AUTH_OFF every packet carries it */
    uint8_t key[16];               /* otherwise this secret of the job makes the packets' tags */
    uint16_t self;                 /* this process's peer id, unique within the job */
    uint16_t epoch;                /* the life of the job, carried by every packet, to tell packets of former lives */
    uint32_t datagram_bytes;       /* largest UDP payload, header included (1472 for MTU 1500) */
    uint64_t peer_timeout_us;      /* a peer that is waited for is lost after so long without an answer; 0: 3 s */
    uint64_t credit_bytes;         /* most bytes on their way here, as granted: see budget.h; 0: any */
    const char *rate_control;      /* name: see congestion/congestion.h; NULL: the product's */
    size_t unexpected_limit_bytes; /* limit of the memory for packets that came before their receive was posted */
};
