/*
 * Work: the groups of a scenario, and the calls in them.
 */
#ifndef CL_SIM_WORK_H
#define CL_SIM_WORK_H

#include "sim/draw.h"

void sim_work_draw(struct draw *draw);
/* In stories whose ranks lose each other and live: a group in which they meet again. */
void sim_work_draw_again(struct draw *draw);

#endif
