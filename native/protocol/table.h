/*
 * Table: owns all messages of an endpoint and finds them by name: (side, peer, group, sequence, index).
 *
 * A message leaves the table when it completes, and its struct is reused later: pointers stay valid memory until
 * cl_table_free, and the generation tells whether they still mean the same message.
 */
#ifndef CL_PROTOCOL_TABLE_H
#define CL_PROTOCOL_TABLE_H

#include "protocol/message.h"

struct cl_table {
    struct cl_message **buckets;
    uint32_t bucket_count; /* a power of two */
    uint32_t count;
    struct cl_message *free;
    struct cl_message **blocks; /* of CL_TABLE_BLOCK messages each */
    uint32_t block_count;
};

enum { CL_TABLE_BLOCK = 64 };

struct cl_message *cl_table_find(const struct cl_table *table, enum cl_message_side side, uint16_t peer,
                                 const struct cl_message_id *id);
/* A new message by that name, which must not be in the table. NULL when there is no memory. */
struct cl_message *cl_table_add(struct cl_table *table, enum cl_message_side side, uint16_t peer,
                                const struct cl_message_id *id);
/* Takes the name out; the struct is still the caller's until cl_table_recycle. */
void cl_table_remove(struct cl_table *table, struct cl_message *message);
void cl_table_recycle(struct cl_table *table, struct cl_message *message);
/* Calls visit for each message in the table; visit may remove the one it is given. */
void cl_table_each(struct cl_table *table, void (*visit)(struct cl_message *message, void *argument), void *argument);
void cl_table_free(struct cl_table *table);

#endif
