#include "protocol/control.h"

#include <stdlib.h>
#include <string.h>

#include "protocol/array.h"

bool cl_controls_push(struct cl_controls *controls, uint8_t kind, const struct cl_control *control)
{
    for (uint32_t i = 0; i < controls->count; i++)
        if (controls->list[i].kind == kind && memcmp(&controls->list[i].control, control, sizeof(*control)) == 0)
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
