/*
 * Host wait: a calling thread runs an operation in shared memory itself, and waits for the host's counters: it spins as
 * long as recent waits suggest, and then sleeps on the counter.
 */
#pragma once

#include "engine/member.h"

/* Runs an operation that has entered the host queue; returns how it ended. */
int cl_host_wait_run(struct cl_member *member, struct cl_operation *operation);
