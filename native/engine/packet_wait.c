#include "engine/packet_wait.h"

#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/clock.h"
#include "engine/engine.h"

enum {
    SLEEP_MOST_US = 1000000,
    PAUSE_US = 1000, /* after a longer pause before a wait, the next wait will mostly be as late */
};

struct cl_packet_wait *cl_packet_wait_create(struct cl_engine *engine)
{
    struct cl_packet_wait *wait = calloc(1, sizeof *wait);
    if (wait == NULL)
        return NULL;
    wait->engine = engine;
    wait->sleep_most_us = SLEEP_MOST_US;
    wait->port_count = engine->ports.count;
    for (uint32_t i = 0; i < wait->port_count; i++)
        atomic_init(&wait->port_fds[i], engine->ports.wire_type->descriptor(engine->ports.wire, i));
    atomic_init(&wait->references, 1);
    wait->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wait->wake_fd < 0) {
        free(wait);
        return NULL;
    }
    return wait;
}

void cl_packet_wait_retain(struct cl_packet_wait *wait)
{
    atomic_fetch_add(&wait->references, 1);
}

void cl_packet_wait_release(struct cl_packet_wait *wait)
{
    if (wait == NULL || atomic_fetch_sub(&wait->references, 1) != 1)
        return;
    close(wait->wake_fd);
    free(wait);
}

/* Ends the sleep of the thread that polls. */
static void wake(struct cl_packet_wait *wait)
{
    eventfd_write(wait->wake_fd, 1);
}

void cl_packet_wait_close(struct cl_packet_wait *wait)
{
    atomic_store(&wait->closed, true);
    while (atomic_load(&wait->inside) > 0) {
        wake(wait);
        sched_yield();
    }
}

/* Sleeps until a port is readable, or another thread ends the sleep. Returns the readable ports, a bit each. */
static uint64_t sleep_on(struct cl_packet_wait *wait, const _Atomic uint32_t *done, uint64_t deadline_us)
{
    struct pollfd fds[1 + CL_PORTS_MAX];
    uint32_t ports = wait->port_count;
    uint64_t readable = 0, now_us = cl_now_us();
    int ready = 0;
    fds[0] = (struct pollfd){.fd = wait->wake_fd, .events = POLLIN};
    for (uint32_t i = 0; i < ports; i++)
        fds[1 + i] = (struct pollfd){.fd = atomic_load(&wait->port_fds[i]), .events = POLLIN};
    /* The order matters: whoever sets the word later sees who sleeps for it. */
    atomic_store(&wait->sleeps_for, done);
    if (atomic_load(done) == 0 && !atomic_load(&wait->closed) && now_us < deadline_us) {
        uint64_t most_us = wait->sleep_most_us, left_us = deadline_us - now_us;
        left_us = left_us < most_us ? left_us : most_us;
        struct timespec timeout = {.tv_sec = (time_t)(left_us / 1000000), .tv_nsec = (long)(left_us % 1000000) * 1000};
        ready = ppoll(fds, 1 + (nfds_t)ports, &timeout, NULL);
    }
    atomic_store(&wait->sleeps_for, NULL);
    if (ready <= 0)
        return 0;
    for (uint32_t i = 0; i < ports; i++)
        if (fds[1 + i].revents != 0)
            readable |= UINT64_C(1) << i;
    if (fds[0].revents != 0) {
        eventfd_t ignored;
        eventfd_read(wait->wake_fd, &ignored);
    }
    return readable;
}

/* `apart`: the last wait ended long ago. */
static void poll_ports(struct cl_packet_wait *wait, const _Atomic uint32_t *done, uint64_t deadline_us, bool apart)
{
    bool goes_on;
    do {
        uint64_t readable = sleep_on(wait, done, deadline_us);
        goes_on = atomic_load(done) == 0 && !atomic_load(&wait->closed) && cl_now_us() < deadline_us;
        bool again = !apart && atomic_load(&wait->sleepers) == 0;
        if (readable != 0 || !goes_on)
            goes_on = cl_engine_take_ports_turn(wait->engine, readable, goes_on ? done : NULL, again);
    } while (goes_on);
}

void cl_packet_wait_for(struct cl_packet_wait *wait, const _Atomic uint32_t *done, uint64_t deadline_us)
{
    bool apart = cl_now_us() > atomic_load(&wait->ended_us) + PAUSE_US;
    atomic_fetch_add(&wait->inside, 1);
    if (!atomic_load(&wait->closed) && cl_engine_take_ports(wait->engine, apart))
        poll_ports(wait, done, deadline_us, apart);
    atomic_fetch_sub(&wait->inside, 1);
}

void cl_packet_wait_note(struct cl_packet_wait *wait)
{
    atomic_store(&wait->ended_us, cl_now_us());
}

void cl_packet_wait_end(struct cl_packet_wait *wait, const _Atomic uint32_t *done)
{
    if (atomic_load(&wait->sleeps_for) == done)
        wake(wait);
}

void cl_packet_wait_move(struct cl_packet_wait *wait, uint32_t port, int fd)
{
    atomic_store(&wait->port_fds[port], fd);
    wake(wait); /* it may be asleep on the former one */
}
