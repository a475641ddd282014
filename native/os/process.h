/*
 * Process: what the kernel says of another process of this host.
 */
#ifndef CL_OS_PROCESS_H
#define CL_OS_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* Whether it is stopped: SIGSTOP, SIGTSTP (Ctrl-Z), or a frozen terminal. Not one that a debugger holds: whoever debugs
 * a rank wants the others to wait. false, too, when the kernel does not say. */
bool cl_process_is_stopped(int32_t pid);

#endif
