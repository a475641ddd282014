/*
 * Congestion control: how much of one path may be in flight, and how fast it leaves. The kinds are const vtables with a
 * name; their state is a union in struct cl_cc. Bytes are those of datagrams, header included.
 */
#ifndef CL_CORE_CC_H
#define CL_CORE_CC_H

#include <stdbool.h>
#include <stdint.h>

struct cl_cc;

/* What one acknowledgement says. */
struct cl_cc_sample {
    uint64_t bytes;    /* newly acknowledged */
    uint32_t packets;  /* the same */
    uint64_t largest;  /* packet number acknowledged */
    uint64_t next;     /* the next packet number to be sent */
    bool limited;      /* the window was what kept the sender from sending more */
    bool timed;        /* the three below are a new sample */
    uint32_t queue_us; /* time spent in the network's queues */
    uint32_t rtt_us;   /* smoothed round trip, hosts included */
    uint32_t base_us;  /* round trip of the empty network */
};

struct cl_cc_type {
    const char *name;
    bool shares_egress; /* one more window over all paths of an interface: see egress.h */
    void (*init)(struct cl_cc *cc);
    void (*on_acked)(struct cl_cc *cc, const struct cl_cc_sample *sample, uint64_t now_us);
    /* next: the next packet number to be sent when the loss was noticed */
    void (*on_lost)(struct cl_cc *cc, uint64_t bytes, uint32_t packets, uint64_t next, uint64_t now_us);
    /* count: timeouts in a row */
    void (*on_pto)(struct cl_cc *cc, uint32_t count, uint64_t now_us);
};

struct cl_cc_delay {
    bool slow_start;
    uint64_t round_end;               /* the round ends when this number is acknowledged */
    uint64_t decrease_after;          /* no second decrease before this number is acknowledged */
    uint32_t round_acked, round_lost; /* packets */
    uint32_t round_queue_us;          /* smallest of the round */
    uint32_t queue_us;                /* smoothed */
    uint32_t target_us;
};

struct cl_cc_fixed {
    uint64_t rate; /* bytes per second */
};

struct cl_cc {
    const struct cl_cc_type *type;
    uint32_t packet_bytes; /* of a full packet */
    uint64_t window;       /* bytes that may be in flight */
    uint64_t rate;         /* bytes per second for the pacer; 0: not paced */
    uint64_t fixed_rate;   /* as configured, bytes per second */
    union {
        struct cl_cc_delay delay;
        struct cl_cc_fixed fixed;
    };
};

extern const struct cl_cc_type cl_cc_type_delay;
extern const struct cl_cc_type cl_cc_type_fixed;

/* False when there is no such type. */
bool cl_cc_init(struct cl_cc *cc, const char *name, uint32_t packet_bytes, uint64_t fixed_rate);

#endif
