/*
 * Neighbours: the other processes of this host that send through an interface. Each tells at any time what it knows of
 * the interface. From the bytes that they have sent follows the share that this process may use.
 *
 * All that send have equal shares. What those do not use that send clearly less is divided among the others. So where
 * all want more than their share, all have the same, however they are measured, and together they send what the
 * interface carries.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { CL_NEIGHBOURS_MAX = 256 };

/* What a process knows of an interface. */
struct cl_told {
    uint64_t bytes;    /* that it has sent in all */
    uint64_t lost;     /* of these, those that it knows to be lost */
    uint64_t capacity; /* bytes per second, of the link; 0: it does not know yet */
    uint32_t depth_us; /* the room in the queue that it uses; 0: it does not know yet */
};

struct cl_neighbour_state {
    struct cl_told told;
    uint64_t judged;  /* of these, when it was judged last */
    uint64_t sent_us; /* when it was last seen to have sent; 0: never */
    double rate;      /* bytes per second, lately */
};

struct cl_neighbours {
    struct cl_neighbour_state list[CL_NEIGHBOURS_MAX];
    uint32_t count;    /* of those that have told something */
    uint32_t active;   /* those that send now */
    uint32_t recent;   /* those that sent lately, and may begin again at any time */
    bool begins;       /* one began since the last judgement */
    uint32_t depth_us; /* the shortest that one has told which sent lately; UINT32_MAX: none has */
    uint64_t judged_us;
    double unused; /* what others leave to this process beyond its equal share, in bytes per second */
};

void cl_neighbours_init(struct cl_neighbours *neighbours);
/* Bytes since a neighbour's last word. */
struct cl_heard {
    uint64_t sent, lost;
};

/* Takes in what a neighbour (0 to CL_NEIGHBOURS_MAX - 1) tells. Its first word is no news, and where it has sent less
 * than before the process is another one. */
struct cl_heard cl_neighbours_hear(struct cl_neighbours *neighbours, uint32_t neighbour, const struct cl_told *told,
                                   uint64_t now_us);

/* Judges them anew, if the last judgement was so long ago. capacity: of the interface, in bytes per second. */
void cl_neighbours_judge(struct cl_neighbours *neighbours, double capacity, uint64_t every_us, uint64_t now_us);

/* The bytes per second that this process may send. */
double cl_neighbours_leave(const struct cl_neighbours *neighbours, double capacity);
/* The part of the room in its queue that it may use at once. */
double cl_neighbours_spare(const struct cl_neighbours *neighbours);
