#include "protocol/queue.h"

void cl_queue_give_turn(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class)
{
    queue->turn[class] = node;
    queue->turn_packets = 0;
}

static void enter(struct cl_queue *queue, struct cl_queue_node *node, int class)
{
    struct cl_queue_lane *lane = &node->lanes[class];
    struct cl_queue_node *turn = queue->turn[class];
    if (!turn) {
        lane->previous = lane->next = node;
        queue->turn[class] = node;
        queue->classes = (uint8_t)(queue->classes | 1u << class);
        return;
    }
    /* last in turn */
    struct cl_queue_lane *turn_lane = &turn->lanes[class];
    lane->next = turn;
    lane->previous = turn_lane->previous;
    lane->previous->lanes[class].next = node;
    turn_lane->previous = node;
}

static void leave(struct cl_queue *queue, struct cl_queue_node *node, int class)
{
    struct cl_queue_lane *lane = &node->lanes[class];
    if (lane->next == node) {
        queue->turn[class] = NULL;
        queue->classes = (uint8_t)(queue->classes & ~(1u << class));
    } else {
        lane->previous->lanes[class].next = lane->next;
        lane->next->lanes[class].previous = lane->previous;
        if (queue->turn[class] == node)
            queue->turn[class] = lane->next;
    }
    lane->previous = lane->next = NULL;
}

void cl_queue_push(struct cl_queue *queue, struct cl_queue_node *node, struct cl_message *message, bool first)
{
    struct cl_queue_lane *lane = &node->lanes[message->priority];
    bool was_empty = !lane->first;
    message->queued = true;
    message->previous = first ? NULL : lane->last;
    message->next = first ? lane->first : NULL;
    *(message->previous ? &message->previous->next : &lane->first) = message;
    *(message->next ? &message->next->previous : &lane->last) = message;
    if (was_empty && !(node->blocked >> message->priority & 1))
        enter(queue, node, message->priority);
}

void cl_queue_remove(struct cl_queue *queue, struct cl_queue_node *node, struct cl_message *message)
{
    struct cl_queue_lane *lane = &node->lanes[message->priority];
    *(message->previous ? &message->previous->next : &lane->first) = message->next;
    *(message->next ? &message->next->previous : &lane->last) = message->previous;
    message->previous = message->next = NULL;
    message->queued = false;
    if (!lane->first && !(node->blocked >> message->priority & 1))
        leave(queue, node, message->priority);
}

struct cl_message *cl_queue_next(const struct cl_queue *queue)
{
    if (!queue->classes)
        return NULL;
    bool guard = queue->packets % CL_QUEUE_GUARD == CL_QUEUE_GUARD - 1;
    int class = guard ? 31 - __builtin_clz(queue->classes) : cl_queue_first_class(queue);
    return queue->turn[class]->lanes[class].first;
}

void cl_queue_sent(struct cl_queue *queue, struct cl_queue_node *node, const struct cl_message *message)
{
    queue->packets++;
    if (++queue->turn_packets < CL_QUEUE_TURN)
        return;
    cl_queue_give_turn(queue, node->lanes[message->priority].next, message->priority);
}

void cl_queue_block(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class)
{
    for (; class < CL_CLASSES; class ++) {
        if (node->lanes[class].first && !(node->blocked >> class & 1))
            leave(queue, node, class);
        node->blocked = (uint8_t)(node->blocked | 1u << class);
    }
}

void cl_queue_unblock(struct cl_queue *queue, struct cl_queue_node *node)
{
    for (int class = 0; class < CL_CLASSES; class ++)
        if (node->lanes[class].first && node->blocked >> class & 1)
            enter(queue, node, class);
    node->blocked = 0;
}
