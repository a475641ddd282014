/* The sockets as one descriptor. */
#include "engine/port_set.h"
#include "tests/check.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PORTS = 3, AWAIT_MS = 5000 };

struct ports {
    struct cl_port_set set;
    int fds[PORTS];
};

static void open_ports(struct ports *ports)
{
    CHECK_EQ(cl_port_set_open(&ports->set), CL_OK);
    for (uint32_t i = 0; i < PORTS; i++) {
        ports->fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        CHECK_EQ(cl_port_set_add(&ports->set, i, ports->fds[i]), CL_OK);
    }
}

static void close_ports(struct ports *ports)
{
    cl_port_set_close(&ports->set);
    for (uint32_t i = 0; i < PORTS; i++)
        close(ports->fds[i]);
}

static bool wakes(const struct ports *ports, int timeout_ms)
{
    struct pollfd fd = {.fd = ports->set.fd, .events = POLLIN};
    return poll(&fd, 1, timeout_ms) == 1;
}

TEST(test_turned_on_and_off)
{
    struct ports ports = {0};
    open_ports(&ports);
    eventfd_write(ports.fds[0], 1);
    eventfd_write(ports.fds[2], 1);
    CHECK(!wakes(&ports, 0));
    for (int round = 0; round < 3; round++) {
        cl_port_set_turn(&ports.set, true);
        cl_port_set_turn(&ports.set, true);
        CHECK(wakes(&ports, 0));
        CHECK_EQ(cl_port_set_readable(&ports.set), 5);
        cl_port_set_turn(&ports.set, false);
        CHECK(!wakes(&ports, 0));
    }
    eventfd_t ignored;
    eventfd_read(ports.fds[0], &ignored);
    eventfd_read(ports.fds[2], &ignored);
    cl_port_set_turn(&ports.set, true);
    CHECK(!wakes(&ports, 0));
    close_ports(&ports);
}

static void *sleep_on_set(void *context)
{
    return wakes(context, AWAIT_MS) ? context : NULL;
}

/* A thread that is asleep on the set wakes for what became readable while it was off. */
TEST(test_turned_on_while_a_thread_sleeps)
{
    struct ports ports = {0};
    pthread_t sleeper;
    void *woken = NULL;
    open_ports(&ports);
    cl_port_set_turn(&ports.set, true);
    CHECK_EQ(pthread_create(&sleeper, NULL, sleep_on_set, &ports), 0);
    usleep(10000); /* mostly it sleeps by then */
    cl_port_set_turn(&ports.set, false);
    eventfd_write(ports.fds[1], 1);
    usleep(10000);
    cl_port_set_turn(&ports.set, true);
    pthread_join(sleeper, &woken);
    CHECK(woken != NULL);
    close_ports(&ports);
}

/* The errors of a socket wake nobody while the set is off: whoever polls the socket takes them. */
TEST(test_error_of_a_socket)
{
    struct cl_port_set set = {0};
    struct sockaddr_in nobody = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof nobody;
    int gone = socket(AF_INET, SOCK_DGRAM, 0), fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    CHECK_EQ(bind(gone, (struct sockaddr *)&nobody, sizeof nobody), 0);
    CHECK_EQ(getsockname(gone, (struct sockaddr *)&nobody, &length), 0);
    close(gone);
    CHECK_EQ(connect(fd, (struct sockaddr *)&nobody, sizeof nobody), 0);
    CHECK_EQ(cl_port_set_open(&set), CL_OK);
    CHECK_EQ(cl_port_set_add(&set, 0, fd), CL_OK);
    CHECK_EQ(send(fd, "", 1, 0), 1); /* the answer: there is no such port */
    struct pollfd port = {.fd = fd, .events = POLLIN}, all = {.fd = set.fd, .events = POLLIN};
    CHECK_EQ(poll(&port, 1, AWAIT_MS), 1);
    CHECK((port.revents & POLLERR) != 0);
    CHECK_EQ(poll(&all, 1, 0), 0);
    cl_port_set_turn(&set, true);
    CHECK_EQ(poll(&all, 1, 0), 1);
    CHECK_EQ(cl_port_set_readable(&set), 1);
    cl_port_set_close(&set);
    close(fd);
}

/* A port gets another descriptor; of the former one a copy stays open, as in a forked process. */
TEST(test_another_descriptor)
{
    struct ports ports = {0};
    open_ports(&ports);
    cl_port_set_turn(&ports.set, true);
    eventfd_write(ports.fds[1], 1);
    int other = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), copy = dup(ports.fds[1]);
    cl_port_set_remove(&ports.set, ports.fds[1]);
    close(ports.fds[1]);
    CHECK_EQ(cl_port_set_add(&ports.set, 1, other), CL_OK);
    CHECK(!wakes(&ports, 0));
    eventfd_write(other, 1);
    CHECK(wakes(&ports, 0));
    CHECK_EQ(cl_port_set_readable(&ports.set), 2);
    ports.fds[1] = other;
    close(copy);
    close_ports(&ports);
}
