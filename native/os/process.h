/*
 * Process: the state of another process of this host, from the kernel.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether the process is stopped: SIGSTOP, SIGTSTP (Ctrl-Z), or a frozen terminal. False for a process that a debugger
 * holds, as the other ranks should then wait; also false when the kernel does not tell. */
bool cl_process_is_stopped(int32_t pid);

/* Reads memory of the process: two pieces, one after the other. False when not all could be read, or the kernel does
 * not allow it. */
bool cl_process_read(int32_t pid, const uint64_t addresses[2], void *const targets[2], const size_t bytes[2]);
