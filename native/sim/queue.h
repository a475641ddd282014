/*
 * Queue: what waits in front of a link, and who goes first or has to go. Disciplines are const vtables.
 */
#ifndef CL_SIM_QUEUE_H
#define CL_SIM_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "sim/datagram.h"

enum {
    SIM_QUEUE_LANES = 8,
    SIM_LANE_OTHERS = 7, /* at a switch: whose traffic is not the job's */
    SIM_LANE_FACTOR = 8,
};

struct sim_queue;

struct sim_queue_type {
    const char *name;
    /* False: there is no room for it, and it stays the caller's. */
    bool (*push)(struct sim_queue *queue, struct sim_datagram *datagram, uint32_t bytes);
    /* NULL when it is empty. */
    struct sim_datagram *(*pop)(struct sim_queue *queue);
};

struct sim_lane {
    struct sim_datagram *first, *last;
    uint64_t bytes;
};

/* Memory that the queues of a switch share. A queue may take as much as is free (dynamic thresholds: Choudhury and
 * Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998; with a factor of 1). */
struct sim_buffer {
    uint64_t limit_bytes, bytes;
};

struct sim_queue {
    const struct sim_queue_type *type;
    uint64_t limit_bytes;
    uint64_t bytes, most_bytes;
    uint32_t overhead_bytes;   /* of lower layers, per datagram */
    uint64_t mark_bytes;       /* of a lane, above which a switch marks or drops; 0: never */
    bool drops;                /* datagrams that are not ECN-capable, there; else they are like the others */
    struct sim_buffer *buffer; /* NULL: none is shared */
    int64_t ahead_bytes;       /* that the job has had more of the link than the others since both want it */
    uint64_t marked, selected, overflowed; /* datagrams marked; dropped above mark_bytes; dropped for want of room */
    struct sim_lane lanes[SIM_QUEUE_LANES];
};

extern const struct sim_queue_type sim_queue_type_droptail; /* first in, first out; no room, no entry */
extern const struct sim_queue_type sim_queue_type_priority; /* strict by the packet's priority; a common limit */
/* What switches do. The job's lanes, together, and that of the others have half of the link each, or all of it while
 * there is nothing else, and room for limit_bytes each; among the job's lanes priorities are strict. A lane may take
 * SIM_LANE_FACTOR times what is free (dynamic thresholds), so that those who wait leave room for those who go before
 * them: alone it has limit_bytes, and several together a part more. ECN goes by lane: above mark_bytes an ECN-capable
 * datagram is marked and any other is dropped, which is the drop precedence that DLCP uses. */
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
