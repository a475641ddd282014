#include "protocol/queue.h"

void cl_queue_give_turn(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class)
{
    queue->turn[class] = node;
    queue->turn_packets = 0;
}

static struct cl_send *first_of(const struct cl_queue_node *node, int class)
{
    return cl_message_as_send(node->classes[class].sends.first);
}

/* Gives the node the last turn. If its first message needs credit, its turn comes before those of younger ones, but not
 * before a turn that has begun. */
static void enter(struct cl_queue *queue, struct cl_queue_node *node, int class)
{
    struct cl_queue_class *own = &node->classes[class];
    struct cl_queue_node *turn = queue->turn[class], *next = turn;
    own->left = 0;
    if (turn == NULL) {
        own->previous = own->next = node;
        queue->turn[class] = node;
        queue->classes = (uint16_t)(queue->classes | 1u << class);
        return;
    }
    bool at_once = false;
    while (!at_once) {
        struct cl_queue_node *previous = next->classes[class].previous;
        if (!cl_send_is_older(first_of(node, class), first_of(previous, class)) ||
            (previous == turn && !cl_queue_turn_begins(queue)))
            break;
        at_once = previous == turn;
        next = previous;
    }
    struct cl_queue_class *next_own = &next->classes[class];
    own->next = next;
    own->previous = next_own->previous;
    own->previous->classes[class].next = node;
    next_own->previous = node;
    if (at_once)
        queue->turn[class] = node;
}

static void leave(struct cl_queue *queue, struct cl_queue_node *node, int class)
{
    struct cl_queue_class *own = &node->classes[class];
    if (own->next == node) {
        queue->turn[class] = NULL;
        queue->classes = (uint16_t)(queue->classes & ~(1u << class));
    } else {
        own->previous->classes[class].next = own->next;
        own->next->classes[class].previous = own->previous;
        if (queue->turn[class] == node)
            cl_queue_give_turn(queue, own->next, (uint8_t) class);
    }
    own->previous = own->next = NULL;
}

/* Of two messages to one peer. */
static bool goes_before(const struct cl_send *send, const struct cl_send *other)
{
    if (send->order != other->order)
        return send->order < other->order;
    return !other->lost.count && cl_send_is_older(send, other);
}

void cl_queue_push(struct cl_queue *queue, struct cl_queue_node *node, struct cl_send *send, bool first)
{
    struct cl_message_list *sends = &node->classes[send->priority].sends;
    const struct cl_send *former = sends->first != NULL ? cl_message_as_send(sends->first) : NULL;
    struct cl_message *before = first ? NULL : sends->last;
    while (before != NULL && goes_before(send, cl_message_as_send(before)))
        before = before->previous;
    send->queued = true;
    cl_message_list_insert(sends, before, &send->message);
    if (node->blocked >> send->priority & 1)
        return;
    if (former == NULL) {
        enter(queue, node, send->priority);
    } else if (before == NULL && cl_send_is_older(send, former) && queue->turn[send->priority] != node) {
        leave(queue, node, send->priority);
        enter(queue, node, send->priority);
    }
}

void cl_queue_remove(struct cl_queue *queue, struct cl_queue_node *node, struct cl_send *send)
{
    struct cl_message_list *sends = &node->classes[send->priority].sends;
    cl_message_list_remove(sends, &send->message);
    send->queued = false;
    if (sends->first == NULL && !(node->blocked >> send->priority & 1))
        leave(queue, node, send->priority);
}

struct cl_send *cl_queue_next(const struct cl_queue *queue)
{
    if (!queue->classes)
        return NULL;
    bool guard = queue->packets % CL_QUEUE_GUARD == CL_QUEUE_GUARD - 1;
    int class = guard ? 31 - __builtin_clz(queue->classes) : cl_queue_first_class(queue);
    return first_of(queue->turn[class], class);
}

void cl_queue_sent(struct cl_queue *queue, struct cl_queue_node *node, const struct cl_send *send, bool is_short)
{
    struct cl_queue_class *own = &node->classes[send->priority];
    uint32_t limit = cl_queue_turn_limit(queue), packets = ++queue->turn_packets;
    uint32_t left = packets < limit ? limit - packets : 0;
    queue->packets++;
    if (left > 0 && (!is_short || limit == CL_QUEUE_TURN || left >= limit / 2))
        return;
    own->left += left;
    bool again = own->left >= limit;
    own->left -= again ? limit : 0;
    cl_queue_give_turn(queue, again ? node : own->next, send->priority);
    if (again || send->granted == UINT32_MAX || own->next == node)
        return;
    left = own->left; /* enter() forgets it */
    leave(queue, node, send->priority);
    enter(queue, node, send->priority);
    own->left = left;
}

void cl_queue_block(struct cl_queue *queue, struct cl_queue_node *node, uint8_t class)
{
    for (; class < CL_CLASSES_BETWEEN_HOSTS; class ++) {
        if (node->classes[class].sends.first != NULL && !(node->blocked >> class & 1))
            leave(queue, node, class);
        node->blocked = (uint16_t)(node->blocked | 1u << class);
    }
}

void cl_queue_unblock(struct cl_queue *queue, struct cl_queue_node *node)
{
    for (int class = 0; class < CL_CLASSES_BETWEEN_HOSTS; class ++)
        if (node->classes[class].sends.first != NULL && node->blocked >> class & 1)
            enter(queue, node, class);
    node->blocked = 0;
}
