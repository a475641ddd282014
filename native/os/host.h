/*
 * Host: the memory that the ranks of one host share, with the counters by which they wait for each other.
 *
 * The region holds, per rank and class of service, two halves of staging, and two lines with a counter each: operations
 * of a class may form two queues (group/host_queue.h). A rank raises its counter when data in its staging is ready, or
 * when it has read the staging of others. Other ranks write to its line only to ask for a wake-up. Staging costs memory
 * only once it was used: a class without operations has addresses, 2 * staging_bytes per rank, and no pages. Waiting
 * threads sleep on the counter itself (futex). An engine thread, which must also watch its sockets, asks for its bell
 * instead (os/bell.h).
 *
 * For messages the region holds a ring per ordered pair of ranks (group/ring.h) and a doorbell per rank. Memory that
 * nobody has touched costs addresses only.
 *
 * The region is an anonymous memory file that peers open through /proc. So a crash leaves nothing behind, and the small
 * /dev/shm of containers does not matter.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "commlayer.h"
#include "os/bell.h"
#include "os/doorbell.h"

enum {
    CL_HOST_RANKS_MAX = 256,
    CL_HOST_CLASSES = 8,
    CL_HOST_QUEUES = 2 * CL_HOST_CLASSES, /* those of a class follow each other */
    CL_HOST_RING_HEAD_BYTES = 4096,
};

struct cl_host;

/* Maps the region behind fd. `self`: this rank's place among the ranks of the host; bells: one name per rank;
 * `bell`: this process's, which must outlive the host. */
int cl_host_map(int fd, uint32_t ranks, uint32_t self, uint64_t staging_bytes, const char *bells,
                const struct cl_bell *bell, struct cl_host **host);
void cl_host_unmap(struct cl_host *host);

/* The half (0 or 1) of the memory in which `rank` stages operations of this class. */
uint8_t *cl_host_staging(struct cl_host *host, uint32_t class, uint32_t rank, uint32_t half);
_Atomic uint32_t *cl_host_counter(struct cl_host *host, uint32_t queue, uint32_t rank);
/* The signature of the operation of this parity (0 or 1) that `rank` runs in a queue; `rank` writes it before its first
 * post. */
_Atomic uint64_t *cl_host_signature(struct cl_host *host, uint32_t queue, uint32_t rank, uint32_t parity);

/* Raises this rank's counter of a queue and wakes the ranks that wait for it. */
void cl_host_post(struct cl_host *host, uint32_t queue, uint32_t value);
/* Sleeps until that counter of `rank` reaches `value`, a wake-up comes, or timeout_us passed. May return early. */
void cl_host_sleep(struct cl_host *host, uint32_t queue, uint32_t rank, uint32_t value, uint64_t timeout_us);
/* Asks `rank` to ring this rank's bell at its next post in a queue. The caller must check the counter once more
 * afterwards. */
void cl_host_request_bell(struct cl_host *host, uint32_t queue, uint32_t rank);

/* Memory for messages from one rank to another: a head, and bytes of data (a power of two). Zero at first. */
void *cl_host_ring(struct cl_host *host, uint32_t from, uint32_t to);
uint64_t cl_host_ring_bytes(const struct cl_host *host);
struct cl_doorbell *cl_host_doorbell(struct cl_host *host, uint32_t rank);
/* Tells a rank of a message, or of a request (doorbell.h). */
void cl_host_notify(struct cl_host *host, uint32_t rank, bool request);
/* Reads memory of the process of another rank. CL_ESYSTEM: the kernel does not allow it, or the process has died. */
int cl_host_read_memory(struct cl_host *host, uint32_t rank, uint64_t address, void *target, uint64_t bytes);

/* Announces that this rank leaves: it posts no more, and nobody should wait for it. */
void cl_host_leave(struct cl_host *host);
bool cl_host_left(struct cl_host *host, uint32_t rank);

/* Marks the region failed (the first reason stays) and wakes everybody. reason is negative; culprit: a group rank;
 * UINT32_MAX: not known. */
void cl_host_abort(struct cl_host *host, int reason, uint32_t culprit);
/* The reason; CL_OK: not aborted, and there is no culprit. */
int cl_host_aborted(struct cl_host *host, uint32_t *culprit);
/* Wakes all threads of this host that sleep on a counter or at a doorbell, so that they check the state of their group.
 */
void cl_host_wake_all(struct cl_host *host);
