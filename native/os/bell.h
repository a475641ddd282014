/*
 * Bell: wakes an engine thread of the same host, which must also watch its sockets: a datagram on an abstract Unix
 * socket, which vanishes with its process.
 *
 * Every user of the host may send to such a socket. So a ring carries a key that only those know who share memory with
 * the bell's owner (doorbell.h). The kernel drops other datagrams before they take room or wake the owner, by a filter
 * of the socket; where it takes no filter, they are counted as noise.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { CL_BELL_BYTES = 32 };

struct cl_bell {
    int fd;
    uint32_t room; /* datagrams that its queue takes */
    uint64_t key;
    char name[CL_BELL_BYTES]; /* the name under which others ring it */
};

int cl_bell_open(struct cl_bell *bell);
void cl_bell_close(struct cl_bell *bell);
/* Rings the bell of that name and key. `request`: of a rank that wants something of one whose group may sleep
 * (groups.h). */
void cl_bell_ring(const struct cl_bell *own, const char name[CL_BELL_BYTES], uint64_t key, bool request);
/* Empties the queue, but takes a bounded number of datagrams. Returns whether there was a request, or may have been: a
 * full queue takes none. */
bool cl_bell_drain(const struct cl_bell *bell);
