/*
 * Messages of a conversation: their two halves, posted together or far apart, and what must hold when one completes.
 */
#pragma once

#include "fuzz/conversation.h"

/* Posts a message, or one half of it: the other half may follow much later. */
void message_post(struct conversation *c);
/* Posts up to `most` of the halves not posted yet. */
void message_post_rest(struct conversation *c, uint32_t most);
void message_complete(struct conversation *c, const struct cl_completion *completion);
/* Forgets the open halves at `self` of an operation; UINT32_MAX: of the whole group. */
void message_cancel(struct conversation *c, uint32_t self, uint32_t group, uint32_t sequence);
/* Whether a half is open. */
bool message_any_open(const struct conversation *c);
