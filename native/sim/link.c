#include "sim/link.h"

#include "sim/network.h"

static void arrive(struct sim_event *event)
{
    sim_network_forward((struct sim_datagram *)(void *)event); /* the event is its first member */
}

static void propagate(struct sim_link *link, struct sim_datagram *datagram, bool may_overtake)
{
    struct sim_network *network = link->network;
    uint64_t at_ns = network->clock->now_ns + link->delay_ns;
    if (link->jitter_ns > 0)
        at_ns += sim_random_below(&network->random, link->jitter_ns);
    if (may_overtake || sim_random_chance(&network->random, link->noise.reorder)) {
        network->counts.reordered++;
        at_ns += sim_random_below(&network->random, link->noise.reorder_ns);
    } else {
        at_ns = at_ns < link->last_arrival_ns ? link->last_arrival_ns : at_ns;
        link->last_arrival_ns = at_ns;
    }
    datagram->event.fire = arrive;
    if (at_ns > network->clock->now_ns)
        sim_clock_schedule(network->clock, &datagram->event, at_ns);
    else
        sim_network_forward(datagram);
}

/* The datagram has left the queue and is on the cable. */
static void emit(struct sim_link *link, struct sim_datagram *datagram)
{
    struct sim_network *network = link->network;
    if (link->down > 0) {
        sim_network_lose(network, datagram, SIM_LOST_DOWN, link->name);
        return;
    }
    if (sim_noise_loses(&link->noise, &network->random, network->clock->now_ns)) {
        sim_network_lose(network, datagram, SIM_LOST_NOISE, link->name);
        return;
    }
    if (sim_random_chance(&network->random, link->noise.corrupt)) {
        if (sim_random_chance(&network->random, 0.5)) {
            sim_network_lose(network, datagram, SIM_LOST_CHECKSUM, link->name);
            return;
        }
        network->counts.corrupted++;
        sim_noise_flip(&link->noise, &network->random, datagram->bytes, datagram->length);
    }
    if (sim_random_chance(&network->random, link->noise.duplicate)) {
        network->counts.duplicated++;
        propagate(link, sim_pool_copy(&network->pool, datagram), link->noise.reorder_ns > 0);
    }
    propagate(link, datagram, false);
}

static void start(struct sim_link *link);

static void end_transmission(struct sim_event *event)
{
    struct sim_link *link = (struct sim_link *)(void *)event; /* the event is its first member */
    struct sim_datagram *datagram = link->sending;
    link->sending = NULL;
    start(link);
    emit(link, datagram);
}

static void start(struct sim_link *link)
{
    struct sim_datagram *datagram = sim_queue_pop(&link->queue);
    if (datagram == NULL)
        return;
    struct sim_clock *clock = link->network->clock;
    double bytes = datagram->length + link->queue.overhead_bytes;
    link->sending = datagram;
    link->event.fire = end_transmission;
    sim_clock_schedule(clock, &link->event, clock->now_ns + (uint64_t)(bytes * link->ns_per_byte * link->slowdown));
}

void sim_link_send(struct sim_link *link, struct sim_datagram *datagram)
{
    if (link->ns_per_byte <= 0) {
        emit(link, datagram);
        return;
    }
    if (!sim_queue_push(&link->queue, datagram)) {
        sim_network_lose(link->network, datagram, SIM_LOST_QUEUE, link->name);
        return;
    }
    if (link->sending == NULL)
        start(link);
}
