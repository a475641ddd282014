#include "os/process.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    PF_SIGNALED = 0x400, /* in the kernel's include/linux/sched.h: a signal ended the process; see proc_pid_stat(5) */
};

enum cl_process_state cl_process_state(int32_t pid)
{
    char path[32], text[256], state;
    unsigned flags;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return CL_PROCESS_RUNS;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return CL_PROCESS_RUNS;
    text[length] = '\0';
    /* "pid (name) state ...": the name may contain spaces and parentheses, and has at most 64 bytes */
    const char *end = strrchr(text, ')');
    if (end == NULL || sscanf(end, ") %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2)
        return CL_PROCESS_RUNS;
    if ((flags & PF_SIGNALED) != 0)
        return CL_PROCESS_DIES;
    return state == 'T' ? CL_PROCESS_STOPPED : CL_PROCESS_RUNS;
}

bool cl_process_read(int32_t pid, const uint64_t addresses[2], void *const targets[2], const size_t bytes[2])
{
    struct iovec local[2], remote[2];
    for (int i = 0; i < 2; i++) {
        local[i] = (struct iovec){targets[i], bytes[i]};
        remote[i] = (struct iovec){(void *)(uintptr_t)addresses[i], bytes[i]};
    }
    return process_vm_readv(pid, local, 2, remote, 2, 0) == (ssize_t)(bytes[0] + bytes[1]);
}
