/*
 * Table: owns all messages of an endpoint, each side's at their own size, and finds them by name: (side, peer, group,
 * sequence, index).
 *
 * A message leaves the table when it completes, and its struct is reused later: pointers stay valid memory until
 * cl_table_free, and the generation tells whether they still mean the same message.
 */
#pragma once

#include "protocol/message.h"

/* The structs of one side. */
struct cl_table_pool {
    struct cl_message *free;
    void **blocks; /* blocks of CL_TABLE_BLOCK structs each */
    uint32_t block_count;
};

struct cl_table {
    struct cl_index names;
    struct cl_table_pool sends, receives;
};

enum { CL_TABLE_BLOCK = 64 };

/* NULL when there is none by that name. */
struct cl_send *cl_table_find_send(const struct cl_table *table, uint16_t peer, const struct cl_message_id *id);
struct cl_receive *cl_table_find_receive(const struct cl_table *table, uint16_t peer, const struct cl_message_id *id);
/* A new message by that name, which must not be in the table. NULL when there is no memory. */
struct cl_send *cl_table_add_send(struct cl_table *table, uint16_t peer, const struct cl_message_id *id);
struct cl_receive *cl_table_add_receive(struct cl_table *table, uint16_t peer, const struct cl_message_id *id);
/* Takes the name out; the struct is still the caller's until cl_table_recycle. */
void cl_table_remove(struct cl_table *table, struct cl_message *message);
void cl_table_recycle(struct cl_table *table, struct cl_message *message);
/* Calls visit for each message in the table; visit may remove the one it is given. */
void cl_table_each(struct cl_table *table, void (*visit)(struct cl_message *message, void *argument), void *argument);
void cl_table_free(struct cl_table *table);
