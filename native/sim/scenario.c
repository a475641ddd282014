#include "sim/scenario.h"

#include <stdlib.h>

const char *sim_story_name(enum sim_story story)
{
    static const char *const NAMES[SIM_STORIES] = {"noise",     "path",   "late",     "large", "death", "frozen",
                                                   "partition", "absent", "mismatch", "abort", "close", "scarce"};
    return NAMES[story];
}

const char *sim_fault_name(enum sim_fault_kind kind)
{
    static const char *const NAMES[SIM_FAULTS] = {"pause", "death",  "down",   "cut",    "storm",
                                                  "clog",  "attack", "late",   "absent", "mismatch",
                                                  "abort", "hole",   "detour", "close",  "scarce"};
    return NAMES[kind];
}

void sim_scenario_free(struct sim_scenario *scenario)
{
    free(scenario->host_rate);
    free(scenario->speeds);
    sim_wiring_free(&scenario->wiring);
    for (uint32_t i = 0; i < scenario->group_count; i++)
        free(scenario->groups[i].members);
    free(scenario->groups);
    free(scenario->calls);
}
