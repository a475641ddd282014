#include "protocol/announcements.h"

#include <stdlib.h>

#include "protocol/array.h"

void cl_announcements_add(struct cl_announcements *announcements, struct cl_receive *receive)
{
    receive->announced = true;
    cl_message_list_append(&announcements->messages, &receive->message);
}

void cl_announcements_remove(struct cl_announcements *announcements, struct cl_receive *receive)
{
    receive->announced = false;
    cl_message_list_remove(&announcements->messages, &receive->message);
}

static struct cl_wanted_tag *find(const struct cl_announcements *announcements, uint32_t group, uint32_t tag)
{
    for (uint32_t i = 0; i < announcements->wanted_count; i++)
        if (announcements->wanted[i].group == group && announcements->wanted[i].tag == tag)
            return &announcements->wanted[i];
    return NULL;
}

bool cl_announcements_wants(const struct cl_announcements *announcements, uint32_t group, uint32_t tag)
{
    return find(announcements, group, tag) != NULL;
}

bool cl_announcements_want(struct cl_announcements *announcements, uint32_t group, uint32_t tag)
{
    if (!cl_array_reserve(&announcements->wanted, announcements->wanted_count, &announcements->wanted_capacity,
                          sizeof *announcements->wanted))
        return false;
    announcements->wanted[announcements->wanted_count++] = (struct cl_wanted_tag){group, tag};
    return true;
}

bool cl_announcements_unwant(struct cl_announcements *announcements, uint32_t group, uint32_t tag)
{
    struct cl_wanted_tag *found = find(announcements, group, tag);
    if (found == NULL)
        return false;
    *found = announcements->wanted[--announcements->wanted_count];
    return true;
}

void cl_announcements_free(struct cl_announcements *announcements)
{
    free(announcements->wanted);
    *announcements = (struct cl_announcements){0};
}
