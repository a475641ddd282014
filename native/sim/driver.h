/*
 * Driver: runs one endpoint in virtual time, in turns. Ranks of the simulator, hosts of a fabric, hosts of the tests
 * and the fuzzer's conversations all drive their endpoints through it. The user's struct has the driver as its first
 * member and gives it a type: a const vtable of what differs.
 *
 * A turn is sim_driver_turn, or its parts in the user's own order: hand over the received datagrams, run the timers
 * that are due, report completions, send until the endpoint or the wire has had enough, and schedule the next turn.
 */
#ifndef CL_SIM_DRIVER_H
#define CL_SIM_DRIVER_H

#include "protocol/endpoint.h"
#include "sim/datagram.h"

enum { SIM_FULL_US = 200 /* a full port may have room again after this time */ };

struct sim_driver;

struct sim_driver_type {
    /* The time of a turn has come. */
    void (*turn)(struct sim_driver *driver);
    /* Sends the datagram. False: its port is full, until the next sim_driver_send. */
    bool (*emit)(struct sim_driver *driver, const struct cl_datagram *datagram);
    void (*complete)(struct sim_driver *driver, const struct cl_completion *completion);
    /* The members below may be NULL. */
    void (*abort)(struct sim_driver *driver, const struct cl_closed_group *aborted);  /* NULL: aborts stay */
    void (*received)(struct sim_driver *driver, const struct sim_datagram *datagram); /* the endpoint has had it */
    void (*filled)(struct sim_driver *driver); /* the endpoint has filled the batch, perhaps with nothing */
    uint64_t (*clock_us)(const struct sim_driver *driver, uint64_t at_ns); /* NULL: at_ns / tick_ns */
};

struct sim_driver {
    struct sim_event event; /* the next turn; the first member: events are cast to drivers */
    /* The user sets these before sim_driver_open. */
    const struct sim_driver_type *type;
    struct sim_clock *clock;
    struct sim_pool *pool;   /* takes back the datagrams of the inbox */
    uint32_t tick_ns;        /* a microsecond of the endpoint's clock, as virtual time: usually 1000 */
    uint32_t batch_capacity; /* datagrams the endpoint is asked for at once */

    struct cl_endpoint *endpoint;
    bool dead;                /* takes no more turns */
    uint64_t asleep_until_ns; /* takes no turn before */
    struct sim_datagram *inbox, **inbox_last;
    uint32_t inbox_count;
    uint64_t inbox_bytes;
    struct cl_datagram *batch; /* filled by the endpoint last */
    uint32_t batch_count;
    uint64_t emitted; /* datagrams, so far */
};

/* Creates the endpoint; returns its status. */
int sim_driver_open(struct sim_driver *driver, const struct cl_endpoint_config *config);
void sim_driver_close(struct sim_driver *driver);

/* The endpoint's clock. */
uint64_t sim_driver_now_us(const struct sim_driver *driver);

/* A turn comes at that time, or at the end of the driver's sleep if that is later. Never postpones a turn. */
void sim_driver_wake(struct sim_driver *driver, uint64_t at_ns);
/* No turn comes before that time. */
void sim_driver_sleep(struct sim_driver *driver, uint64_t until_ns);
/* No turn comes any more. */
void sim_driver_kill(struct sim_driver *driver);

/* Puts the datagram into the inbox, stamped with the time. */
void sim_driver_deliver(struct sim_driver *driver, struct sim_datagram *datagram);

/* All of a turn. */
void sim_driver_turn(struct sim_driver *driver);

/* ---- the parts of a turn ---- */

/* Hands over up to `most` datagrams of the inbox; returns how many. */
uint32_t sim_driver_receive(struct sim_driver *driver, uint32_t most);
/* Runs the timers that are due; returns whether any was. */
bool sim_driver_expire(struct sim_driver *driver);
/* Reports completions and aborts; returns whether there was a completion. */
bool sim_driver_complete(struct sim_driver *driver);
/* Sends until the endpoint has nothing to send; returns whether all ports have room. */
bool sim_driver_send(struct sim_driver *driver);
/* Completes and sends until nothing is left to do now, and schedules the next turn at the endpoint's next timeout. */
void sim_driver_settle(struct sim_driver *driver);
/* The virtual time at which the endpoint's clock shows `us`, or a moment earlier; never in the past. */
uint64_t sim_driver_ns_at(const struct sim_driver *driver, uint64_t us);

/* Writes the whole datagram to `bytes`; returns its length. */
uint32_t sim_driver_flatten(uint8_t *bytes, const struct cl_datagram *datagram);

#endif
