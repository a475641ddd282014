/* The shared region: places, counters, sleeping and bells; between threads, and between processes. */
#include "os/host.h"
#include "tests/check.h"

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STAGING = 5000, RANKS = 3, FOREVER_US = 20000000, CLASS = 4 };

static bool reached(struct cl_host *host, uint32_t rank, uint32_t value)
{
    return (int32_t)(atomic_load_explicit(cl_host_counter(host, CLASS, rank), memory_order_acquire) - value) >= 0;
}

struct region {
    int32_t fd;
    char bells[RANKS][CL_BELL_BYTES];
    struct cl_bell own[RANKS];
    struct cl_host *hosts[RANKS]; /* each rank's mapping */
};

static void open_region(struct region *region)
{
    CHECK_EQ(cl_host_create(RANKS, STAGING, &region->fd), CL_OK);
    for (uint32_t i = 0; i < RANKS; i++) {
        CHECK_EQ(cl_bell_open(&region->own[i]), CL_OK);
        memcpy(region->bells[i], region->own[i].name, CL_BELL_BYTES);
    }
    for (uint32_t i = 0; i < RANKS; i++)
        CHECK_EQ(cl_host_map(region->fd, RANKS, i, STAGING, &region->bells[0][0], &region->own[i], &region->hosts[i]),
                 CL_OK);
}

static void close_region(struct region *region)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        cl_host_unmap(region->hosts[i]);
        cl_bell_close(&region->own[i]);
    }
    cl_host_close_fd(region->fd);
}

static bool rings(const struct region *region, uint32_t rank)
{
    struct pollfd fd = {.fd = region->own[rank].fd, .events = POLLIN};
    return poll(&fd, 1, 0) == 1;
}

TEST(test_errors)
{
    int32_t fd = -1, other;
    struct cl_host *host;
    char bells[2 * CL_BELL_BYTES] = {0};
    const struct cl_bell none = {.fd = -1};
    CHECK_EQ(cl_host_create(0, STAGING, &fd), CL_EINVAL);
    CHECK_EQ(cl_host_create(CL_HOST_RANKS_MAX + 1, STAGING, &fd), CL_EINVAL);
    CHECK_EQ(cl_host_create(2, STAGING, NULL), CL_EINVAL);
    CHECK_EQ(cl_host_create(2, STAGING, &fd), CL_OK);
    CHECK_EQ(cl_host_map(fd, 2, 2, STAGING, bells, &none, &host), CL_EINVAL);
    CHECK_EQ(cl_host_map(fd, 3, 0, STAGING, bells, &none, &host), CL_EINVAL); /* not the size it was made for */
    CHECK_EQ(cl_host_map(fd, 2, 0, 2 * STAGING, bells, &none, &host), CL_EINVAL);
    CHECK_EQ(cl_host_map(-1, 2, 0, STAGING, bells, &none, &host), CL_EINVAL);
    CHECK_EQ(cl_host_open(getpid(), -1, &other), CL_ESYSTEM);
    cl_host_close_fd(fd);
    cl_host_close_fd(-1);
    cl_host_unmap(NULL);
}

TEST(test_staging)
{
    struct region region;
    open_region(&region);
    uint8_t byte = 0;
    for (uint32_t class = 0; class < CL_HOST_CLASSES; class ++)
        for (uint32_t rank = 0; rank < RANKS; rank++)
            for (uint32_t parity = 0; parity < 2; parity++) /* everybody writes its own, through its own mapping */
                memset(cl_host_staging(region.hosts[rank], class, rank, parity), ++byte, STAGING);
    byte = 0;
    for (uint32_t class = 0; class < CL_HOST_CLASSES; class ++) {
        for (uint32_t i = 0; i < RANKS; i++) {
            CHECK_EQ(atomic_load(cl_host_counter(region.hosts[0], class, i)), 0);
            for (uint32_t parity = 0; parity < 2; parity++) {
                const uint8_t *bytes = cl_host_staging(region.hosts[0], class, i, parity);
                CHECK_EQ(atomic_load(cl_host_signature(region.hosts[0], class, i, parity)), 0);
                CHECK_EQ(bytes[0], ++byte);
                CHECK_EQ(bytes[STAGING - 1], byte);
            }
        }
    }
    close_region(&region);
}

/* Staging that no operation has used takes no memory. */
TEST(test_unused_staging)
{
    enum { LARGE = 1 << 20 };
    int32_t fd;
    struct cl_host *host;
    struct stat status;
    char bells[RANKS * CL_BELL_BYTES] = {0};
    const struct cl_bell none = {.fd = -1};
    CHECK_EQ(cl_host_create(RANKS, LARGE, &fd), CL_OK);
    CHECK_EQ(cl_host_map(fd, RANKS, 0, LARGE, bells, &none, &host), CL_OK);
    memset(cl_host_staging(host, CLASS, 0, 1), 1, LARGE);
    cl_host_post(host, CLASS, 1);
    cl_host_wake_all(host);
    CHECK_EQ(fstat(fd, &status), 0);
    CHECK(status.st_size > 2 * RANKS * CL_HOST_CLASSES * LARGE);
    CHECK(status.st_blocks * 512 < 8 * LARGE);
    cl_host_unmap(host);
    cl_host_close_fd(fd);
}

TEST(test_counters)
{
    struct region region;
    open_region(&region);
    CHECK(reached(region.hosts[0], 1, 0));
    CHECK(!reached(region.hosts[0], 1, 1));
    cl_host_post(region.hosts[1], CLASS, 3);
    CHECK(reached(region.hosts[0], 1, 3));
    CHECK(!reached(region.hosts[0], 1, 4));
    CHECK(!reached(region.hosts[0], 2, 1));
    cl_host_post(region.hosts[2], CLASS + 1, 1);
    CHECK(!reached(region.hosts[0], 2, 1)); /* of another class */
    cl_host_post(region.hosts[1], CLASS, UINT32_MAX);
    CHECK(!reached(region.hosts[0], 1, 1)); /* 1 comes after UINT32_MAX */
    cl_host_post(region.hosts[1], CLASS, 2);
    CHECK(reached(region.hosts[0], 1, 1));
    CHECK(reached(region.hosts[0], 1, UINT32_MAX));
    close_region(&region);
}

struct sleeper {
    struct cl_host *host;
    uint32_t rank, value;
    atomic_bool awake;
};

static void *sleep_once(void *argument)
{
    struct sleeper *sleeper = argument;
    uint32_t culprit;
    while (!reached(sleeper->host, sleeper->rank, sleeper->value) && cl_host_aborted(sleeper->host, &culprit) == CL_OK)
        cl_host_sleep(sleeper->host, CLASS, sleeper->rank, sleeper->value, FOREVER_US);
    atomic_store(&sleeper->awake, true);
    return NULL;
}

TEST(test_sleep)
{
    struct region region;
    open_region(&region);
    cl_host_sleep(region.hosts[0], CLASS, 1, 0, FOREVER_US); /* reached already */
    cl_host_sleep(region.hosts[0], CLASS, 1, 1, 1000);       /* or not, but no longer than asked for */
    struct sleeper sleeper = {.host = region.hosts[0], .rank = 1, .value = 2};
    pthread_t thread;
    pthread_create(&thread, NULL, sleep_once, &sleeper);
    usleep(20000); /* likely asleep by now; right either way */
    CHECK(!atomic_load(&sleeper.awake));
    cl_host_post(region.hosts[2], CLASS, 2);
    cl_host_post(region.hosts[1], CLASS, 1);
    usleep(20000);
    CHECK(!atomic_load(&sleeper.awake));
    cl_host_post(region.hosts[1], CLASS, 2);
    pthread_join(thread, NULL);
    close_region(&region);
}

/* Two threads take turns: after one lost wake-up, the test would sleep for ever. */
struct player {
    struct cl_host *host;
    uint32_t self, turns;
};

static void *play(void *argument)
{
    const struct player *player = argument;
    for (uint32_t turn = 1; turn <= player->turns; turn++) {
        uint32_t wanted = turn - (player->self == 0 ? 1 : 0);
        while (!reached(player->host, 1 - player->self, wanted))
            cl_host_sleep(player->host, CLASS, 1 - player->self, wanted, FOREVER_US);
        cl_host_post(player->host, CLASS, turn);
    }
    return NULL;
}

TEST(test_no_wake_up_is_lost)
{
    struct region region;
    open_region(&region);
    struct player players[2] = {{region.hosts[0], 0, 20000}, {region.hosts[1], 1, 20000}};
    pthread_t thread;
    pthread_create(&thread, NULL, play, &players[0]);
    play(&players[1]);
    pthread_join(thread, NULL);
    CHECK(reached(region.hosts[2], 0, 20000));
    close_region(&region);
}

TEST(test_abort)
{
    struct region region;
    open_region(&region);
    struct sleeper sleeper = {.host = region.hosts[0], .rank = 1, .value = 1};
    pthread_t thread;
    pthread_create(&thread, NULL, sleep_once, &sleeper);
    usleep(20000);
    uint32_t culprit;
    CHECK_EQ(cl_host_aborted(region.hosts[2], &culprit), CL_OK);
    cl_host_leave(region.hosts[1]);
    CHECK(cl_host_left(region.hosts[2], 1));
    CHECK(!cl_host_left(region.hosts[2], 0));
    cl_host_abort(region.hosts[2], CL_ETIMEDOUT, 2);
    cl_host_abort(region.hosts[1], CL_EPEERLOST, 1);
    CHECK_EQ(cl_host_aborted(region.hosts[0], &culprit), CL_ETIMEDOUT); /* the first reason stays */
    CHECK_EQ(culprit, 2);
    for (int i = 0; i < 100 && !atomic_load(&sleeper.awake); i++) {
        cl_host_wake_all(region.hosts[2]); /* the one wake-up that may be lost: callers bound their sleep */
        usleep(1000);
    }
    pthread_join(thread, NULL);
    cl_host_sleep(region.hosts[0], CLASS, 1, 1, FOREVER_US); /* no thread sleeps in a dead region */
    close_region(&region);
}

TEST(test_bells)
{
    struct region region;
    open_region(&region);
    CHECK(strcmp(region.bells[0], region.bells[1]) != 0);
    CHECK(strlen(region.bells[0]) < CL_BELL_BYTES);
    cl_host_post(region.hosts[1], CLASS, 1);
    CHECK(!rings(&region, 0)); /* no rank asked */
    cl_host_request_bell(region.hosts[0], CLASS, 1);
    cl_host_request_bell(region.hosts[2], CLASS, 1);
    cl_host_post(region.hosts[2], CLASS, 1);
    CHECK(!rings(&region, 0)); /* asked of another */
    cl_host_post(region.hosts[1], CLASS - 1, 1);
    CHECK(!rings(&region, 0)); /* asked for another class */
    cl_host_post(region.hosts[1], CLASS, 2);
    CHECK(rings(&region, 0));
    CHECK(rings(&region, 2));
    CHECK(!rings(&region, 1));
    CHECK(!cl_bell_drain(&region.own[0]));
    CHECK(!rings(&region, 0));
    cl_host_post(region.hosts[1], CLASS, 3);
    CHECK(!rings(&region, 0)); /* one request, one ring */
    cl_host_request_bell(region.hosts[0], CLASS, 2);
    cl_host_abort(region.hosts[1], CL_EABORTED, 1);
    CHECK(rings(&region, 0));
    CHECK(cl_bell_drain(&region.own[0])); /* whoever sleeps must look, too */
    for (int i = 0; i < 2000; i++) {      /* a full queue does not block */
        cl_host_request_bell(region.hosts[0], CLASS, 1);
        cl_host_post(region.hosts[1], CLASS, 4 + (uint32_t)i);
    }
    CHECK(rings(&region, 0));
    CHECK(cl_bell_drain(&region.own[0])); /* a request may have found no room */
    while (rings(&region, 0))
        cl_bell_drain(&region.own[0]);
    close_region(&region);
}

/* The memory of another rank's process is read only if it is that process, and all of it can be read. */
TEST(test_read_memory)
{
    enum { BYTES = 100000 };
    struct region region;
    open_region(&region);
    uint8_t *data = malloc(BYTES), *target = calloc(1, BYTES);
    uint64_t address = (uint64_t)(uintptr_t)data;
    memset(data, 7, BYTES);
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 1, address, target, BYTES), CL_OK);
    CHECK(memcmp(data, target, BYTES) == 0);
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 1, address, target, 0), CL_OK);
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 1, 0, NULL, 0), CL_OK);
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 1, 8, target, BYTES), CL_ESYSTEM);
    struct cl_doorbell *doorbell = cl_host_doorbell(region.hosts[0], 1);
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    atomic_store(&doorbell->pid, child); /* has died */
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 1, address, target, BYTES), CL_ESYSTEM);
    atomic_store(&doorbell->pid, getpid());
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 1, address, target, BYTES), CL_OK);
    atomic_fetch_add(&doorbell->proof, 1); /* of a process that had the number before */
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 1, address, target, BYTES), CL_ESYSTEM);
    cl_host_leave(region.hosts[2]);
    CHECK_EQ(cl_host_read_memory(region.hosts[0], 2, address, target, BYTES), CL_ESYSTEM);
    free(data);
    free(target);
    close_region(&region);
}

TEST(test_between_processes)
{
    struct region region;
    open_region(&region);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        int32_t fd;
        struct cl_host *host;
        bool right = cl_host_open(parent, region.fd, &fd) == CL_OK &&
                     cl_host_map(fd, RANKS, 2, STAGING, &region.bells[0][0], &region.own[2], &host) == CL_OK;
        if (right) {
            memset(cl_host_staging(host, CLASS, 2, 1), 0x5A, STAGING);
            while (!reached(host, 0, 1))
                cl_host_sleep(host, CLASS, 0, 1, FOREVER_US);
            cl_host_post(host, CLASS, 1);
            cl_host_unmap(host);
            cl_host_close_fd(fd);
        }
        _exit(right ? 0 : 1);
    }
    cl_host_request_bell(region.hosts[1], CLASS, 2);
    cl_host_post(region.hosts[0], CLASS, 1);
    struct pollfd bell = {.fd = region.own[1].fd, .events = POLLIN};
    int status = 1;
    CHECK_EQ(poll(&bell, 1, FOREVER_US / 1000), 1);
    CHECK(reached(region.hosts[0], 2, 1));
    CHECK_EQ(cl_host_staging(region.hosts[0], CLASS, 2, 1)[STAGING - 1], 0x5A);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    close_region(&region);
}
