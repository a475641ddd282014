#include "protocol/control.h"

#include <stdlib.h>

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

/* Different contents may have the same key. */
static uint64_t key(uint8_t kind, const struct cl_control *control)
{
    uint64_t what = cl_index_mix((uint64_t)control->group << 8 | kind);
    if (kind == CL_PACKET_ABORT)
        return cl_index_mix(what + ((uint64_t)(uint32_t)control->reason << 32 | control->culprit));
    what = cl_index_mix(what + ((uint64_t)control->sequence << 32 | control->index));
    return cl_index_mix(what + control->first_packet);
}

bool cl_controls_push(struct cl_controls *controls, uint8_t kind, const struct cl_control *control)
{
    uint64_t content = key(kind, control);
    struct cl_index_place *place = cl_index_find(&controls->contents, content);
    for (; place != NULL; place = cl_index_next(place)) {
        const struct cl_control_entry *entry = CL_INDEX_THING(place, struct cl_control_entry, place);
        if (entry->kind == kind && same(kind, &entry->control, control))
            return true;
    }
    struct cl_control_entry *entry = malloc(sizeof *entry);
    if (entry == NULL)
        return false;
    *entry = (struct cl_control_entry){.control = *control, .kind = kind};
    if (!cl_index_add(&controls->contents, &entry->place, content)) {
        free(entry);
        return false;
    }
    *(controls->last != NULL ? &controls->last->next : &controls->first) = entry;
    controls->last = entry;
    controls->count++;
    return true;
}

bool cl_controls_pop(struct cl_controls *controls, struct cl_control_entry *entry)
{
    struct cl_control_entry *first = controls->first;
    if (first == NULL)
        return false;
    cl_index_remove(&controls->contents, &first->place);
    controls->first = first->next;
    if (controls->first == NULL)
        controls->last = NULL;
    controls->count--;
    *entry = *first;
    free(first);
    return true;
}

void cl_controls_free(struct cl_controls *controls)
{
    struct cl_control_entry entry;
    while (cl_controls_pop(controls, &entry)) {
    }
    cl_index_free(&controls->contents);
}
