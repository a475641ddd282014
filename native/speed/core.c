/*
 * Core: what a packet costs the protocol, without sockets. One endpoint, the hub, exchanges messages with many peers in
 * virtual time, over a port of 10 Gbit/s in each direction, 50 us from everybody; only the hub's own calls count.
 *
 *   core PEERS [MESSAGE_BYTES [DATAGRAM_BYTES [PACKETS]]]
 *
 * Prints what does not depend on the machine (packets per acknowledgement, packets per run, the virtual rate), and the
 * hub's CPU time per packet, of which half were sent and half received. Exact, in instructions:
 *   valgrind --tool=callgrind --toggle-collect=hub_turn --toggle-collect=hub_receive build/test/speed/core 124
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "protocol/endpoint.h"

enum {
    DELAY_US = 50,
    TURN_US = 10, /* the hub takes a turn so often */
    GBIT_PER_S = 10,
    OVERHEAD_BYTES = 42,
    BATCH = 64,
    BATCHES = 8,   /* as the engine */
    IN_FLIGHT = 4, /* messages with each peer, in each direction */
    FLIGHT_MAX = 1 << 16,
};

struct flight {
    uint64_t at_ns;
    uint16_t peer;
    uint32_t length;
    uint8_t *bytes;
};

/* Datagrams on their way through the port, in one direction: a ring. */
struct pipe {
    struct flight *ring;
    uint64_t first, next, free_ns;
};

static struct cl_endpoint *hub, **peers;
static struct pipe out, in;
static struct cl_datagram *batch;
static uint8_t *source, *target;
static uint32_t peer_count, message_bytes, datagram_bytes;
static uint64_t now_us = 1000000, hub_ns, runs, sent_datagrams;

static uint64_t cpu_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void put(struct pipe *pipe, uint16_t peer, const struct cl_datagram *datagram)
{
    struct flight *flight = &pipe->ring[pipe->next++ % FLIGHT_MAX];
    if (flight->bytes == NULL)
        flight->bytes = malloc(datagram_bytes);
    flight->peer = peer;
    flight->length = datagram->head_length + datagram->payload_length;
    memcpy(flight->bytes, datagram->head, datagram->head_length);
    if (datagram->payload_length)
        memcpy(flight->bytes + datagram->head_length, datagram->payload, datagram->payload_length);
    uint64_t from_ns = pipe->free_ns > now_us * 1000 ? pipe->free_ns : now_us * 1000;
    pipe->free_ns = from_ns + (flight->length + OVERHEAD_BYTES) * 8 / GBIT_PER_S;
    flight->at_ns = pipe->free_ns + DELAY_US * 1000;
}

static const struct flight *take(struct pipe *pipe)
{
    if (pipe->first == pipe->next || pipe->ring[pipe->first % FLIGHT_MAX].at_ns > now_us * 1000)
        return NULL;
    return &pipe->ring[pipe->first++ % FLIGHT_MAX];
}

__attribute__((noinline)) static size_t hub_turn(bool first)
{
    if (first && cl_endpoint_next_timeout(hub) <= now_us)
        cl_endpoint_timeout(hub, now_us);
    return cl_endpoint_send(hub, now_us, batch, BATCH);
}

__attribute__((noinline)) static void hub_receive(const struct flight *flight)
{
    cl_endpoint_receive(hub, flight->bytes, flight->length, false, flight->at_ns / 1000, now_us);
}

static void post(struct cl_endpoint *from, uint16_t from_id, struct cl_endpoint *to, uint16_t to_id, uint32_t sequence)
{
    struct cl_qos qos = {.priority = 4};
    struct cl_message_id id = {1, sequence, 0};
    struct cl_sink sink = {.target = target};
    if (cl_endpoint_post_receive(to, from_id, id, sink, message_bytes, &qos, now_us, NULL) != CL_OK ||
        cl_endpoint_post_send(from, to_id, id, source, message_bytes, &qos, now_us, NULL) != CL_OK)
        abort();
}

static void step(void)
{
    const struct flight *flight;
    uint64_t before = cpu_ns();
    while ((flight = take(&in)) != NULL)
        hub_receive(flight);
    for (int i = 0; i < BATCHES; i++) {
        size_t count = hub_turn(i == 0);
        hub_ns += cpu_ns() - before;
        uint32_t length = 0;
        for (size_t j = 0; j < count; j++) {
            uint32_t own = batch[j].head_length + batch[j].payload_length;
            runs += j == 0 || batch[j].peer != batch[j - 1].peer || own > length;
            length = own;
            put(&out, batch[j].peer, &batch[j]);
        }
        sent_datagrams += count;
        before = cpu_ns();
        if (!count)
            break;
    }
    while ((flight = take(&out)) != NULL)
        cl_endpoint_receive(peers[flight->peer], flight->bytes, flight->length, false, flight->at_ns / 1000, now_us);
    for (uint32_t i = 1; i <= peer_count; i++) {
        if (cl_endpoint_next_timeout(peers[i]) <= now_us)
            cl_endpoint_timeout(peers[i], now_us);
        for (size_t count; (count = cl_endpoint_send(peers[i], now_us, batch, BATCH)) > 0;)
            for (size_t j = 0; j < count; j++)
                put(&in, (uint16_t)i, &batch[j]);
    }
    now_us += TURN_US;
}

int main(int count, char **arguments)
{
    peer_count = count > 1 ? (uint32_t)atoi(arguments[1]) : 3;
    message_bytes = count > 2 ? (uint32_t)atoi(arguments[2]) : 64 << 10;
    datagram_bytes = count > 3 ? (uint32_t)atoi(arguments[3]) : 1472;
    uint64_t wanted = count > 4 ? (uint64_t)atoll(arguments[4]) : 100000;
    peers = calloc(peer_count + 1, sizeof(struct cl_endpoint *));
    struct cl_endpoint_config config = {
        .job = 7, .epoch = 1, .datagram_bytes = datagram_bytes, .unexpected_limit_bytes = 1 << 20};
    batch = calloc(BATCH, sizeof *batch);
    out.ring = calloc(FLIGHT_MAX, sizeof(struct flight));
    in.ring = calloc(FLIGHT_MAX, sizeof(struct flight));
    source = calloc(1, message_bytes);
    target = calloc(1, message_bytes);
    if (cl_endpoint_create(&config, &hub) != CL_OK)
        return 1;
    for (uint32_t i = 1; i <= peer_count; i++) {
        config.self = (uint16_t)i;
        if (cl_endpoint_create(&config, &peers[i]) != CL_OK || cl_endpoint_add_peer(peers[i], 0, 1, NULL) != CL_OK ||
            cl_endpoint_add_peer(hub, (uint16_t)i, 1, NULL) != CL_OK)
            return 1;
    }
    uint32_t *next = calloc(peer_count + 1, sizeof *next), *done = calloc(peer_count + 1, sizeof *done);
    uint64_t bytes = 0, start_us = 0, start_ns = 0;
    struct cl_engine_stats at_start = {0};
    for (uint64_t packets = 0; packets < 2 * wanted;) {
        for (uint32_t i = 1; i <= peer_count; i++) {
            struct cl_completion completion;
            while (cl_endpoint_next_completion(peers[i], &completion))
                done[i]++;
            for (; 2 * next[i] < done[i] + 2 * IN_FLIGHT; next[i]++) {
                post(hub, 0, peers[i], (uint16_t)i, 2 * next[i]);
                post(peers[i], (uint16_t)i, hub, 0, 2 * next[i] + 1);
            }
        }
        struct cl_completion completion;
        while (cl_endpoint_next_completion(hub, &completion))
            ;
        step();
        const struct cl_engine_stats *stats = cl_endpoint_stats(hub);
        packets = stats->packets_sent - stats->acks_sent;
        if (!start_us && packets >= wanted) { /* warm */
            at_start = *stats;
            start_us = now_us;
            start_ns = hub_ns;
            runs = sent_datagrams = 0;
            bytes = stats->payload_bytes_sent;
        }
    }
    const struct cl_engine_stats *stats = cl_endpoint_stats(hub);
    double sent = (double)(stats->packets_sent - at_start.packets_sent - (stats->acks_sent - at_start.acks_sent));
    double received =
        (double)(stats->packets_received - at_start.packets_received - (stats->acks_received - at_start.acks_received));
    printf("%4u peers, messages of %u, datagrams of %u: %.0f ns per packet, %.2f Gbit/s out, packets per ack %.1f out "
           "%.1f in, %.1f datagrams per run, lost %.0f\n",
           peer_count, message_bytes, datagram_bytes, (double)(hub_ns - start_ns) / (sent + received),
           (double)(stats->payload_bytes_sent - bytes) * 8 / ((double)(now_us - start_us) * 1000),
           sent / (double)(stats->acks_received - at_start.acks_received),
           received / (double)(stats->acks_sent - at_start.acks_sent), (double)sent_datagrams / (double)runs,
           (double)(stats->packets_lost - at_start.packets_lost));
    return 0;
}
