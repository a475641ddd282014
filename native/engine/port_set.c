#include "engine/port_set.h"

#include <sys/epoll.h>
#include <unistd.h>

/* The set has two levels, because epoll reports the errors of a descriptor even to those who ask for nothing. An epoll
 * descriptor has no errors. */
int cl_port_set_open(struct cl_port_set *set)
{
    struct epoll_event none = {0};
    set->all = epoll_create1(EPOLL_CLOEXEC);
    set->fd = epoll_create1(EPOLL_CLOEXEC);
    set->opened = true;
    pthread_mutex_init(&set->turning, NULL);
    return epoll_ctl(set->fd, EPOLL_CTL_ADD, set->all, &none) == 0 ? CL_OK : CL_ESYSTEM;
}

void cl_port_set_close(struct cl_port_set *set)
{
    if (!set->opened)
        return;
    if (set->fd >= 0)
        close(set->fd);
    if (set->all >= 0)
        close(set->all);
    pthread_mutex_destroy(&set->turning);
}

int cl_port_set_add(struct cl_port_set *set, uint32_t port, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = port}};
    set->count = port < set->count ? set->count : port + 1;
    return epoll_ctl(set->all, EPOLL_CTL_ADD, fd, &event) == 0 ? CL_OK : CL_ESYSTEM;
}

void cl_port_set_remove(struct cl_port_set *set, int fd)
{
    epoll_ctl(set->all, EPOLL_CTL_DEL, fd, NULL);
}

void cl_port_set_turn(struct cl_port_set *set, bool on)
{
    struct epoll_event event = {.events = on ? EPOLLIN : 0};
    pthread_mutex_lock(&set->turning);
    if (atomic_exchange(&set->on, on) != on)
        epoll_ctl(set->fd, EPOLL_CTL_MOD, set->all, &event);
    pthread_mutex_unlock(&set->turning);
}

uint64_t cl_port_set_readable(const struct cl_port_set *set)
{
    if (set->count == 1)
        return 1; /* without a system call */
    struct epoll_event events[CL_PORTS_MAX];
    uint64_t readable = 0;
    int count = epoll_wait(set->all, events, CL_PORTS_MAX, 0);
    for (int i = 0; i < count; i++)
        readable |= UINT64_C(1) << events[i].data.u32;
    return readable;
}
