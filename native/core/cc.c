#include "core/cc.h"

#include <string.h>

static const struct cl_cc_type *const TYPES[] = {&cl_cc_type_delay, &cl_cc_type_fixed};

bool cl_cc_init(struct cl_cc *cc, const char *name, uint32_t packet_bytes, uint64_t fixed_rate)
{
    for (size_t i = 0; i < sizeof(TYPES) / sizeof(TYPES[0]); i++)
        if (strcmp(TYPES[i]->name, name) == 0) {
            *cc = (struct cl_cc){.type = TYPES[i], .packet_bytes = packet_bytes, .fixed_rate = fixed_rate};
            cc->type->init(cc);
            return true;
        }
    return false;
}
