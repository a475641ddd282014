#include "sim/driver.h"

#include <string.h>

#include "sim/memory.h"

static uint64_t clock_us(const struct sim_driver *driver, uint64_t at_ns)
{
    return driver->type->clock_us != NULL ? driver->type->clock_us(driver, at_ns) : at_ns / driver->tick_ns;
}

uint64_t sim_driver_now_us(const struct sim_driver *driver)
{
    return clock_us(driver, driver->clock->now_ns);
}

uint64_t sim_driver_ns_at(const struct sim_driver *driver, uint64_t us)
{
    uint64_t now_us = sim_driver_now_us(driver), now_ns = driver->clock->now_ns;
    return us <= now_us ? now_ns : now_ns - now_ns % driver->tick_ns + (us - now_us) * driver->tick_ns;
}

/* ---- when turns come ---- */

void sim_driver_wake(struct sim_driver *driver, uint64_t at_ns)
{
    at_ns = at_ns < driver->asleep_until_ns ? driver->asleep_until_ns : at_ns;
    if (!driver->dead && (driver->event.slot == 0 || at_ns < driver->event.at_ns))
        sim_clock_schedule(driver->clock, &driver->event, at_ns);
}

void sim_driver_sleep(struct sim_driver *driver, uint64_t until_ns)
{
    if (until_ns > driver->asleep_until_ns)
        driver->asleep_until_ns = until_ns;
    if (driver->event.slot != 0 && driver->event.at_ns < until_ns)
        sim_clock_schedule(driver->clock, &driver->event, until_ns);
}

void sim_driver_kill(struct sim_driver *driver)
{
    driver->dead = true;
    sim_clock_cancel(driver->clock, &driver->event);
}

static void begin_turn(struct sim_event *event)
{
    struct sim_driver *driver = (struct sim_driver *)(void *)event; /* the event is its first member */
    driver->type->turn(driver);
}

/* ---- what a turn does ---- */

void sim_driver_deliver(struct sim_driver *driver, struct sim_datagram *datagram)
{
    datagram->arrived_ns = driver->clock->now_ns;
    datagram->next = NULL;
    *driver->inbox_last = datagram;
    driver->inbox_last = &datagram->next;
    driver->inbox_count++;
    driver->inbox_bytes += datagram->length;
}

uint32_t sim_driver_receive(struct sim_driver *driver, uint32_t most)
{
    uint32_t count = 0;
    for (; driver->inbox != NULL && count < most; count++) {
        struct sim_datagram *datagram = driver->inbox;
        driver->inbox = datagram->next;
        if (driver->inbox == NULL)
            driver->inbox_last = &driver->inbox;
        driver->inbox_count--;
        driver->inbox_bytes -= datagram->length;
        cl_endpoint_receive(driver->endpoint, datagram->bytes, datagram->length, datagram->ecn == SIM_CE,
                            clock_us(driver, datagram->arrived_ns), sim_driver_now_us(driver));
        if (driver->type->received != NULL)
            driver->type->received(driver, datagram);
        sim_pool_give(driver->pool, datagram);
    }
    return count;
}

bool sim_driver_expire(struct sim_driver *driver)
{
    uint64_t now_us = sim_driver_now_us(driver);
    bool due = cl_endpoint_next_timeout(driver->endpoint) <= now_us;
    if (due)
        cl_endpoint_timeout(driver->endpoint, now_us);
    return due;
}

bool sim_driver_complete(struct sim_driver *driver)
{
    bool any = false;
    struct cl_completion completion;
    while (cl_endpoint_next_completion(driver->endpoint, &completion)) {
        driver->type->complete(driver, &completion);
        any = true;
    }
    struct cl_closed_group aborted;
    while (driver->type->abort != NULL && cl_endpoint_next_abort(driver->endpoint, &aborted))
        driver->type->abort(driver, &aborted);
    return any;
}

bool sim_driver_send(struct sim_driver *driver)
{
    struct cl_endpoint *endpoint = driver->endpoint;
    uint64_t full = cl_endpoint_full_ports(endpoint);
    for (; full != 0; full &= full - 1)
        cl_endpoint_release_port(endpoint, (uint32_t)__builtin_ctzll(full));
    do {
        driver->batch_count =
            (uint32_t)cl_endpoint_send(endpoint, sim_driver_now_us(driver), driver->batch, driver->batch_capacity);
        if (driver->type->filled != NULL)
            driver->type->filled(driver);
        for (uint32_t i = 0; i < driver->batch_count; i++) {
            const struct cl_datagram *datagram = &driver->batch[i];
            if (cl_endpoint_full_ports(endpoint) >> datagram->port & 1 || !driver->type->emit(driver, datagram))
                cl_endpoint_refuse(endpoint, datagram);
            else
                driver->emitted++;
        }
    } while (driver->batch_count > 0);
    return cl_endpoint_full_ports(endpoint) == 0;
}

void sim_driver_settle(struct sim_driver *driver)
{
    bool room;
    sim_driver_complete(driver);
    do
        room = sim_driver_send(driver);
    while (sim_driver_complete(driver));
    uint64_t now_us = sim_driver_now_us(driver), timeout_us = cl_endpoint_next_timeout(driver->endpoint);
    if (!room && timeout_us > now_us + SIM_FULL_US)
        timeout_us = now_us + SIM_FULL_US;
    uint64_t at_ns = sim_driver_ns_at(driver, timeout_us > now_us ? timeout_us : now_us + 1);
    if (timeout_us == UINT64_MAX)
        sim_clock_cancel(driver->clock, &driver->event);
    else if (driver->event.slot == 0 || driver->event.at_ns != at_ns)
        sim_clock_schedule(driver->clock, &driver->event, at_ns);
}

void sim_driver_turn(struct sim_driver *driver)
{
    sim_driver_receive(driver, UINT32_MAX);
    sim_driver_expire(driver);
    sim_driver_settle(driver);
}

uint32_t sim_driver_flatten(uint8_t *bytes, const struct cl_datagram *datagram)
{
    memcpy(bytes, datagram->head, datagram->head_length);
    if (datagram->payload_length > 0)
        memcpy(bytes + datagram->head_length, datagram->payload, datagram->payload_length);
    return datagram->head_length + datagram->payload_length;
}

/* ---- beginning and end ---- */

int sim_driver_open(struct sim_driver *driver, const struct cl_endpoint_config *config)
{
    driver->event.fire = begin_turn;
    driver->inbox_last = &driver->inbox;
    driver->batch = sim_new(driver->batch_capacity, sizeof *driver->batch);
    return cl_endpoint_create(config, &driver->endpoint);
}

void sim_driver_close(struct sim_driver *driver)
{
    sim_clock_cancel(driver->clock, &driver->event);
    cl_endpoint_destroy(driver->endpoint);
    free(driver->batch);
}
