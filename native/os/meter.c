#include "os/meter.h"

#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "commlayer.h"

static const size_t BYTES = CL_METER_INTERFACES * sizeof(struct cl_meter_line);

static int map(struct cl_meter *meter, int fd, int protection)
{
    void *memory = mmap(NULL, BYTES, protection, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return CL_ESYSTEM;
    *meter = (struct cl_meter){.lines = memory, .fd = fd};
    return CL_OK;
}

int cl_meter_open(struct cl_meter *meter)
{
    int fd = memfd_create("commlayer-meter", MFD_CLOEXEC);
    if (fd < 0)
        return CL_ESYSTEM;
    int status = ftruncate(fd, (off_t)BYTES) != 0 ? CL_ESYSTEM : map(meter, fd, PROT_READ | PROT_WRITE);
    if (status != CL_OK)
        close(fd);
    return status;
}

int cl_meter_read(int32_t pid, int32_t fd, struct cl_meter *meter)
{
    struct stat status;
    int32_t opened;
    if (cl_host_open(pid, fd, &opened) != CL_OK)
        return CL_ESYSTEM;
    bool whole = fstat(opened, &status) == 0 && (uint64_t)status.st_size == BYTES;
    int mapped = whole ? map(meter, opened, PROT_READ) : CL_ESYSTEM;
    if (mapped != CL_OK)
        close(opened);
    return mapped;
}

void cl_meter_close(struct cl_meter *meter)
{
    if (meter->lines == NULL)
        return;
    munmap(meter->lines, BYTES);
    close(meter->fd);
    *meter = (struct cl_meter){0};
}

uint64_t cl_meter_key(const char *address)
{
    uint64_t key = 0xcbf29ce484222325; /* FNV-1a, of 64 bits */
    for (; *address != '\0'; address++)
        key = (key ^ (uint8_t)*address) * 0x100000001b3;
    return key != 0 ? key : 1;
}
