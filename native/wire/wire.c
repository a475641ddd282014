#include "wire/wire.h"

#include <string.h>

static const struct cl_wire_type *const types[] = {&cl_wire_udp, &cl_wire_ofi};

const struct cl_wire_type *cl_wire_find(const char *name)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i]->name, name) == 0)
            return types[i];
    return NULL;
}
