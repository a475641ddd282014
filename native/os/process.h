/*
 * Process: the state of another process of this host, from the kernel.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum cl_process_state {
    CL_PROCESS_RUNS, /* also: a debugger holds it, so that the other ranks should wait; or the kernel does not tell */
    CL_PROCESS_STOPPED, /* by SIGSTOP, SIGTSTP (Ctrl-Z), or a frozen terminal */
    CL_PROCESS_DIES,    /* of a signal. Its pidfd tells only when the kernel has written its core and freed its memory,
                           which takes seconds for gigabytes */
};

enum cl_process_state cl_process_state(int32_t pid);

/* Reads memory of the process: two pieces, one after the other. False when not all could be read, or the kernel does
 * not allow it. */
bool cl_process_read(int32_t pid, const uint64_t addresses[2], void *const targets[2], const size_t bytes[2]);
