/*
 * ofi: datagrams over libfabric's FI_EP_DGRAM endpoints, for networks whose fast way is not a socket: verbs (UD), efa.
 * Experimental: it has not met such hardware yet. The tests use the provider `udp`, which runs on any host.
 *
 * libfabric is loaded when the first wire opens, so commlayer installs and runs without it; without its headers, this
 * file compiles to a stub. Each port has a domain of its own. Head and payload are copied into slots that are
 * registered once: providers for real hardware want registered memory, and a datagram must not change after `send`.
 */
#include "wire/wire.h"

#if defined(__has_include)
#if __has_include(<rdma/fabric.h>)
#define CL_OFI_HEADERS 1
#endif
#endif

#ifdef CL_OFI_HEADERS

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

enum {
    SLOTS_MAX = 1024, /* slots in each direction, if the provider takes that many */
    BATCH = 64,
    JUMBO_BYTES = 9216, /* a peer's packets may be larger than this process's */
    NAME_BYTES = 96,    /* a provider's address: 16 (udp) to 48 (verbs) */
    FULL_NS = 200000,   /* the time until it looks again without room for sending */
    BLIND_NS = 50000,   /* the time until it looks again without a descriptor to sleep on */
    NOW_NS = 1,
};

struct slot {
    struct fi_context2 context; /* must be first: providers may use it */
    uint8_t *bytes;
};

/* A stack of slots that the provider does not hold. */
struct stack {
    struct slot **slots;
    size_t count;
};

struct port {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *peers;
    struct fid_cq *received, *sent;
    struct fid_ep *endpoint;
    struct fid_mr *registered;
    void *descriptor; /* the descriptor of the registered memory */
    uint8_t *memory;
    struct slot *slots;
    struct stack idle, unposted; /* slots to send from; to receive into */
    size_t prefix_bytes;         /* the provider's, before each datagram */
    size_t slot_bytes;
    int poll_fd;  /* polls readable when timer_fd or wait_fd does */
    int timer_fd; /* a timer for providers that cannot wake the engine thread */
    int wait_fd;  /* the provider's, -1: none */
};

struct link {
    uint32_t port;
    fi_addr_t address;
};

struct cl_wire {
    struct port ports[CL_PORTS_MAX];
    uint32_t port_count;
    uint32_t datagram_limit;
    struct link *links;
    uint32_t link_count, link_capacity;
};

/* ---- the library ---- */

static struct {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
} library;

static bool library_loaded;
static pthread_once_t library_once = PTHREAD_ONCE_INIT;

static bool find(void *handle, const char *name, void *function)
{
    void *symbol = dlsym(handle, name);
    memcpy(function, &symbol, sizeof symbol); /* C has no cast from an object to a function */
    return symbol != NULL;
}

static void load(void)
{
    void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL); /* never closed: providers may have threads */
    library_loaded = handle != NULL && find(handle, "fi_getinfo", &library.getinfo) &&
                     find(handle, "fi_freeinfo", &library.freeinfo) && find(handle, "fi_dupinfo", &library.dupinfo) &&
                     find(handle, "fi_fabric", &library.fabric);
}

/* ---- a port ---- */

/* The device with this address, if the provider knows such addresses; else (efa) the n-th device. */
static int find_device(const char *provider, const char *address, uint32_t number, struct fi_info **out)
{
    struct fi_info *hints = library.dupinfo(NULL), *all = NULL;
    if (hints == NULL)
        return CL_ENOMEM;
    hints->caps = FI_MSG | FI_SEND | FI_RECV;
    hints->mode = FI_MSG_PREFIX | FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_DGRAM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR;
    if (provider != NULL && provider[0] != '\0')
        hints->fabric_attr->prov_name = strdup(provider);
    uint32_t skip = 0;
    int status = library.getinfo(FI_VERSION(1, 9), address, NULL, FI_SOURCE, hints, &all);
    if (status != 0) {
        status = library.getinfo(FI_VERSION(1, 9), NULL, NULL, 0, hints, &all);
        if (status == 0 && all->addr_format != FI_SOCKADDR_IN && all->addr_format != FI_SOCKADDR_IN6)
            skip = number;
        else if (status == 0)
            status = -FI_ENODATA; /* the provider knows IP addresses, but not this one */
    }
    library.freeinfo(hints);
    struct fi_info *chosen = all;
    while (status == 0 && skip > 0 && chosen != NULL) {
        const char *domain = chosen->domain_attr->name;
        while (chosen != NULL && strcmp(chosen->domain_attr->name, domain) == 0)
            chosen = chosen->next;
        skip--;
    }
    *out = status == 0 && chosen != NULL ? library.dupinfo(chosen) : NULL;
    if (all != NULL)
        library.freeinfo(all);
    return *out != NULL ? CL_OK : CL_ENODEVICE;
}

static int open_queue(struct port *port, size_t size, bool waits, struct fid_cq **queue)
{
    struct fi_cq_attr attr = {.size = size, .format = FI_CQ_FORMAT_MSG, .wait_obj = waits ? FI_WAIT_FD : FI_WAIT_NONE};
    return fi_cq_open(port->domain, &attr, queue, NULL);
}

static int allocate(struct port *port, size_t receives, size_t sends)
{
    size_t count = receives + sends;
    port->memory = calloc(count, port->slot_bytes);
    port->slots = calloc(count, sizeof *port->slots);
    port->unposted.slots = calloc(receives, sizeof(struct slot *));
    port->idle.slots = calloc(sends, sizeof(struct slot *));
    if (port->memory == NULL || port->slots == NULL || port->unposted.slots == NULL || port->idle.slots == NULL)
        return CL_ENOMEM;
    for (size_t i = 0; i < count; i++) {
        struct stack *stack = i < receives ? &port->unposted : &port->idle;
        port->slots[i].bytes = port->memory + i * port->slot_bytes;
        stack->slots[stack->count++] = &port->slots[i];
    }
    if ((port->info->domain_attr->mr_mode & FI_MR_LOCAL) == 0)
        return CL_OK;
    if (fi_mr_reg(port->domain, port->memory, count * port->slot_bytes, FI_SEND | FI_RECV, 0, 0, 0, &port->registered,
                  NULL) != 0)
        return CL_ESYSTEM;
    port->descriptor = fi_mr_desc(port->registered);
    return CL_OK;
}

static void post(struct port *port)
{
    struct stack *unposted = &port->unposted;
    while (unposted->count > 0) {
        struct slot *slot = unposted->slots[unposted->count - 1];
        if (fi_recv(port->endpoint, slot->bytes, port->slot_bytes, port->descriptor, FI_ADDR_UNSPEC, &slot->context) !=
            0)
            return; /* no room: tried again after the next receive */
        unposted->count--;
    }
}

static int watch(struct port *port)
{
    struct epoll_event event = {.events = EPOLLIN};
    port->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    port->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (port->poll_fd < 0 || port->timer_fd < 0 || epoll_ctl(port->poll_fd, EPOLL_CTL_ADD, port->timer_fd, &event) != 0)
        return CL_ESYSTEM;
    if (port->wait_fd >= 0 && epoll_ctl(port->poll_fd, EPOLL_CTL_ADD, port->wait_fd, &event) != 0)
        return CL_ESYSTEM;
    return CL_OK;
}

static size_t smaller(size_t one, size_t other)
{
    return one < other ? one : other;
}

static int open_port(struct cl_wire *wire, const struct cl_wire_config *config, uint32_t number)
{
    struct port *port = &wire->ports[wire->port_count++];
    port->poll_fd = port->timer_fd = port->wait_fd = -1;
    int status = find_device(config->provider, config->addresses[number], number, &port->info);
    if (status != CL_OK)
        return status;
    struct fi_info *info = port->info;
    port->prefix_bytes = (info->mode & FI_MSG_PREFIX) != 0 ? info->ep_attr->msg_prefix_size : 0;
    size_t limit = info->ep_attr->max_msg_size; /* with the prefix */
    if (limit <= port->prefix_bytes)
        return CL_ENODEVICE;
    size_t payload = smaller(limit - port->prefix_bytes, JUMBO_BYTES);
    port->slot_bytes = (port->prefix_bytes + payload + 63) & ~(size_t)63;
    wire->datagram_limit = (uint32_t)smaller(wire->datagram_limit, payload);
    size_t receives = smaller(info->rx_attr->size, SLOTS_MAX), sends = smaller(info->tx_attr->size, SLOTS_MAX);
    struct fi_av_attr av = {.type = info->domain_attr->av_type, .count = 64};
    if (library.fabric(info->fabric_attr, &port->fabric, NULL) != 0 ||
        fi_domain(port->fabric, info, &port->domain, NULL) != 0 ||
        fi_av_open(port->domain, &av, &port->peers, NULL) != 0)
        return CL_ENODEVICE;
    if (open_queue(port, receives, true, &port->received) == 0) {
        if (fi_control(&port->received->fid, FI_GETWAIT, &port->wait_fd) != 0)
            port->wait_fd = -1;
    } else if (open_queue(port, receives, false, &port->received) != 0) {
        return CL_ENODEVICE;
    }
    if (open_queue(port, sends, false, &port->sent) != 0 ||
        fi_endpoint(port->domain, info, &port->endpoint, NULL) != 0 ||
        fi_ep_bind(port->endpoint, &port->peers->fid, 0) != 0 ||
        fi_ep_bind(port->endpoint, &port->received->fid, FI_RECV) != 0 ||
        fi_ep_bind(port->endpoint, &port->sent->fid, FI_TRANSMIT) != 0 || fi_enable(port->endpoint) != 0)
        return CL_ENODEVICE;
    status = allocate(port, receives, sends);
    if (status != CL_OK)
        return status;
    post(port);
    return watch(port);
}

static void close_fid(struct fid *fid)
{
    if (fid != NULL)
        fi_close(fid);
}

static void close_port(struct port *port)
{
    if (port->poll_fd >= 0)
        close(port->poll_fd);
    if (port->timer_fd >= 0)
        close(port->timer_fd);
    /* from the users to the used */
    close_fid(port->endpoint != NULL ? &port->endpoint->fid : NULL);
    close_fid(port->registered != NULL ? &port->registered->fid : NULL);
    close_fid(port->sent != NULL ? &port->sent->fid : NULL);
    close_fid(port->received != NULL ? &port->received->fid : NULL);
    close_fid(port->peers != NULL ? &port->peers->fid : NULL);
    close_fid(port->domain != NULL ? &port->domain->fid : NULL);
    close_fid(port->fabric != NULL ? &port->fabric->fid : NULL);
    if (port->info != NULL)
        library.freeinfo(port->info);
    free(port->idle.slots);
    free(port->unposted.slots);
    free(port->slots);
    free(port->memory);
}

static void arm(struct port *port, long nanoseconds)
{
    struct itimerspec once = {.it_value = {.tv_nsec = nanoseconds}};
    timerfd_settime(port->timer_fd, 0, &once, NULL);
}

/* ---- the wire ---- */

static void ofi_close(struct cl_wire *wire)
{
    for (uint32_t i = 0; i < wire->port_count; i++)
        close_port(&wire->ports[i]);
    free(wire->links);
    free(wire);
}

static int ofi_open(const struct cl_wire_config *config, struct cl_wire **out)
{
    pthread_once(&library_once, load);
    if (!library_loaded)
        return CL_ENOLIBFABRIC;
    struct cl_wire *wire = calloc(1, sizeof *wire);
    if (wire == NULL)
        return CL_ENOMEM;
    wire->datagram_limit = JUMBO_BYTES;
    int status = CL_OK;
    for (uint32_t i = 0; i < config->address_count && status == CL_OK; i++)
        status = open_port(wire, config, i);
    if (status != CL_OK) {
        ofi_close(wire);
        return status;
    }
    *out = wire;
    return CL_OK;
}

static int ofi_descriptor(struct cl_wire *wire, uint32_t number)
{
    struct port *port = &wire->ports[number];
    struct fid *queue = &port->received->fid;
    if (port->wait_fd < 0)
        arm(port, BLIND_NS);
    else if (fi_trywait(port->fabric, &queue, 1) != 0)
        arm(port, NOW_NS); /* datagrams are there already; the descriptor would not poll readable */
    return port->poll_fd;
}

static int ofi_port_number(struct cl_wire *wire, uint32_t port, uint32_t *number)
{
    (void)wire;
    (void)port;
    *number = 0; /* the address includes the port number */
    return CL_OK;
}

static int ofi_address(struct cl_wire *wire, uint32_t port, char *text, size_t size)
{
    uint8_t name[NAME_BYTES];
    size_t length = sizeof name;
    if (fi_getname(&wire->ports[port].endpoint->fid, name, &length) != 0 || size < 2 * length + 1)
        return CL_ESYSTEM;
    for (size_t i = 0; i < length; i++)
        snprintf(text + 2 * i, 3, "%02x", name[i]);
    return CL_OK;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int ofi_link(struct cl_wire *wire, uint32_t number, const char *remote_address, uint32_t remote_port)
{
    (void)remote_port;
    if (number >= wire->port_count)
        return CL_EINVAL;
    struct port *port = &wire->ports[number];
    uint8_t own[NAME_BYTES], name[NAME_BYTES];
    size_t length = sizeof own, digits = strlen(remote_address);
    if (fi_getname(&port->endpoint->fid, own, &length) != 0 || digits != 2 * length)
        return CL_EINVAL; /* all addresses of a provider have one size */
    for (size_t i = 0; i < length; i++) {
        int high = digit(remote_address[2 * i]), low = digit(remote_address[2 * i + 1]);
        if (high < 0 || low < 0)
            return CL_EINVAL;
        name[i] = (uint8_t)(high << 4 | low);
    }
    if (wire->link_count == wire->link_capacity) {
        uint32_t capacity = wire->link_capacity == 0 ? 16 : 2 * wire->link_capacity;
        struct link *links = realloc(wire->links, capacity * sizeof *links);
        if (links == NULL)
            return CL_ENOMEM;
        wire->links = links;
        wire->link_capacity = capacity;
    }
    struct link *link = &wire->links[wire->link_count];
    link->port = number;
    if (fi_av_insert(port->peers, name, 1, &link->address, 0, NULL) != 1)
        return CL_EINVAL;
    return (int)wire->link_count++;
}

/* The slot of a failed operation; NULL when the provider does not tell. */
static struct slot *failed(struct fid_cq *queue)
{
    struct fi_cq_err_entry error = {0};
    return fi_cq_readerr(queue, &error, 0) == 1 ? error.op_context : NULL;
}

static void reap(struct port *port)
{
    struct fi_cq_msg_entry done[BATCH];
    for (;;) {
        ssize_t count = fi_cq_read(port->sent, done, BATCH);
        if (count == -FI_EAVAIL) { /* lost, like any other packet */
            struct slot *slot = failed(port->sent);
            if (slot == NULL)
                return;
            port->idle.slots[port->idle.count++] = slot;
            continue;
        }
        if (count <= 0)
            return;
        for (ssize_t i = 0; i < count; i++)
            port->idle.slots[port->idle.count++] = done[i].op_context;
    }
}

static size_t ofi_send(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    for (uint32_t i = 0; i < wire->port_count; i++)
        reap(&wire->ports[i]);
    for (size_t taken = 0; taken < count; taken++) {
        const struct cl_wire_datagram *datagram = &datagrams[taken];
        const struct link *link = &wire->links[datagram->link];
        struct port *port = &wire->ports[link->port];
        size_t length = (size_t)datagram->head_length + datagram->payload_length;
        if (length > wire->datagram_limit)
            continue; /* a datagram too large for a packet is lost */
        if (port->idle.count == 0)
            reap(port);
        if (port->idle.count == 0) {
            arm(port, FULL_NS);
            return taken;
        }
        struct slot *slot = port->idle.slots[--port->idle.count];
        uint8_t *bytes = slot->bytes + port->prefix_bytes;
        memcpy(bytes, datagram->head, datagram->head_length);
        if (datagram->payload_length > 0)
            memcpy(bytes + datagram->head_length, datagram->payload, datagram->payload_length);
        ssize_t status = fi_send(port->endpoint, slot->bytes, port->prefix_bytes + length, port->descriptor,
                                 link->address, &slot->context);
        if (status == 0)
            continue;
        port->idle.slots[port->idle.count++] = slot;
        if (status == -FI_EAGAIN) {
            arm(port, FULL_NS);
            return taken;
        }
        /* any other refusal: lost like any other packet */
    }
    return count;
}

static bool ofi_receive(struct cl_wire *wire, uint32_t number, cl_wire_receive_fn handle, void *context)
{
    struct port *port = &wire->ports[number];
    struct fi_cq_msg_entry arrived[BATCH];
    uint64_t expirations;
    ssize_t drained = read(port->timer_fd, &expirations, sizeof expirations);
    (void)drained;
    ssize_t count = fi_cq_read(port->received, arrived, BATCH);
    if (count == -FI_EAVAIL) {
        struct slot *slot = failed(port->received); /* too long for a slot, or damaged: lost */
        if (slot != NULL)
            port->unposted.slots[port->unposted.count++] = slot;
        post(port);
        return slot != NULL;
    }
    for (ssize_t i = 0; i < count; i++) {
        struct slot *slot = arrived[i].op_context;
        if (arrived[i].len >= port->prefix_bytes)
            handle(context, slot->bytes + port->prefix_bytes, arrived[i].len - port->prefix_bytes, false, 0);
        port->unposted.slots[port->unposted.count++] = slot;
    }
    post(port);
    return count == BATCH;
}

static uint32_t ofi_datagram_limit(struct cl_wire *wire)
{
    return wire->datagram_limit;
}

const struct cl_wire_type cl_wire_ofi = {
    .name = "ofi",
    .open = ofi_open,
    .close = ofi_close,
    .descriptor = ofi_descriptor,
    .port_number = ofi_port_number,
    .address = ofi_address,
    .datagram_limit = ofi_datagram_limit,
    .link = ofi_link,
    .send = ofi_send,
    .receive = ofi_receive,
};

#else

static int ofi_open(const struct cl_wire_config *config, struct cl_wire **out)
{
    (void)config;
    (void)out;
    return CL_ENOLIBFABRIC;
}

const struct cl_wire_type cl_wire_ofi = {.name = "ofi", .open = ofi_open};

#endif
