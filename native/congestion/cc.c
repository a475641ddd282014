#include "congestion/cc.h"

#include <stddef.h>
#include <string.h>

static const struct cl_cc_type *const TYPES[] = {&cl_cc_type_delay, &cl_cc_type_fixed};

const struct cl_cc_type *cl_cc_find(const char *name)
{
    for (size_t i = 0; name && i < sizeof(TYPES) / sizeof(TYPES[0]); i++)
        if (strcmp(TYPES[i]->name, name) == 0)
            return TYPES[i];
    return NULL;
}

void cl_cc_init(struct cl_cc *cc, const struct cl_cc_type *type, uint32_t packet_bytes, uint64_t fixed_rate)
{
    *cc = (struct cl_cc){.type = type, .packet_bytes = packet_bytes, .rate = fixed_rate};
    type->init(cc);
}
