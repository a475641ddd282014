#include "sim/world.h"

#include <stdarg.h>

void sim_world_fail(struct sim_world *world, const char *format, ...)
{
    if (world->failure[0] != 0)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(world->failure, sizeof world->failure, format, arguments);
    va_end(arguments);
    sim_trace_say(&world->trace, "BROKEN: %s", world->failure);
}
