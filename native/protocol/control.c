#include "protocol/control.h"

#include <stdlib.h>
#include <string.h>

#include "protocol/array.h"

void cl_control_write(const struct cl_control *control, struct cl_packet *packet)
{
    packet->group = control->group;
    if (packet->kind == CL_PACKET_ABORT) {
        packet->offset = (uint32_t)control->reason;
        packet->index = (uint16_t)(control->culprit + 1);
        return;
    }
    packet->sequence = control->sequence;
    packet->index = control->index;
    packet->offset = control->first_packet;
}

struct cl_control cl_control_read(const struct cl_packet *packet)
{
    if (packet->kind == CL_PACKET_ABORT)
        return cl_control_abort(packet->group, (int32_t)packet->offset, (uint16_t)(packet->index - 1));
    return (struct cl_control){
        .group = packet->group, .sequence = packet->sequence, .index = packet->index, .first_packet = packet->offset};
}

static bool same(uint8_t kind, const struct cl_control *a, const struct cl_control *b)
{
    if (kind == CL_PACKET_ABORT)
        return a->group == b->group && a->reason == b->reason && a->culprit == b->culprit;
    return a->group == b->group && a->sequence == b->sequence && a->index == b->index &&
           a->first_packet == b->first_packet;
}

bool cl_controls_push(struct cl_controls *controls, uint8_t kind, const struct cl_control *control)
{
    for (uint32_t i = 0; i < controls->count; i++)
        if (controls->list[i].kind == kind && same(kind, &controls->list[i].control, control))
            return true;
    if (!cl_array_reserve(&controls->list, controls->count, &controls->capacity, sizeof *controls->list))
        return false;
    controls->list[controls->count++] = (struct cl_control_entry){.control = *control, .kind = kind};
    return true;
}

bool cl_controls_pop(struct cl_controls *controls, struct cl_control_entry *entry)
{
    if (!controls->count)
        return false;
    *entry = controls->list[0];
    memmove(controls->list, controls->list + 1, --controls->count * sizeof(*controls->list));
    return true;
}

void cl_controls_free(struct cl_controls *controls)
{
    free(controls->list);
    *controls = (struct cl_controls){0};
}
