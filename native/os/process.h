/*
 * Process: the state of another process of this host, from the kernel.
 */
#ifndef CL_OS_PROCESS_H
#define CL_OS_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* Whether the process is stopped: SIGSTOP, SIGTSTP (Ctrl-Z), or a frozen terminal. False for a process that a debugger
 * holds, as the other ranks should then wait; also false when the kernel does not tell. */
bool cl_process_is_stopped(int32_t pid);

#endif
