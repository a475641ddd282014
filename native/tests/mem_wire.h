/*
 * Mem wire: datagrams between engines of one process, some of which are lost. A port is a mailbox in a table of the
 * process, guarded by one lock: it is made for simplicity, not for speed. Addresses mean nothing to it.
 */
#pragma once

#include "wire/wire.h"

extern const struct cl_wire_type mem_wire;

/* Wires opened from now on lose this share of the datagrams they send. */
void mem_wire_lose(double loss);
