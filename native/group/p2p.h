/*
 * P2p: point-to-point operations. Between hosts each is a plan of one send or receive, named by the group's mailbox;
 * between ranks of one host it is a transfer through their channel (channel.h).
 *
 * They have their own names (mailbox.h) and no place in the group's order of submission. Any number of them is in
 * flight at a time. They share only the group's failure with its collectives.
 */
#pragma once

#include "group/operation.h"

/* Makes a send or a receive from a request. CL_EINVAL for a bad length, tag or priority, or
 * CL_ENOMEM: the operation need not be freed then. */
int cl_p2p_request(struct cl_operation *operation, struct cl_group *group, struct cl_channels *channels,
                   enum cl_operation_kind kind, const struct cl_message_request *request, uint64_t now_us);
/* Whether the operation may go through a channel: it does, or it receives from any source. Before it is handed over. */
bool cl_p2p_may_be_local(const struct cl_operation *operation);
/* Names the messages of an operation, which must be posted before the next call. CL_OK: it has a name, perhaps from
 * before. CL_EAGAIN: it waits for a message to come, and cl_p2p_next will return it. CL_EPEERLOST: none will come. */
int cl_p2p_bind(struct cl_operation *operation, struct cl_mailbox *mailbox, uint64_t now_us);
/* An operation that has waited and has a name now, to be posted likewise; NULL: there is none. Returns the status with
 * which the operation fails the group, or CL_OK. */
int cl_p2p_next(struct cl_mailbox *mailbox, struct cl_operation **operation);
