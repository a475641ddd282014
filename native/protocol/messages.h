/* Messages: the changes to messages that all parts of the endpoint make: queue, complete, discard. */
#pragma once

#include "protocol/endpoint_state.h"

/* Moves a message from all lists to the completions; one that is not posted is discarded. */
void cl_messages_complete(struct cl_endpoint *endpoint, struct cl_message *message, int status);
/* Forgets a message without completion. */
void cl_messages_discard(struct cl_endpoint *endpoint, struct cl_message *message);
/* Gives a packet back to its message, to be sent again. False: without memory for that the message has ended, with
 * CL_ENOMEM. */
bool cl_messages_give_back(struct cl_endpoint *endpoint, struct cl_send *send, uint32_t packet);
/* Puts a message with something to send into the queue, unless it waits for room at the receiver. */
void cl_messages_requeue(struct cl_endpoint *endpoint, struct cl_send *send, bool first);
/* A receive and its sender's message differ: tells the sender, and completes the receive with CL_EMISMATCH. */
void cl_messages_mismatch(struct cl_endpoint *endpoint, struct cl_receive *receive);
