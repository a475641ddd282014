#include "sim/queue.h"

#include <stddef.h>

static bool enter(struct sim_queue *queue, struct sim_lane *lane, struct sim_datagram *datagram, uint32_t bytes)
{
    /* One packet always fits: a buffer smaller than a packet would be a dead link. */
    if (queue->bytes > 0 && queue->bytes + bytes > queue->limit_bytes)
        return false;
    queue->bytes += bytes;
    lane->bytes += bytes;
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
        uint32_t bytes = datagram->length + queue->overhead_bytes;
        lane->first = datagram->next;
        queue->bytes -= bytes;
        lane->bytes -= bytes;
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

static bool switch_push(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes)
{
    struct sim_lane *lane = &queue->lanes[datagram->priority];
    struct sim_buffer *buffer = queue->buffer;
    bool above = queue->mark_bytes > 0 && lane->bytes + bytes > queue->mark_bytes;
    if (above && queue->drops && datagram->ecn == SIM_NOT_ECT) {
        queue->selected++;
        return false;
    }
    bool shared_full = buffer != NULL && queue->bytes + bytes > buffer->limit_bytes - buffer->bytes;
    if (shared_full || !enter(queue, lane, datagram, bytes)) {
        queue->overflowed++;
        return false;
    }
    if (buffer != NULL)
        buffer->bytes += bytes;
    if (above && datagram->ecn == SIM_ECT) {
        datagram->ecn = SIM_CE;
        queue->marked++;
    }
    return true;
}

static struct sim_datagram *switch_pop(struct sim_queue *queue)
{
    struct sim_datagram *datagram = priority_pop(queue);
    if (datagram != NULL && queue->buffer != NULL)
        queue->buffer->bytes -= datagram->length + queue->overhead_bytes;
    return datagram;
}

const struct sim_queue_type sim_queue_type_droptail = {"droptail", droptail_push, droptail_pop};
const struct sim_queue_type sim_queue_type_priority = {"priority", priority_push, priority_pop};
const struct sim_queue_type sim_queue_type_switch = {"switch", switch_push, switch_pop};
