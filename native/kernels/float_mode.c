#include "kernels/float_mode.h"

#include "commlayer.h"

uint64_t cl_float_mode_get(void)
{
    return cl_float_mode_read();
}

void cl_float_mode_set(uint64_t mode)
{
    cl_float_mode_write((cl_float_mode)mode);
}
