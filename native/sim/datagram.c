#include "sim/datagram.h"

#include <string.h>

#include "sim/memory.h"

struct sim_datagram *sim_pool_take(struct sim_pool *pool)
{
    struct sim_datagram *datagram = pool->spare;
    if (datagram != NULL) {
        pool->spare = datagram->next;
    } else {
        datagram = sim_new(1, sizeof *datagram + pool->datagram_bytes);
        datagram->made = pool->made;
        pool->made = datagram;
    }
    struct sim_datagram *made = datagram->made;
    memset(datagram, 0, sizeof *datagram);
    datagram->made = made;
    pool->used++;
    return datagram;
}

struct sim_datagram *sim_pool_copy(struct sim_pool *pool, const struct sim_datagram *datagram)
{
    struct sim_datagram *copy = sim_pool_take(pool), *made = copy->made;
    memcpy(copy, datagram, sizeof *copy + datagram->length);
    copy->made = made;
    copy->event.slot = 0;
    return copy;
}

void sim_pool_give(struct sim_pool *pool, struct sim_datagram *datagram)
{
    datagram->next = pool->spare;
    pool->spare = datagram;
    pool->used--;
}

void sim_pool_free(struct sim_pool *pool)
{
    while (pool->made != NULL) {
        struct sim_datagram *datagram = pool->made;
        pool->made = datagram->made;
        free(datagram);
    }
    pool->spare = NULL;
}
