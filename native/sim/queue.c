#include "sim/queue.h"

#include <stddef.h>

static bool enter(struct sim_queue *queue, struct sim_lane *lane, struct sim_datagram *datagram, uint32_t bytes)
{
    /* One packet always fits: a buffer smaller than a packet would be a dead link. */
    if (queue->bytes > 0 && queue->bytes + bytes > queue->limit_bytes)
        return false;
    queue->bytes += bytes;
    if (queue->bytes > queue->most_bytes)
        queue->most_bytes = queue->bytes;
    datagram->next = NULL;
    *(lane->first != NULL ? &lane->last->next : &lane->first) = datagram;
    lane->last = datagram;
    return true;
}

static struct sim_datagram *leave(struct sim_queue *queue, struct sim_lane *lane)
{
    struct sim_datagram *datagram = lane->first;
    if (datagram != NULL) {
        lane->first = datagram->next;
        queue->bytes -= datagram->length + queue->overhead_bytes;
    }
    return datagram;
}

static bool droptail_push(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes)
{
    return enter(queue, &queue->lanes[0], datagram, bytes);
}

static struct sim_datagram *droptail_pop(struct sim_queue *queue)
{
    return leave(queue, &queue->lanes[0]);
}

static bool priority_push(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes)
{
    return enter(queue, &queue->lanes[datagram->priority], datagram, bytes);
}

static struct sim_datagram *priority_pop(struct sim_queue *queue)
{
    for (int lane = 0; lane < SIM_QUEUE_LANES; lane++)
        if (queue->lanes[lane].first != NULL)
            return leave(queue, &queue->lanes[lane]);
    return NULL;
}

const struct sim_queue_type sim_queue_type_droptail = {"droptail", droptail_push, droptail_pop};
const struct sim_queue_type sim_queue_type_priority = {"priority", priority_push, priority_pop};
