#include "tests/mem_wire.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { MAILBOXES = 256, SLOTS = 4096, BATCH = 64, LINKS = 1024 };

struct letter {
    size_t length;
    uint8_t *bytes;
};

struct mailbox {
    int event_fd; /* readable while letters wait */
    size_t head, count;
    struct letter letters[SLOTS];
};

struct cl_wire {
    uint32_t ports[CL_PORTS_MAX];
    uint32_t port_count;
    uint32_t links[LINKS];
    uint32_t link_count;
    double loss;
    uint64_t random;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mailbox *mailboxes[MAILBOXES];
static double loss;

/* 0 to 1, by splitmix64. */
static double draw(uint64_t *state)
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static void mem_close(struct cl_wire *wire)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < wire->port_count; i++) {
        struct mailbox *box = mailboxes[wire->ports[i]];
        mailboxes[wire->ports[i]] = NULL;
        for (size_t j = 0; j < box->count; j++)
            free(box->letters[(box->head + j) % SLOTS].bytes);
        close(box->event_fd);
        free(box);
    }
    pthread_mutex_unlock(&lock);
    free(wire);
}

static int open_port(struct cl_wire *wire)
{
    struct mailbox *box = calloc(1, sizeof *box);
    if (box == NULL)
        return CL_ENOMEM;
    box->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (box->event_fd < 0) {
        free(box);
        return CL_ESYSTEM;
    }
    for (uint32_t i = 0; i < MAILBOXES; i++) {
        if (mailboxes[i] == NULL) {
            mailboxes[i] = box;
            wire->ports[wire->port_count++] = i;
            return CL_OK;
        }
    }
    close(box->event_fd);
    free(box);
    return CL_ENOMEM;
}

static int mem_open(const struct cl_wire_config *config, struct cl_wire **out)
{
    struct cl_wire *wire = calloc(1, sizeof *wire);
    if (wire == NULL)
        return CL_ENOMEM;
    int status = CL_OK;
    pthread_mutex_lock(&lock);
    wire->loss = loss;
    for (uint32_t i = 0; i < config->address_count && status == CL_OK; i++)
        status = open_port(wire);
    wire->random = wire->port_count > 0 ? wire->ports[0] : 0;
    pthread_mutex_unlock(&lock);
    if (status != CL_OK) {
        mem_close(wire);
        return status;
    }
    *out = wire;
    return CL_OK;
}

static int mem_descriptor(struct cl_wire *wire, uint32_t port)
{
    return mailboxes[wire->ports[port]]->event_fd;
}

static int mem_port_number(struct cl_wire *wire, uint32_t port, uint32_t *number)
{
    *number = wire->ports[port];
    return CL_OK;
}

static int mem_link(struct cl_wire *wire, uint32_t port, const char *remote_address, uint32_t remote_port)
{
    (void)port;
    (void)remote_address;
    if (remote_port >= MAILBOXES || wire->link_count == LINKS)
        return CL_EINVAL;
    wire->links[wire->link_count] = remote_port;
    return (int)wire->link_count++;
}

static void put(struct mailbox *box, const struct cl_wire_datagram *datagram)
{
    if (box->count == SLOTS)
        return; /* full: lost, as a switch would */
    size_t length = datagram->head_length + datagram->payload_length;
    uint8_t *bytes = malloc(length);
    if (bytes == NULL)
        return;
    memcpy(bytes, datagram->head, datagram->head_length);
    if (datagram->payload_length > 0)
        memcpy(bytes + datagram->head_length, datagram->payload, datagram->payload_length);
    box->letters[(box->head + box->count++) % SLOTS] = (struct letter){length, bytes};
    eventfd_write(box->event_fd, 1);
}

static size_t mem_send(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        struct mailbox *box = mailboxes[wire->links[datagrams[i].link]];
        if (box != NULL && draw(&wire->random) >= wire->loss)
            put(box, &datagrams[i]);
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static bool mem_receive(struct cl_wire *wire, uint32_t port, cl_wire_receive_fn handle, void *context)
{
    struct letter batch[BATCH];
    size_t count = 0;
    pthread_mutex_lock(&lock);
    struct mailbox *box = mailboxes[wire->ports[port]];
    while (box->count > 0 && count < BATCH) {
        batch[count++] = box->letters[box->head];
        box->head = (box->head + 1) % SLOTS;
        box->count--;
    }
    if (box->count == 0) {
        eventfd_t ignored;
        eventfd_read(box->event_fd, &ignored);
    }
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < count; i++) {
        handle(context, batch[i].bytes, batch[i].length, false, 0);
        free(batch[i].bytes);
    }
    return count == BATCH;
}

void mem_wire_lose(double share)
{
    pthread_mutex_lock(&lock);
    loss = share;
    pthread_mutex_unlock(&lock);
}

const struct cl_wire_type mem_wire = {
    .name = "mem",
    .open = mem_open,
    .close = mem_close,
    .descriptor = mem_descriptor,
    .port_number = mem_port_number,
    .link = mem_link,
    .send = mem_send,
    .receive = mem_receive,
};
