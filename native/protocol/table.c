#include "protocol/table.h"

#include <stdlib.h>

static uint64_t hash(enum cl_message_side side, uint16_t peer, const struct cl_message_id *id)
{
    /* multiplicative hashing of the two halves of the name; the high bits are mixed best */
    uint64_t where = ((uint64_t)id->group << 32 | (uint64_t)peer << 1 | (uint64_t)side) * 0x9E3779B97F4A7C15u;
    uint64_t which = (uint64_t)id->sequence << 32 | id->index;
    return ((where >> 29 ^ where) + which) * 0xD6E8FEB86659FD93u >> 20;
}

static struct cl_message **bucket(const struct cl_table *table, enum cl_message_side side, uint16_t peer,
                                  const struct cl_message_id *id)
{
    return &table->buckets[hash(side, peer, id) & (table->bucket_count - 1)];
}

static bool same(const struct cl_message *message, enum cl_message_side side, uint16_t peer,
                 const struct cl_message_id *id)
{
    return message->id.index == id->index && message->id.sequence == id->sequence && message->id.group == id->group &&
           message->peer == peer && message->side == side;
}

static bool grow(struct cl_table *table)
{
    struct cl_table grown = *table;
    grown.bucket_count = table->bucket_count ? 2 * table->bucket_count : 256;
    grown.buckets = calloc(grown.bucket_count, sizeof(struct cl_message *));
    if (!grown.buckets)
        return false;
    for (uint32_t i = 0; i < table->bucket_count; i++)
        for (struct cl_message *message = table->buckets[i], *next; message; message = next) {
            next = message->hash_next;
            struct cl_message **head = bucket(&grown, message->side, message->peer, &message->id);
            message->hash_next = *head;
            *head = message;
        }
    free(table->buckets);
    *table = grown;
    return true;
}

static bool refill(struct cl_table *table)
{
    struct cl_message **blocks = realloc(table->blocks, (table->block_count + 1) * sizeof(struct cl_message *));
    if (!blocks)
        return false;
    table->blocks = blocks;
    struct cl_message *block = calloc(CL_TABLE_BLOCK, sizeof(*block));
    if (!block)
        return false;
    blocks[table->block_count++] = block;
    for (int i = 0; i < CL_TABLE_BLOCK; i++) {
        block[i].next = table->free;
        table->free = &block[i];
    }
    return true;
}

struct cl_message *cl_table_find(const struct cl_table *table, enum cl_message_side side, uint16_t peer,
                                 const struct cl_message_id *id)
{
    if (!table->count)
        return NULL;
    struct cl_message *message = *bucket(table, side, peer, id);
    while (message && !same(message, side, peer, id))
        message = message->hash_next;
    return message;
}

struct cl_message *cl_table_add(struct cl_table *table, enum cl_message_side side, uint16_t peer,
                                const struct cl_message_id *id)
{
    if ((table->count >= table->bucket_count && !grow(table)) || (!table->free && !refill(table)))
        return NULL;
    struct cl_message *message = table->free;
    table->free = message->next;
    /* resets everything but the memory of bitmaps and ranges, which is kept for the next use */
    message->id = *id;
    message->peer = peer;
    message->side = (uint8_t)side;
    message->signature = 0;
    message->priority = 0;
    message->order = 0;
    message->posted = message->queued = message->held = message->accepted = message->probing = message->announced =
        false;
    message->unexpected = (struct cl_unexpected_chain){0};
    message->partial = (struct cl_message_partial){0};
    message->status = CL_OK;
    message->previous = message->next = NULL;
    struct cl_message **head = bucket(table, side, peer, id);
    message->hash_next = *head;
    *head = message;
    table->count++;
    return message;
}

void cl_table_remove(struct cl_table *table, struct cl_message *message)
{
    struct cl_message **link = bucket(table, message->side, message->peer, &message->id);
    while (*link != message)
        link = &(*link)->hash_next;
    *link = message->hash_next;
    table->count--;
    message->generation++;
}

void cl_table_recycle(struct cl_table *table, struct cl_message *message)
{
    message->next = table->free;
    table->free = message;
}

void cl_table_each(struct cl_table *table, void (*visit)(struct cl_message *message, void *argument), void *argument)
{
    for (uint32_t i = 0; i < table->bucket_count; i++)
        for (struct cl_message *message = table->buckets[i], *next; message; message = next) {
            next = message->hash_next;
            visit(message, argument);
        }
}

void cl_table_free(struct cl_table *table)
{
    for (uint32_t i = 0; i < table->block_count; i++) {
        for (int j = 0; j < CL_TABLE_BLOCK; j++)
            cl_message_free(&table->blocks[i][j]);
        free(table->blocks[i]);
    }
    free(table->blocks);
    free(table->buckets);
    *table = (struct cl_table){0};
}
