/*
 * udp: datagrams over the kernel's UDP sockets, in batches (sendmmsg, recvmmsg). Where the kernel supports it, a run of
 * equal-sized packets on one link leaves as one super-packet (UDP_SEGMENT) and arrives as one (UDP_GRO). Both are
 * probed at open. When the route of a link refuses segmentation, the link's packets leave singly for a while, and
 * longer after each further refusal: a path MTU that shrank, or an offload that was switched off, may come back.
 *
 * The traffic class (DSCP and ECN bits) is set per message of a batch, so all packets of a super-packet share one.
 *
 * Payloads are never copied here: head and payload leave as two pieces of one message.
 */
#include "wire/wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum {
    SEND_MESSAGES = 64,      /* messages per sendmmsg */
    SEGMENTS_MAX = 32,       /* packets per super-packet: 64 at most in every kernel; 32 keeps bursts short */
    SUPER_BYTES_MAX = 65000, /* an IP packet without its headers */
    RECEIVE_MESSAGES = 32,   /* messages per recvmmsg */
    GRO_BYTES = 65536,
    JUMBO_BYTES = 9216,     /* without GRO: a peer's packets may be larger than this process's */
    ECN_MASK = 3,           /* the bits of a TOS or traffic class */
    ECN_CE = 3,             /* marked by a switch */
    STEP_US = 1000,         /* a wall clock that moved by more, against the engine's, was set; .. */
    SLEW_PER_MS = 1,        /* .. a slower change, in us, is its adjustment */
    SINGLE_LEAST = 1024,    /* packets that leave singly after a refusal */
    SINGLE_MOST = 1 << 20,  /* and after many */
    BUFFER_BYTES = 8 << 20, /* socket buffers: when the receive buffer overflows, the kernel drops packets silently */
};

struct link {
    uint32_t port;
    struct sockaddr_storage address;
    socklen_t address_length;
    uint32_t single;      /* packets that leave singly from now on, before segmentation is tried again */
    uint32_t next_single; /* packets that leave alone after the next refusal; 0: it is the first one */
};

union control {
    struct cmsghdr header; /* for alignment */
    uint8_t bytes[CMSG_SPACE(sizeof(struct timespec)) + 2 * CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(uint32_t))];
};

/* The kernel stamps packets with wall-clock time; the engine uses the monotonic clock. */
struct stamps {
    uint64_t offset_us;  /* wall-clock time less the engine's */
    uint64_t looked_us;  /* when it was read */
    uint64_t drained_us; /* when the socket was last seen empty: what waits there came later */
    bool mixed;          /* the wall clock was set while packets may have waited: there are stamps of both times */
};

struct cl_wire {
    int sockets[CL_PORTS_MAX];
    sa_family_t families[CL_PORTS_MAX];
    uint32_t port_count;
    uint32_t port_first, port_last; /* the range of local ports */
    bool segmentation;
    bool dscp;
    bool coalescing[CL_PORTS_MAX];
    struct stamps stamps[CL_PORTS_MAX];
    uint32_t dropped[CL_PORTS_MAX]; /* those that had no room in the buffer, as the kernel said last */
    uint64_t overflows;             /* those of all ports */
    uint32_t slot_bytes;            /* size of one receive buffer */
    struct link *links;
    uint32_t link_count, link_capacity;
    /* receiving */
    struct mmsghdr in[RECEIVE_MESSAGES];
    struct iovec in_pieces[RECEIVE_MESSAGES];
    union control in_control[RECEIVE_MESSAGES];
    uint8_t *slots;
    /* sending */
    struct mmsghdr out[SEND_MESSAGES];
    struct iovec out_pieces[SEND_MESSAGES][2 * SEGMENTS_MAX];
    union control out_control[SEND_MESSAGES];
    size_t out_datagrams[SEND_MESSAGES];
};

static uint64_t clock_us(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

/* Wall-clock time less the engine's. A thread that is stopped between two looks at the clocks looks again. */
static uint64_t offset_us(uint64_t *now_us)
{
    enum { TRIES = 4, CLOSE_US = 20 };
    uint64_t wall_us = 0, before_us = 0;
    for (int i = 0; i < TRIES; i++) {
        before_us = clock_us(CLOCK_MONOTONIC);
        wall_us = clock_us(CLOCK_REALTIME);
        *now_us = clock_us(CLOCK_MONOTONIC);
        if (*now_us - before_us < CLOSE_US)
            break;
    }
    return wall_us - before_us;
}

/* Notes whether the wall clock was set since the last look. */
static void look_at_clocks(struct stamps *stamps)
{
    uint64_t now_us, offset = offset_us(&now_us);
    int64_t moved_us = (int64_t)(offset - stamps->offset_us);
    uint64_t most_us = STEP_US + SLEW_PER_MS * (now_us - stamps->looked_us) / 1000;
    if ((uint64_t)(moved_us < 0 ? -moved_us : moved_us) > most_us)
        stamps->mixed = true;
    stamps->offset_us = offset;
    stamps->looked_us = now_us;
}

/* The time when a packet came, on the engine's clock; 0: unknown. */
static uint64_t came_us(const struct stamps *stamps, const struct timespec *stamp)
{
    if (stamps->mixed)
        return 0;
    int64_t came = (int64_t)((uint64_t)stamp->tv_sec * 1000000u + (uint64_t)stamp->tv_nsec / 1000u - stamps->offset_us);
    return came > (int64_t)stamps->drained_us ? (uint64_t)came : stamps->drained_us;
}

static bool parse_address(const char *text, uint32_t port, struct sockaddr_storage *out, socklen_t *length)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1) {
        memcpy(out, &v4, sizeof v4);
        *length = sizeof v4;
        return true;
    }
    if (inet_pton(AF_INET6, text, &v6.sin6_addr) == 1) {
        memcpy(out, &v6, sizeof v6);
        *length = sizeof v6;
        return true;
    }
    return false;
}

static void grow_buffer(int fd, int force, int option)
{
    int bytes = BUFFER_BYTES;
    if (setsockopt(fd, SOL_SOCKET, force, &bytes, sizeof bytes) != 0) /* root may exceed the system's limit */
        setsockopt(fd, SOL_SOCKET, option, &bytes, sizeof bytes);
}

/* Binds to the first free port of the range. */
static int bind_port(const struct cl_wire *wire, int fd, const char *text)
{
    for (uint32_t port = wire->port_first; port <= wire->port_last; port++) {
        struct sockaddr_storage address;
        socklen_t length;
        if (!parse_address(text, port, &address, &length))
            return CL_EINVAL;
        if (bind(fd, (const struct sockaddr *)&address, length) == 0)
            return CL_OK;
        if (errno != EADDRINUSE || port == 0)
            return CL_ESYSTEM;
    }
    return CL_ENOPORT;
}

/* Opens the socket of a port. An error changes nothing. */
static int open_port(struct cl_wire *wire, uint32_t port, const char *text)
{
    struct sockaddr_storage address;
    socklen_t length;
    if (!parse_address(text, 0, &address, &length))
        return CL_EINVAL;
    int fd = socket(address.ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return CL_ESYSTEM;
    int status = bind_port(wire, fd, text);
    if (status != CL_OK) {
        close(fd);
        return status;
    }
    grow_buffer(fd, SO_RCVBUFFORCE, SO_RCVBUF);
    grow_buffer(fd, SO_SNDBUFFORCE, SO_SNDBUF);
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
    if (wire->dscp &&
        address.ss_family == AF_INET6) /* without dscp, packets are not ECN-capable: no switch marks them */
        setsockopt(fd, IPPROTO_IPV6, IPV6_RECVTCLASS, &on, sizeof on);
    else if (wire->dscp)
        setsockopt(fd, IPPROTO_IP, IP_RECVTOS, &on, sizeof on);
    wire->coalescing[port] = setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on) == 0;
    int off = 0; /* setting the option to 0 changes nothing, but shows whether the kernel knows it */
    if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &off, sizeof off) != 0)
        wire->segmentation = false;
    if ((address.ss_family == AF_INET6 ? setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &off, sizeof off)
                                       : setsockopt(fd, IPPROTO_IP, IP_TOS, &off, sizeof off)) != 0)
        wire->dscp = false;
    struct stamps *stamps = &wire->stamps[port];
    stamps->mixed = false;
    stamps->offset_us = offset_us(&stamps->looked_us);
    stamps->drained_us = stamps->looked_us;
    wire->dropped[port] = 0;
    wire->families[port] = address.ss_family;
    wire->sockets[port] = fd;
    return CL_OK;
}

static void udp_close(struct cl_wire *wire)
{
    for (uint32_t i = 0; i < wire->port_count; i++)
        close(wire->sockets[i]);
    free(wire->links);
    free(wire->slots);
    free(wire);
}

static int udp_open(const struct cl_wire_config *config, struct cl_wire **out)
{
    if (config->port_first > config->port_last || config->port_last > UINT16_MAX)
        return CL_EINVAL;
    struct cl_wire *wire = calloc(1, sizeof *wire);
    if (wire == NULL)
        return CL_ENOMEM;
    wire->segmentation = true;
    wire->dscp = config->dscp;
    wire->port_first = config->port_first;
    wire->port_last = config->port_last;
    int status = CL_OK;
    for (uint32_t i = 0; i < config->address_count && status == CL_OK; i++) {
        status = open_port(wire, i, config->addresses[i]);
        wire->port_count += status == CL_OK;
    }
    bool coalescing = false;
    for (uint32_t i = 0; i < wire->port_count; i++)
        coalescing |= wire->coalescing[i];
    wire->slot_bytes = coalescing || config->datagram_bytes > JUMBO_BYTES ? GRO_BYTES : JUMBO_BYTES;
    wire->slots = malloc((size_t)RECEIVE_MESSAGES * wire->slot_bytes);
    if (status == CL_OK && wire->slots == NULL)
        status = CL_ENOMEM;
    if (status != CL_OK) {
        udp_close(wire);
        return status;
    }
    for (size_t i = 0; i < RECEIVE_MESSAGES; i++) {
        wire->in_pieces[i] = (struct iovec){wire->slots + i * wire->slot_bytes, wire->slot_bytes};
        wire->in[i].msg_hdr = (struct msghdr){.msg_iov = &wire->in_pieces[i], .msg_iovlen = 1};
    }
    *out = wire;
    return CL_OK;
}

/* Receive buffers have their size from the start: a socket that coalesces where none did before must not. */
static int udp_move(struct cl_wire *wire, uint32_t port, const char *address)
{
    struct sockaddr_storage parsed;
    socklen_t length;
    if (port >= wire->port_count || !parse_address(address, 0, &parsed, &length) ||
        parsed.ss_family != wire->families[port])
        return CL_EINVAL;
    int former = wire->sockets[port];
    int status = open_port(wire, port, address);
    if (status != CL_OK)
        return status;
    int off = 0;
    if (wire->slot_bytes < GRO_BYTES)
        setsockopt(wire->sockets[port], IPPROTO_UDP, UDP_GRO, &off, sizeof off);
    close(former);
    return CL_OK;
}

static int udp_descriptor(struct cl_wire *wire, uint32_t port)
{
    return wire->sockets[port];
}

static int udp_port_number(struct cl_wire *wire, uint32_t port, uint32_t *number)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address;
    socklen_t length = sizeof address;
    if (getsockname(wire->sockets[port], &address.any, &length) != 0)
        return CL_ESYSTEM;
    *number = ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
    return CL_OK;
}

static int udp_link(struct cl_wire *wire, uint32_t port, const char *remote_address, uint32_t remote_port)
{
    if (port >= wire->port_count || remote_port == 0 || remote_port > UINT16_MAX)
        return CL_EINVAL;
    if (wire->link_count == wire->link_capacity) {
        uint32_t capacity = wire->link_capacity == 0 ? 16 : 2 * wire->link_capacity;
        struct link *links = realloc(wire->links, capacity * sizeof *links);
        if (links == NULL)
            return CL_ENOMEM;
        wire->links = links;
        wire->link_capacity = capacity;
    }
    struct link *link = &wire->links[wire->link_count];
    *link = (struct link){.port = port};
    if (!parse_address(remote_address, remote_port, &link->address, &link->address_length) ||
        link->address.ss_family != wire->families[port])
        return CL_EINVAL;
    return (int)wire->link_count++;
}

static int udp_relink(struct cl_wire *wire, uint32_t number, const char *remote_address, uint32_t remote_port)
{
    struct link *link = &wire->links[number];
    struct sockaddr_storage address;
    socklen_t length;
    if (remote_port == 0 || remote_port > UINT16_MAX ||
        !parse_address(remote_address, remote_port, &address, &length) ||
        address.ss_family != wire->families[link->port])
        return CL_EINVAL;
    link->address = address;
    link->address_length = length;
    return CL_OK;
}

/* How many datagrams from the first on can leave as one super-packet: of one link, traffic class and size; the last may
 * be shorter. */
static size_t run_length(const struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    size_t size = datagrams[0].head_length + datagrams[0].payload_length;
    size_t total = size, run = 1;
    if (!wire->segmentation || wire->links[datagrams[0].link].single > 0)
        return 1;
    while (run < count && run < SEGMENTS_MAX && datagrams[run].link == datagrams[0].link) {
        size_t next = datagrams[run].head_length + datagrams[run].payload_length;
        if (wire->dscp && datagrams[run].traffic_class != datagrams[0].traffic_class)
            break;
        if (next > size || total + next > SUPER_BYTES_MAX)
            break;
        total += next;
        run++;
        if (next < size)
            break;
    }
    return run;
}

/* Appends a control message to `message`, in the buffer of its slot. */
static void add_control(struct msghdr *message, union control *buffer, int level, int type, const void *value,
                        size_t length)
{
    size_t used = message->msg_controllen;
    message->msg_control = buffer;
    struct cmsghdr control = {.cmsg_level = level, .cmsg_type = type, .cmsg_len = CMSG_LEN(length)};
    memset(buffer->bytes + used, 0, CMSG_SPACE(length));
    memcpy(buffer->bytes + used, &control, sizeof control);
    memcpy(buffer->bytes + used + CMSG_LEN(0), value, length);
    message->msg_controllen = used + CMSG_SPACE(length);
}

static void fill_message(struct cl_wire *wire, size_t slot, const struct cl_wire_datagram *datagrams, size_t run)
{
    struct iovec *pieces = wire->out_pieces[slot];
    size_t used = 0;
    for (size_t i = 0; i < run; i++) {
        pieces[used++] = (struct iovec){(void *)(uintptr_t)datagrams[i].head, datagrams[i].head_length};
        if (datagrams[i].payload_length > 0)
            pieces[used++] = (struct iovec){(void *)(uintptr_t)datagrams[i].payload, datagrams[i].payload_length};
    }
    struct link *link = &wire->links[datagrams[0].link];
    link->single -= link->single > 0;
    struct msghdr *message = &wire->out[slot].msg_hdr;
    *message = (struct msghdr){
        .msg_name = &link->address, .msg_namelen = link->address_length, .msg_iov = pieces, .msg_iovlen = used};
    wire->out_datagrams[slot] = run;
    int traffic_class = datagrams[0].traffic_class;
    bool v6 = link->address.ss_family == AF_INET6;
    if (wire->dscp)
        add_control(message, &wire->out_control[slot], v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_TCLASS : IP_TOS,
                    &traffic_class, sizeof traffic_class);
    uint16_t size = (uint16_t)(datagrams[0].head_length + datagrams[0].payload_length);
    if (run > 1)
        add_control(message, &wire->out_control[slot], IPPROTO_UDP, UDP_SEGMENT, &size, sizeof size);
}

/* The route of the link has refused a super-packet. */
static void leave_singly(struct link *link)
{
    link->single = link->next_single > 0 ? link->next_single : SINGLE_LEAST;
    link->next_single = link->single < SINGLE_MOST ? 2 * link->single : SINGLE_MOST;
}

static size_t udp_send(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    size_t taken = 0;
    while (taken < count) {
        uint32_t port = wire->links[datagrams[taken].link].port;
        size_t filled = 0, messages = 0;
        while (messages < SEND_MESSAGES && taken + filled < count &&
               wire->links[datagrams[taken + filled].link].port == port) {
            size_t run = run_length(wire, &datagrams[taken + filled], count - taken - filled);
            fill_message(wire, messages++, &datagrams[taken + filled], run);
            filled += run;
        }
        int sent = sendmmsg(wire->sockets[port], wire->out, (unsigned)messages, 0);
        if (sent > 0) {
            for (int i = 0; i < sent; i++) {
                if (wire->out_datagrams[i] > 1)
                    wire->links[datagrams[taken].link].next_single = 0; /* it works again */
                taken += wire->out_datagrams[i];
            }
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
            return taken;
        if (wire->out_datagrams[0] > 1 && (errno == EIO || errno == EINVAL || errno == EMSGSIZE)) {
            leave_singly(&wire->links[datagrams[taken].link]);
            continue;
        }
        taken += wire->out_datagrams[0]; /* unreachable, no route, filtered: a loss like any other */
    }
    return taken;
}

static void hand_over(struct cl_wire *wire, uint32_t port, struct mmsghdr *message, cl_wire_receive_fn handle,
                      void *context)
{
    const struct stamps *stamps = &wire->stamps[port];
    size_t segment = message->msg_len;
    uint64_t received_us = 0;
    bool congested = false;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message->msg_hdr); c != NULL; c = CMSG_NXTHDR(&message->msg_hdr, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec stamp;
            memcpy(&stamp, CMSG_DATA(c), sizeof stamp);
            received_us = came_us(stamps, &stamp);
        } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL) {
            uint32_t dropped; /* since the socket was made; it may wrap */
            memcpy(&dropped, CMSG_DATA(c), sizeof dropped);
            wire->overflows += (uint32_t)(dropped - wire->dropped[port]);
            wire->dropped[port] = dropped;
        } else if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
            int size;
            memcpy(&size, CMSG_DATA(c), sizeof size);
            if (size > 0)
                segment = (size_t)size;
        } else if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS) ||
                   (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_TCLASS)) {
            /* for IPv4 a byte, for IPv6 an int; the kernel coalesces only packets with equal ones */
            uint8_t bytes[sizeof(int)] = {0};
            size_t there = c->cmsg_len - CMSG_LEN(0);
            memcpy(bytes, CMSG_DATA(c), there < sizeof bytes ? there : sizeof bytes);
            congested = ((bytes[0] | bytes[sizeof bytes - 1]) & ECN_MASK) == ECN_CE;
        }
    }
    const uint8_t *bytes = message->msg_hdr.msg_iov->iov_base;
    for (size_t at = 0; at < message->msg_len; at += segment) {
        size_t left = message->msg_len - at;
        handle(context, bytes + at, left < segment ? left : segment, congested, received_us);
    }
}

static bool udp_receive(struct cl_wire *wire, uint32_t port, cl_wire_receive_fn handle, void *context)
{
    for (size_t i = 0; i < RECEIVE_MESSAGES; i++) {
        wire->in[i].msg_hdr.msg_control = &wire->in_control[i];
        wire->in[i].msg_hdr.msg_controllen = sizeof wire->in_control[i];
    }
    struct stamps *stamps = &wire->stamps[port];
    uint64_t began_us = clock_us(CLOCK_MONOTONIC);
    int count = recvmmsg(wire->sockets[port], wire->in, RECEIVE_MESSAGES, MSG_DONTWAIT, NULL);
    if (count < 0 && errno != EAGAIN)
        return false;
    look_at_clocks(stamps);
    for (int i = 0; i < count; i++)
        if ((wire->in[i].msg_hdr.msg_flags & MSG_TRUNC) == 0)
            hand_over(wire, port, &wire->in[i], handle, context);
    if (count == RECEIVE_MESSAGES)
        return true;
    stamps->drained_us = began_us;
    stamps->mixed = false;
    return false;
}

static uint64_t udp_overflows(const struct cl_wire *wire)
{
    return wire->overflows;
}

const struct cl_wire_type cl_wire_udp = {
    .name = "udp",
    .open = udp_open,
    .close = udp_close,
    .descriptor = udp_descriptor,
    .port_number = udp_port_number,
    .link = udp_link,
    .move = udp_move,
    .relink = udp_relink,
    .send = udp_send,
    .receive = udp_receive,
    .overflows = udp_overflows,
};
