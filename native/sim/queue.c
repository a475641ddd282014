#include "sim/queue.h"

#include <stddef.h>

static void enter(struct sim_queue *queue, struct sim_lane *lane, struct sim_datagram *datagram, uint32_t bytes)
{
    queue->bytes += bytes;
    lane->bytes += bytes;
    if (queue->bytes > queue->most_bytes)
        queue->most_bytes = queue->bytes;
    datagram->next = NULL;
    *(lane->first != NULL ? &lane->last->next : &lane->first) = datagram;
    lane->last = datagram;
}

static bool enter_limited(struct sim_queue *queue, struct sim_lane *lane, struct sim_datagram *datagram, uint32_t bytes)
{
    /* One packet always fits: a buffer smaller than a packet would be a dead link. */
    if (queue->bytes > 0 && queue->bytes + bytes > queue->limit_bytes)
        return false;
    enter(queue, lane, datagram, bytes);
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
    return enter_limited(queue, &queue->lanes[0], datagram, bytes);
}

static struct sim_datagram *droptail_pop(struct sim_queue *queue)
{
    return leave(queue, &queue->lanes[0]);
}

static bool priority_push(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes)
{
    return enter_limited(queue, &queue->lanes[datagram->priority], datagram, bytes);
}

static struct sim_datagram *priority_pop(struct sim_queue *queue)
{
    for (int lane = 0; lane < SIM_QUEUE_LANES; lane++)
        if (queue->lanes[lane].first != NULL)
            return leave(queue, &queue->lanes[lane]);
    return NULL;
}

static bool lane_has_room(const struct sim_queue *queue, const struct sim_lane *lane, uint64_t waiting_bytes,
                          uint32_t bytes)
{
    uint64_t room_bytes = queue->limit_bytes + queue->limit_bytes / SIM_LANE_FACTOR, used_bytes = waiting_bytes + bytes;
    return used_bytes <= room_bytes && lane->bytes + bytes <= SIM_LANE_FACTOR * (room_bytes - used_bytes);
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
    uint64_t others_bytes = queue->lanes[SIM_LANE_OTHERS].bytes;
    uint64_t waiting_bytes = datagram->priority == SIM_LANE_OTHERS ? others_bytes : queue->bytes - others_bytes;
    if (!lane_has_room(queue, lane, waiting_bytes, bytes) ||
        (buffer != NULL && queue->bytes + bytes > buffer->limit_bytes - buffer->bytes)) {
        queue->overflowed++;
        return false;
    }
    enter(queue, lane, datagram, bytes);
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
    struct sim_lane *others = &queue->lanes[SIM_LANE_OTHERS];
    bool both = others->first != NULL && others->bytes < queue->bytes;
    struct sim_datagram *datagram = both && queue->ahead_bytes > 0 ? leave(queue, others) : priority_pop(queue);
    if (datagram == NULL)
        return NULL;
    int64_t bytes = datagram->length + queue->overhead_bytes;
    queue->ahead_bytes += datagram->priority == SIM_LANE_OTHERS ? -bytes : bytes;
    if (!both)
        queue->ahead_bytes = 0;
    if (queue->buffer != NULL)
        queue->buffer->bytes -= (uint64_t)bytes;
    return datagram;
}

const struct sim_queue_type sim_queue_type_droptail = {"droptail", droptail_push, droptail_pop};
const struct sim_queue_type sim_queue_type_priority = {"priority", priority_push, priority_pop};
const struct sim_queue_type sim_queue_type_switch = {"switch", switch_push, switch_pop};
