/*
 * Announcements, for receives from any source: point-to-point messages that came before their receive was posted, and
 * the tags that such receives wait for.
 */
#pragma once

#include "protocol/message.h"

struct cl_wanted_tag {
    uint32_t group, tag;
};

struct cl_announcements {
    struct cl_message_list messages; /* receives, in order of arrival */
    struct cl_wanted_tag *wanted;
    uint32_t wanted_count, wanted_capacity;
};

void cl_announcements_add(struct cl_announcements *announcements, struct cl_receive *receive);
void cl_announcements_remove(struct cl_announcements *announcements, struct cl_receive *receive);

/* False when there is no memory. */
bool cl_announcements_want(struct cl_announcements *announcements, uint32_t group, uint32_t tag);
/* False when the tag was not wanted. */
bool cl_announcements_unwant(struct cl_announcements *announcements, uint32_t group, uint32_t tag);
bool cl_announcements_wants(const struct cl_announcements *announcements, uint32_t group, uint32_t tag);
void cl_announcements_free(struct cl_announcements *announcements);
