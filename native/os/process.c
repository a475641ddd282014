#include "os/process.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

bool cl_process_is_stopped(int32_t pid)
{
    char path[32], text[256];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = '\0';
    /* "pid (name) state ...": the name may contain spaces and parentheses, and has at most 64 bytes */
    const char *end = strrchr(text, ')');
    return end != NULL && strncmp(end, ") T", 3) == 0;
}
