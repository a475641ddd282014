/*
 * Neighbours: the other processes of this host that send through an interface. Each tells at any time what it knows of
 * the interface. This process computes its own share from the bytes that they have sent.
 *
 * All that send have equal shares. If one sends clearly less than its share, the others divide the rest. If all want
 * more than their share, all get the same, and together they fill the interface: errors in the measured rates do not
 * change that. A process that sends a small part of a share, such as acknowledgements, does not count.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "congestion/class.h"

enum { CL_NEIGHBOURS_MAX = 256 };

/* What a process knows of an interface. */
struct cl_told {
    uint64_t bytes[CL_CLASSES_BETWEEN_HOSTS]; /* handed to the interface in all, of this class and more urgent ones */
    uint64_t lost;                            /* bytes, in full packets, that it knows to be lost */
    uint64_t capacity;                        /* bytes per second, of the link; 0: it does not know yet */
    uint32_t depth_us;                        /* the room in the queue that it uses; 0: it does not know yet */
    uint64_t owed;                            /* bytes on their way to it, as it granted them: protocol/budget.h */
};

struct cl_neighbour_state {
    struct cl_told told;
    uint64_t told_us; /* when; 0: never */
    uint64_t used_us; /* when it was last seen to use a real part of the interface; 0: never */
    uint64_t judged;  /* all bytes that it had sent at the last judgement */
    bool begins;      /* it began after that */
    double rate;      /* bytes per second, lately */
};

struct cl_neighbours {
    struct cl_neighbour_state list[CL_NEIGHBOURS_MAX];
    uint32_t count;  /* of those that have told something */
    uint32_t active; /* those that send now */
    uint32_t recent; /* those that sent lately, and may begin again at any time */
    bool changed;    /* since the last judgement */
    uint64_t judged_us;
    uint64_t idle_us;  /* who has not sent for so long does not send now */
    double unused;     /* what others leave to this process beyond its equal share, in bytes per second */
    double small;      /* what those send that do not count */
    uint32_t depth_us; /* the shortest that one has told which sent lately; UINT32_MAX: none has */
};

void cl_neighbours_init(struct cl_neighbours *neighbours);
/* Takes in what a neighbour (0 to CL_NEIGHBOURS_MAX - 1) tells. Gives the bytes since its last word, by class, and
 * those lost. They are 0 in three cases: the neighbour is heard for the first time; it was not heard for a while; its
 * counters went down. */
void cl_neighbours_hear(struct cl_neighbours *neighbours, uint32_t neighbour, const struct cl_told *told,
                        struct cl_told *news, uint64_t now_us);
/* All have been heard. Judges them anew, if the last judgement was so long ago. capacity: of the interface, in bytes
 * per second. Returns whether the share may have changed. */
bool cl_neighbours_judge(struct cl_neighbours *neighbours, double capacity, uint64_t every_us, uint64_t now_us);

/* The bytes per second that this process may send. */
double cl_neighbours_leave(const struct cl_neighbours *neighbours, double capacity);
/* The part of the room in its queue that it may use at once. */
double cl_neighbours_spare(const struct cl_neighbours *neighbours);
