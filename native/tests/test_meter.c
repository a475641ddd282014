#include "os/meter.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "commlayer.h"
#include "tests/check.h"

TEST(test_another_process_reads)
{
    struct cl_meter own = {0}, read = {0};
    CHECK_EQ(cl_meter_open(&own), CL_OK);
    CHECK_EQ(cl_meter_read(getpid(), own.fd, &read), CL_OK);
    for (uint32_t i = 0; i < CL_METER_INTERFACES; i++) {
        CHECK_EQ(atomic_load(&read.lines[i].key), 0);
        atomic_store(&own.lines[i].key, 7 + i);
        atomic_store(&own.lines[i].bytes[3], 100 * i);
        CHECK_EQ(atomic_load(&read.lines[i].key), 7 + i);
        CHECK_EQ(atomic_load(&read.lines[i].bytes[3]), 100 * i);
    }
    CHECK(ftruncate(own.fd, 0) != 0); /* or it could kill those that read */
    cl_meter_close(&own);
    CHECK_EQ(atomic_load(&read.lines[1].bytes[3]), 100); /* its process may have died */
    cl_meter_close(&read);
    cl_meter_close(&read);
    CHECK(read.lines == NULL);
}

/* Another process told the descriptor: any number may stand there. */
TEST(test_no_meter)
{
    struct cl_meter meter = {0};
    int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK_EQ(cl_meter_read(getpid(), other, &meter), CL_ESYSTEM);
    close(other);
    CHECK_EQ(cl_meter_read(getpid(), other, &meter), CL_ESYSTEM);
    CHECK_EQ(cl_meter_read(INT32_MAX, 0, &meter), CL_ESYSTEM);
    CHECK_EQ(cl_meter_read(getpid(), -1, &meter), CL_ESYSTEM);
    int same_size = memfd_create("other", MFD_CLOEXEC);
    CHECK(same_size >= 0 && ftruncate(same_size, CL_METER_INTERFACES * sizeof(struct cl_meter_line)) == 0);
    CHECK_EQ(cl_meter_read(getpid(), same_size, &meter), CL_ESYSTEM); /* its owner could take the memory away */
    close(same_size);
    CHECK(meter.lines == NULL);
    cl_meter_close(&meter); /* nothing to close */
}

TEST(test_keys)
{
    CHECK(cl_meter_key("10.0.0.1") == cl_meter_key("10.0.0.1"));
    CHECK(cl_meter_key("10.0.0.1") != cl_meter_key("10.0.0.2"));
}
