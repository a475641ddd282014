/*
 * Queue: the datagrams that wait in front of a link: which leaves first, and which is dropped. Disciplines are const
 * vtables.
 */
#ifndef CL_SIM_QUEUE_H
#define CL_SIM_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "sim/datagram.h"

enum {
    SIM_CLASSES = 8,
    SIM_CLASS_OTHERS = 7, /* at a switch: traffic of others than the job */
    SIM_CLASS_FACTOR = 8,
};

struct sim_queue;

struct sim_queue_type {
    const char *name;
    /* False: there is no room; the caller keeps the datagram. */
    bool (*push)(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes);
    /* NULL: the queue is empty. */
    struct sim_datagram *(*pop)(struct sim_queue *queue);
};

struct sim_class {
    struct sim_datagram *first, *last;
    uint64_t bytes;
};

/* Memory shared by the queues of a switch. A queue may take as much as is free (dynamic thresholds with a factor of 1:
 * Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). */
struct sim_buffer {
    uint64_t limit_bytes, bytes;
};

struct sim_queue {
    const struct sim_queue_type *type;
    uint64_t limit_bytes;
    uint64_t bytes, most_bytes;
    uint32_t overhead_bytes;   /* of lower layers, per datagram */
    uint64_t mark_bytes;       /* length of a class above which a switch marks or drops; 0: never */
    bool drops;                /* above mark_bytes: drops datagrams that are not ECN-capable; else they may stay */
    struct sim_buffer *buffer; /* NULL: none is shared */
    int64_t ahead_bytes;       /* sent for the job beyond those sent for others, since both have datagrams waiting */
    uint64_t marked, selected, overflowed; /* datagrams marked; dropped above mark_bytes; dropped for want of room */
    struct sim_class classes[SIM_CLASSES];
};

extern const struct sim_queue_type sim_queue_type_droptail; /* first in, first out; a full queue drops */
extern const struct sim_queue_type sim_queue_type_priority; /* strict by the datagram's priority; a common limit */
/* A switch. The job's classes together and the class of others have half of the link each, or all of it while the other
 * side has nothing waiting, and room for limit_bytes each. Priorities are strict among the job's classes. A class may
 * take SIM_CLASS_FACTOR times the free room (dynamic thresholds), so that classes that wait leave room for classes that
 * go first: alone it has limit_bytes, several together a little more. ECN goes by class: above mark_bytes an
 * ECN-capable datagram is marked and any other is dropped, which is the drop precedence that DLCP uses. */
extern const struct sim_queue_type sim_queue_type_switch;

static inline bool sim_queue_push(struct sim_queue *queue, struct sim_datagram *datagram)
{
    return queue->type->push(queue, datagram, datagram->length + queue->overhead_bytes);
}

static inline struct sim_datagram *sim_queue_pop(struct sim_queue *queue)
{
    return queue->type->pop(queue);
}

#endif
