#include "sim/link.h"

/* The datagram has passed its current link. */
static void forward(struct sim_datagram *datagram)
{
    struct sim_medium *medium = datagram->route[datagram->hop]->medium;
    if (++datagram->hop < datagram->hops)
        sim_link_send(datagram->route[datagram->hop], datagram);
    else
        medium->deliver(medium->context, datagram);
}

static void arrive(struct sim_event *event)
{
    forward((struct sim_datagram *)(void *)event); /* the event is its first member */
}

static void propagate(struct sim_link *link, struct sim_datagram *datagram, bool may_overtake)
{
    struct sim_medium *medium = link->medium;
    uint64_t at_ns = medium->clock->now_ns + link->delay_ns;
    if (link->jitter_ns > 0)
        at_ns += sim_random_below(&medium->random, link->jitter_ns);
    if (may_overtake || sim_random_chance(&medium->random, link->noise.reorder)) {
        medium->counts.reordered++;
        at_ns += sim_random_below(&medium->random, link->noise.reorder_ns);
    } else {
        at_ns = at_ns < link->last_arrival_ns ? link->last_arrival_ns : at_ns;
        link->last_arrival_ns = at_ns;
    }
    datagram->event.fire = arrive;
    if (at_ns > medium->clock->now_ns)
        sim_clock_schedule(medium->clock, &datagram->event, at_ns);
    else
        forward(datagram);
}

/* The datagram has left the queue and is on the cable. */
static void emit(struct sim_link *link, struct sim_datagram *datagram)
{
    struct sim_medium *medium = link->medium;
    if (link->down > 0) {
        sim_medium_lose(medium, datagram, SIM_LOST_DOWN, link->name);
        return;
    }
    if (link->mtu > 0 && datagram->length > link->mtu) {
        sim_medium_lose(medium, datagram, SIM_LOST_SIZE, link->name);
        return;
    }
    if (sim_noise_loses(&link->noise, &medium->random, medium->clock->now_ns)) {
        sim_medium_lose(medium, datagram, SIM_LOST_NOISE, link->name);
        return;
    }
    if (sim_random_chance(&medium->random, link->noise.corrupt)) {
        if (sim_random_chance(&medium->random, 0.5)) {
            sim_medium_lose(medium, datagram, SIM_LOST_CHECKSUM, link->name);
            return;
        }
        medium->counts.corrupted++;
        sim_noise_flip(&link->noise, &medium->random, datagram->bytes, datagram->length);
    }
    if (sim_random_chance(&medium->random, link->noise.duplicate)) {
        medium->counts.duplicated++;
        propagate(link, sim_pool_copy(&medium->pool, datagram), link->noise.reorder_ns > 0);
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
    struct sim_clock *clock = link->medium->clock;
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
        sim_medium_lose(link->medium, datagram, SIM_LOST_QUEUE, link->name);
        return;
    }
    if (link->sending == NULL)
        start(link);
}
