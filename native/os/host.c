#include "os/host.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "os/process.h"

enum {
    RING_BYTES_LEAST = 64 << 10,
    RING_BYTES_MOST = 1 << 20,
    RINGS_BYTES = 256 << 20, /* all rings together, unless they are of the least size */
};
enum { LINE_BYTES = 128, HEAD_BYTES = 4096, MASKS = CL_HOST_RANKS_MAX / 64 };

/* The state of one rank in one queue, on cache lines of its own: written by this rank, read by the others. */
struct line {
    _Atomic uint32_t counter;
    _Atomic uint16_t sleepers;      /* threads that sleep on the counter */
    _Atomic uint16_t left;          /* counted in queue 0, for all */
    _Atomic uint64_t signatures[2]; /* the signatures of the operation that runs, by parity */
    _Atomic uint64_t bells[MASKS];  /* ranks whose bell this rank rings at its next post */
    uint8_t padding[LINE_BYTES - 24 - 8 * MASKS];
};

struct head {
    _Atomic uint64_t aborted; /* low half: the reason; high half: the culprit; 0: not aborted */
};

struct cl_host {
    uint8_t *memory;
    size_t bytes;
    uint32_t ranks, self;
    uint64_t staging_bytes; /* rounded up to pages */
    const struct cl_bell *bell;
    char *bells; /* the names of all ranks' bells */
    uint8_t *rings;
    struct cl_doorbell *doorbells;
    uint64_t proof; /* others read it: see os/doorbell.h */
};

static uint64_t round_up(uint64_t bytes)
{
    return (bytes + 4095) & ~(uint64_t)4095;
}

static uint64_t lines_bytes(uint32_t ranks)
{
    return round_up((uint64_t)ranks * CL_HOST_QUEUES * LINE_BYTES);
}

static uint64_t ring_bytes(uint32_t ranks)
{
    uint64_t bytes = RING_BYTES_MOST;
    while (bytes > RING_BYTES_LEAST && bytes * ranks * ranks > RINGS_BYTES)
        bytes /= 2;
    return bytes;
}

/* The bytes of doorbells and rings, which come last. */
static uint64_t message_bytes(uint32_t ranks)
{
    return round_up((uint64_t)ranks * sizeof(struct cl_doorbell)) +
           (uint64_t)ranks * ranks * (CL_HOST_RING_HEAD_BYTES + ring_bytes(ranks));
}

static uint64_t region_bytes(uint32_t ranks, uint64_t staging_bytes)
{
    return HEAD_BYTES + lines_bytes(ranks) + 2 * (uint64_t)ranks * CL_HOST_CLASSES * round_up(staging_bytes) +
           message_bytes(ranks);
}

int cl_host_create(uint32_t ranks, uint64_t staging_bytes, int32_t *fd)
{
    if (ranks == 0 || ranks > CL_HOST_RANKS_MAX || fd == NULL)
        return CL_EINVAL;
    int created = memfd_create("commlayer", MFD_CLOEXEC);
    if (created < 0)
        return CL_ESYSTEM;
    if (ftruncate(created, (off_t)region_bytes(ranks, staging_bytes)) != 0) {
        close(created);
        return CL_ESYSTEM;
    }
    *fd = created;
    return CL_OK;
}

int cl_host_open(int32_t pid, int32_t fd, int32_t *own_fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0)
        return CL_ESYSTEM;
    *own_fd = opened;
    return CL_OK;
}

void cl_host_close_fd(int32_t fd)
{
    if (fd >= 0)
        close(fd);
}

static struct line *line_of(struct cl_host *host, uint32_t queue, uint32_t rank)
{
    return (struct line *)(void *)(host->memory + HEAD_BYTES + ((size_t)rank * CL_HOST_QUEUES + queue) * LINE_BYTES);
}

/* Lets the other ranks read this process's memory. */
static void open_doorbell(struct cl_host *host)
{
    struct cl_doorbell *own = &host->doorbells[host->self];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    host->proof = ((uint64_t)getpid() << 32 ^ (uint64_t)now.tv_nsec ^ (uint64_t)(uintptr_t)host) * 0x9E3779B97F4A7C15u;
    atomic_store(&own->proof, host->proof);
    atomic_store(&own->proof_address, (uint64_t)(uintptr_t)&host->proof);
    atomic_store(&own->bell_key, host->bell->key);
    atomic_store(&own->wish, CL_DOORBELL_REQUESTS);
    atomic_store(&own->pid, getpid());
}

int cl_host_map(int fd, uint32_t ranks, uint32_t self, uint64_t staging_bytes, const char *bells,
                const struct cl_bell *bell, struct cl_host **out)
{
    struct stat status;
    uint64_t bytes = region_bytes(ranks, staging_bytes);
    if (ranks == 0 || ranks > CL_HOST_RANKS_MAX || self >= ranks || fstat(fd, &status) != 0 ||
        (uint64_t)status.st_size != bytes)
        return CL_EINVAL;
    struct cl_host *host = calloc(1, sizeof *host);
    char *names = malloc((size_t)ranks * CL_BELL_BYTES);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (host == NULL || names == NULL || memory == MAP_FAILED) {
        free(host);
        free(names);
        if (memory != MAP_FAILED)
            munmap(memory, bytes);
        return CL_ENOMEM;
    }
    memcpy(names, bells, (size_t)ranks * CL_BELL_BYTES);
    *host = (struct cl_host){.memory = memory,
                             .bytes = bytes,
                             .ranks = ranks,
                             .self = self,
                             .staging_bytes = round_up(staging_bytes),
                             .bell = bell,
                             .bells = names};
    host->doorbells = (struct cl_doorbell *)(void *)(host->memory + bytes - message_bytes(ranks));
    host->rings = host->memory + bytes - (uint64_t)ranks * ranks * (CL_HOST_RING_HEAD_BYTES + ring_bytes(ranks));
    open_doorbell(host);
    *out = host;
    return CL_OK;
}

void cl_host_unmap(struct cl_host *host)
{
    if (host == NULL)
        return;
    munmap(host->memory, host->bytes);
    free(host->bells);
    free(host);
}

uint8_t *cl_host_staging(struct cl_host *host, uint32_t class, uint32_t rank, uint32_t half)
{
    uint64_t number = 2 * ((uint64_t) class * host->ranks + rank) + half;
    return host->memory + HEAD_BYTES + lines_bytes(host->ranks) + number * host->staging_bytes;
}

_Atomic uint32_t *cl_host_counter(struct cl_host *host, uint32_t queue, uint32_t rank)
{
    return &line_of(host, queue, rank)->counter;
}

_Atomic uint64_t *cl_host_signature(struct cl_host *host, uint32_t queue, uint32_t rank, uint32_t parity)
{
    return &line_of(host, queue, rank)->signatures[parity];
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

static void ring_bell(struct cl_host *host, uint32_t rank, bool request)
{
    cl_bell_ring(host->bell, host->bells + (size_t)rank * CL_BELL_BYTES, atomic_load(&host->doorbells[rank].bell_key),
                 request);
}

static void ring_bells(struct cl_host *host, struct line *line)
{
    for (uint32_t i = 0; i < MASKS; i++) {
        if (atomic_load(&line->bells[i]) == 0)
            continue;
        uint64_t mask = atomic_exchange(&line->bells[i], 0);
        while (mask != 0) {
            uint32_t rank = 64 * i + (uint32_t)__builtin_ctzll(mask);
            mask &= mask - 1;
            ring_bell(host, rank, false);
        }
    }
}

static void wake_line(struct cl_host *host, struct line *line)
{
    if (atomic_load(&line->sleepers) != 0)
        futex(&line->counter, FUTEX_WAKE, INT32_MAX, NULL);
    ring_bells(host, line);
}

void cl_host_post(struct cl_host *host, uint32_t queue, uint32_t value)
{
    struct line *line = line_of(host, queue, host->self);
    /* Sequentially consistent on both sides: either the sleeper sees the new value, or this rank sees the sleeper. */
    atomic_store(&line->counter, value);
    wake_line(host, line);
}

void cl_host_sleep(struct cl_host *host, uint32_t queue, uint32_t rank, uint32_t value, uint64_t timeout_us)
{
    struct line *line = line_of(host, queue, rank);
    struct timespec timeout = {.tv_sec = (time_t)(timeout_us / 1000000u),
                               .tv_nsec = (long)(timeout_us % 1000000u) * 1000};
    atomic_fetch_add(&line->sleepers, 1);
    uint32_t culprit, seen = atomic_load(&line->counter);
    if ((int32_t)(seen - value) < 0 && cl_host_aborted(host, &culprit) == CL_OK)
        futex(&line->counter, FUTEX_WAIT, seen, &timeout);
    atomic_fetch_sub(&line->sleepers, 1);
}

void cl_host_request_bell(struct cl_host *host, uint32_t queue, uint32_t rank)
{
    atomic_fetch_or(&line_of(host, queue, rank)->bells[host->self / 64], (uint64_t)1 << (host->self % 64));
    atomic_thread_fence(memory_order_seq_cst); /* the caller must not read the counter before this */
}

/* Wakes those that wait for a rank, in any queue. */
static void wake_rank(struct cl_host *host, uint32_t rank)
{
    for (uint32_t queue = 0; queue < CL_HOST_QUEUES; queue++)
        wake_line(host, line_of(host, queue, rank));
}

void *cl_host_ring(struct cl_host *host, uint32_t from, uint32_t to)
{
    return host->rings + ((uint64_t)from * host->ranks + to) * (CL_HOST_RING_HEAD_BYTES + ring_bytes(host->ranks));
}

uint64_t cl_host_ring_bytes(const struct cl_host *host)
{
    return ring_bytes(host->ranks);
}

struct cl_doorbell *cl_host_doorbell(struct cl_host *host, uint32_t rank)
{
    return &host->doorbells[rank];
}

void cl_host_notify(struct cl_host *host, uint32_t rank, bool request)
{
    if (cl_doorbell_ring(&host->doorbells[rank], request))
        ring_bell(host, rank, request);
}

int cl_host_read_memory(struct cl_host *host, uint32_t rank, uint64_t address, void *target, uint64_t bytes)
{
    struct cl_doorbell *doorbell = &host->doorbells[rank];
    uint64_t proof = 0;
    int32_t pid = atomic_load(&doorbell->pid);
    /* The proof comes last: then the process was the right one, and alive, all the time. */
    bool done = pid != 0 && cl_process_read(pid, (uint64_t[]){address, atomic_load(&doorbell->proof_address)},
                                            (void *[]){target, &proof}, (size_t[]){bytes, sizeof proof});
    return done && proof == atomic_load(&doorbell->proof) ? CL_OK : CL_ESYSTEM;
}

void cl_host_wake_all(struct cl_host *host)
{
    for (uint32_t i = 0; i < host->ranks; i++) {
        wake_rank(host, i);
        cl_host_notify(host, i, true);
    }
}

void cl_host_leave(struct cl_host *host)
{
    atomic_store(&line_of(host, 0, host->self)->left, 1);
    wake_rank(host, host->self);
    atomic_store(&host->doorbells[host->self].pid, 0);
    for (uint32_t i = 0; i < host->ranks; i++)
        cl_host_notify(host, i, true);
}

bool cl_host_left(struct cl_host *host, uint32_t rank)
{
    return atomic_load_explicit(&line_of(host, 0, rank)->left, memory_order_acquire) != 0;
}

void cl_host_abort(struct cl_host *host, int reason, uint32_t culprit)
{
    struct head *head = (struct head *)(void *)host->memory;
    uint64_t none = 0;
    atomic_compare_exchange_strong(&head->aborted, &none, (uint64_t)culprit << 32 | (uint32_t)reason);
    cl_host_wake_all(host);
}

int cl_host_aborted(struct cl_host *host, uint32_t *culprit)
{
    struct head *head = (struct head *)(void *)host->memory;
    uint64_t aborted = atomic_load(&head->aborted);
    *culprit = (uint32_t)(aborted >> 32);
    return (int32_t)(uint32_t)aborted;
}
