#include "sim/queue.h"

#include <stddef.h>

static void enter(struct sim_queue *queue, struct sim_class *class, struct sim_datagram *datagram, uint32_t bytes)
{
    queue->bytes += bytes;
    class->bytes += bytes;
    if (queue->bytes > queue->most_bytes)
        queue->most_bytes = queue->bytes;
    datagram->next = NULL;
    *(class->first != NULL ? &class->last->next : &class->first) = datagram;
    class->last = datagram;
}

static bool enter_limited(struct sim_queue *queue, struct sim_class *class, struct sim_datagram *datagram,
                          uint32_t bytes)
{
    bool above = queue->mark_bytes > 0 && queue->bytes + bytes > queue->mark_bytes;
    if (above && queue->drops && datagram->ecn == SIM_NOT_ECT) {
        queue->selected++;
        return false;
    }
    /* One packet always fits: a buffer smaller than a packet would be a dead link. */
    if (queue->bytes > 0 && queue->bytes + bytes > queue->limit_bytes)
        return false;
    enter(queue, class, datagram, bytes);
    if (above && datagram->ecn == SIM_ECT) {
        datagram->ecn = SIM_CE;
        queue->marked++;
    }
    return true;
}

static struct sim_datagram *leave(struct sim_queue *queue, struct sim_class *class)
{
    struct sim_datagram *datagram = class->first;
    if (datagram != NULL) {
        uint32_t bytes = datagram->length + queue->overhead_bytes;
        class->first = datagram->next;
        queue->bytes -= bytes;
        class->bytes -= bytes;
    }
    return datagram;
}

static bool droptail_push(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes)
{
    return enter_limited(queue, &queue->classes[0], datagram, bytes);
}

static struct sim_datagram *droptail_pop(struct sim_queue *queue)
{
    return leave(queue, &queue->classes[0]);
}

static bool priority_push(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes)
{
    return enter_limited(queue, &queue->classes[datagram->priority], datagram, bytes);
}

static struct sim_datagram *priority_pop(struct sim_queue *queue)
{
    for (int class = 0; class < SIM_CLASSES; class ++)
        if (queue->classes[class].first != NULL)
            return leave(queue, &queue->classes[class]);
    return NULL;
}

static bool has_room(const struct sim_queue *queue, const struct sim_class *class, uint64_t waiting_bytes,
                     uint32_t bytes)
{
    uint64_t room_bytes = queue->limit_bytes + queue->limit_bytes / SIM_CLASS_FACTOR,
             used_bytes = waiting_bytes + bytes;
    return used_bytes <= room_bytes && class->bytes + bytes <= SIM_CLASS_FACTOR * (room_bytes - used_bytes);
}

static bool switch_push(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes)
{
    struct sim_class *class = &queue->classes[datagram->priority];
    struct sim_buffer *buffer = queue->buffer;
    bool above = queue->mark_bytes > 0 && class->bytes + bytes > queue->mark_bytes;
    if (above && queue->drops && datagram->ecn == SIM_NOT_ECT) {
        queue->selected++;
        return false;
    }
    uint64_t others_bytes = queue->classes[SIM_CLASS_OTHERS].bytes;
    uint64_t waiting_bytes = datagram->priority == SIM_CLASS_OTHERS ? others_bytes : queue->bytes - others_bytes;
    if (!has_room(queue, class, waiting_bytes, bytes) ||
        (buffer != NULL && queue->bytes + bytes > buffer->limit_bytes - buffer->bytes)) {
        queue->overflowed++;
        return false;
    }
    enter(queue, class, datagram, bytes);
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
    struct sim_class *others = &queue->classes[SIM_CLASS_OTHERS];
    bool both = others->first != NULL && others->bytes < queue->bytes;
    struct sim_datagram *datagram = both && queue->ahead_bytes > 0 ? leave(queue, others) : priority_pop(queue);
    if (datagram == NULL)
        return NULL;
    int64_t bytes = datagram->length + queue->overhead_bytes;
    queue->ahead_bytes += datagram->priority == SIM_CLASS_OTHERS ? -bytes : bytes;
    if (!both)
        queue->ahead_bytes = 0;
    if (queue->buffer != NULL)
        queue->buffer->bytes -= (uint64_t)bytes;
    return datagram;
}

const struct sim_queue_type sim_queue_type_droptail = {"droptail", droptail_push, droptail_pop};
const struct sim_queue_type sim_queue_type_priority = {"priority", priority_push, priority_pop};
const struct sim_queue_type sim_queue_type_switch = {"switch", switch_push, switch_pop};
