#include "protocol/table.h"

#include <stdlib.h>

/* Different names may have the same key. */
static uint64_t key(enum cl_message_side side, uint16_t peer, const struct cl_message_id *id)
{
    uint64_t where = (uint64_t)id->group << 32 | (uint64_t)peer << 1 | (uint64_t)side;
    return cl_index_mix(cl_index_mix(where) + ((uint64_t)id->sequence << 32 | id->index));
}

static bool same(const struct cl_message *message, enum cl_message_side side, uint16_t peer,
                 const struct cl_message_id *id)
{
    return message->id.index == id->index && message->id.sequence == id->sequence && message->id.group == id->group &&
           message->peer == peer && message->side == side;
}

/* Allocates CL_TABLE_BLOCK structs of `bytes` bytes, each of which begins with its cl_message. */
static bool refill(struct cl_table_pool *pool, size_t bytes)
{
    void **blocks = realloc(pool->blocks, (pool->block_count + 1) * sizeof(void *));
    if (blocks == NULL)
        return false;
    pool->blocks = blocks;
    uint8_t *block = calloc(CL_TABLE_BLOCK, bytes);
    if (block == NULL)
        return false;
    blocks[pool->block_count++] = block;
    for (size_t i = 0; i < CL_TABLE_BLOCK; i++) {
        struct cl_message *message = (void *)(block + i * bytes);
        message->next = pool->free;
        pool->free = message;
    }
    return true;
}

static struct cl_message *find(const struct cl_table *table, enum cl_message_side side, uint16_t peer,
                               const struct cl_message_id *id)
{
    struct cl_index_place *place = cl_index_find(&table->names, key(side, peer, id));
    while (place != NULL && !same(CL_INDEX_THING(place, struct cl_message, name), side, peer, id))
        place = cl_index_next(place);
    return place != NULL ? CL_INDEX_THING(place, struct cl_message, name) : NULL;
}

struct cl_send *cl_table_find_send(const struct cl_table *table, uint16_t peer, const struct cl_message_id *id)
{
    return cl_message_as_send(find(table, CL_MESSAGE_SEND, peer, id));
}

struct cl_receive *cl_table_find_receive(const struct cl_table *table, uint16_t peer, const struct cl_message_id *id)
{
    return cl_message_as_receive(find(table, CL_MESSAGE_RECEIVE, peer, id));
}

/* Gives a free struct of the pool this name. All of its common part is reset but the memory of the bitmap and the
 * generation. */
static struct cl_message *add(struct cl_table *table, struct cl_table_pool *pool, size_t bytes,
                              enum cl_message_side side, uint16_t peer, const struct cl_message_id *id)
{
    if (pool->free == NULL && !refill(pool, bytes))
        return NULL;
    struct cl_message *message = pool->free, *next = message->next;
    if (!cl_index_add(&table->names, &message->name, key(side, peer, id)))
        return NULL;
    pool->free = next;
    *message = (struct cl_message){.id = *id,
                                   .peer = peer,
                                   .side = (uint8_t)side,
                                   .name = message->name,
                                   .generation = message->generation,
                                   .arrived = message->arrived,
                                   .arrived_words = message->arrived_words};
    return message;
}

struct cl_send *cl_table_add_send(struct cl_table *table, uint16_t peer, const struct cl_message_id *id)
{
    struct cl_send *send = (void *)add(table, &table->sends, sizeof(*send), CL_MESSAGE_SEND, peer, id);
    if (send == NULL)
        return NULL;
    /* also here, memory is kept for the next use */
    *send = (struct cl_send){.message = send->message,
                             .granted = UINT32_MAX,
                             .lost = send->lost,
                             .forgone = send->forgone,
                             .stop_told = send->stop_told,
                             .counted = send->counted,
                             .counted_words = send->counted_words};
    cl_ranges_clear(&send->lost);
    cl_ranges_clear(&send->forgone);
    cl_ranges_clear(&send->stop_told);
    return send;
}

struct cl_receive *cl_table_add_receive(struct cl_table *table, uint16_t peer, const struct cl_message_id *id)
{
    struct cl_receive *receive = (void *)add(table, &table->receives, sizeof(*receive), CL_MESSAGE_RECEIVE, peer, id);
    if (receive != NULL)
        *receive = (struct cl_receive){.message = receive->message};
    return receive;
}

void cl_table_remove(struct cl_table *table, struct cl_message *message)
{
    cl_index_remove(&table->names, &message->name);
    message->generation++;
}

void cl_table_recycle(struct cl_table *table, struct cl_message *message)
{
    struct cl_table_pool *pool = message->side == CL_MESSAGE_SEND ? &table->sends : &table->receives;
    message->next = pool->free;
    pool->free = message;
}

void cl_table_each(struct cl_table *table, void (*visit)(struct cl_message *message, void *argument), void *argument)
{
    for (uint32_t i = 0; i < table->names.bucket_count; i++)
        for (struct cl_index_place *place = table->names.buckets[i], *next; place != NULL; place = next) {
            next = place->next;
            visit(CL_INDEX_THING(place, struct cl_message, name), argument);
        }
}

void cl_table_free(struct cl_table *table)
{
    for (uint32_t i = 0; i < table->sends.block_count; i++) {
        struct cl_send *block = table->sends.blocks[i];
        for (int j = 0; j < CL_TABLE_BLOCK; j++)
            cl_send_free(&block[j]);
        free(block);
    }
    for (uint32_t i = 0; i < table->receives.block_count; i++) {
        struct cl_receive *block = table->receives.blocks[i];
        for (int j = 0; j < CL_TABLE_BLOCK; j++)
            cl_message_free(&block[j].message);
        free(block);
    }
    free(table->sends.blocks);
    free(table->receives.blocks);
    cl_index_free(&table->names);
    *table = (struct cl_table){0};
}
