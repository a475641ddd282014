#include "protocol/queue.h"

void cl_queue_give_turn(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class)
{
    queue->turn[class] = node;
    queue->turn_packets = 0;
}

static void enter(struct cl_queue *queue, struct cl_queue_node *node, int class)
{
    struct cl_queue_class *own = &node->classes[class];
    struct cl_queue_node *turn = queue->turn[class];
    if (!turn) {
        own->previous = own->next = node;
        queue->turn[class] = node;
        queue->classes = (uint8_t)(queue->classes | 1u << class);
        return;
    }
    /* the last turn */
    struct cl_queue_class *turn_own = &turn->classes[class];
    own->next = turn;
    own->previous = turn_own->previous;
    own->previous->classes[class].next = node;
    turn_own->previous = node;
}

static void leave(struct cl_queue *queue, struct cl_queue_node *node, int class)
{
    struct cl_queue_class *own = &node->classes[class];
    if (own->next == node) {
        queue->turn[class] = NULL;
        queue->classes = (uint8_t)(queue->classes & ~(1u << class));
    } else {
        own->previous->classes[class].next = own->next;
        own->next->classes[class].previous = own->previous;
        if (queue->turn[class] == node)
            queue->turn[class] = own->next;
    }
    own->previous = own->next = NULL;
}

void cl_queue_push(struct cl_queue *queue, struct cl_queue_node *node, struct cl_message *message, bool first)
{
    struct cl_queue_class *own = &node->classes[message->priority];
    bool was_empty = !own->first;
    struct cl_message *before = first ? NULL : own->last;
    while (before && before->order > message->order)
        before = before->previous;
    message->queued = true;
    message->previous = before;
    message->next = before ? before->next : own->first;
    *(message->previous ? &message->previous->next : &own->first) = message;
    *(message->next ? &message->next->previous : &own->last) = message;
    if (was_empty && !(node->blocked >> message->priority & 1))
        enter(queue, node, message->priority);
}

void cl_queue_remove(struct cl_queue *queue, struct cl_queue_node *node, struct cl_message *message)
{
    struct cl_queue_class *own = &node->classes[message->priority];
    *(message->previous ? &message->previous->next : &own->first) = message->next;
    *(message->next ? &message->next->previous : &own->last) = message->previous;
    message->previous = message->next = NULL;
    message->queued = false;
    if (!own->first && !(node->blocked >> message->priority & 1))
        leave(queue, node, message->priority);
}

struct cl_message *cl_queue_next(const struct cl_queue *queue)
{
    if (!queue->classes)
        return NULL;
    bool guard = queue->packets % CL_QUEUE_GUARD == CL_QUEUE_GUARD - 1;
    int class = guard ? 31 - __builtin_clz(queue->classes) : cl_queue_first_class(queue);
    return queue->turn[class]->classes[class].first;
}

void cl_queue_sent(struct cl_queue *queue, struct cl_queue_node *node, const struct cl_message *message)
{
    queue->packets++;
    if (++queue->turn_packets < CL_QUEUE_TURN)
        return;
    cl_queue_give_turn(queue, node->classes[message->priority].next, message->priority);
}

void cl_queue_block(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class)
{
    for (; class < CL_CLASSES; class ++) {
        if (node->classes[class].first && !(node->blocked >> class & 1))
            leave(queue, node, class);
        node->blocked = (uint8_t)(node->blocked | 1u << class);
    }
}

void cl_queue_unblock(struct cl_queue *queue, struct cl_queue_node *node)
{
    for (int class = 0; class < CL_CLASSES; class ++)
        if (node->classes[class].first && node->blocked >> class & 1)
            enter(queue, node, class);
    node->blocked = 0;
}
