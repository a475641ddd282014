/*
 * Faults: what goes wrong in a scenario.
 */
#ifndef CL_SIM_FAULTS_H
#define CL_SIM_FAULTS_H

#include "sim/draw.h"

/* The fault of the story, and others that cost only time. */
void sim_faults_draw(struct draw *draw, uint64_t span_ns);

#endif
