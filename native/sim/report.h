/* Report: a scenario as text, for the log of one seed. */
#ifndef CL_SIM_REPORT_H
#define CL_SIM_REPORT_H

#include <stdio.h>

#include "sim/scenario.h"

void sim_report_scenario(const struct sim_scenario *scenario, const struct sim_plans *plans, FILE *file);

#endif
