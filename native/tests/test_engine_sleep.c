/* How long the engine's thread sleeps: this file has a ppoll of its own, which tells. */
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/world.h"

static struct {
    _Atomic pthread_t thread; /* the one that is watched */
    atomic_uint times;
    atomic_bool for_ever; /* without a timeout, the latest time */
} sleeps;

/* In place of that of the C library. */
int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    struct timespec left = timeout != NULL ? *timeout : (struct timespec){0}; /* the system call changes it */
    if (pthread_equal(pthread_self(), atomic_load(&sleeps.thread))) {
        atomic_store(&sleeps.for_ever, timeout == NULL);
        atomic_fetch_add(&sleeps.times, 1);
    }
    return (int)syscall(SYS_ppoll, fds, (unsigned)count, timeout != NULL ? &left : NULL, mask, (size_t)_NSIG / 8);
}

/* Half an hour is torch's timeout, and a day the longest peer timeout: nothing else is due before. */
TEST(test_a_distant_deadline_is_kept)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", UINT64_C(86400000000));
    SCOPED_TEAM team = open_team(&world, 1, false);
    cl_engine *engine = world.engines[0];
    struct call *calls[2] = {make_call(0, 1), make_call(1, 1)};
    cl_operation *operation;
    CHECK_EQ(submit_call(&team, 0, calls[0], UINT64_C(1800000000), &operation), CL_OK);
    usleep(100000); /* the packets are acknowledged */
    atomic_store(&sleeps.thread, engine->thread);
    uint32_t before = atomic_load(&sleeps.times);
    uint64_t start_us = cl_now_us();
    cl_engine_wake(engine);
    while (atomic_load(&sleeps.times) == before && cl_now_us() - start_us < PATIENCE_US)
        usleep(1000);
    usleep(20000);
    CHECK(atomic_load(&sleeps.times) > before);
    CHECK(!atomic_load(&sleeps.for_ever));
    CHECK_EQ(run_call(&team, 1, calls[1], PATIENCE_US), CL_OK);
    CHECK_EQ(finish(operation), CL_OK);
    for (size_t rank = 0; rank < 2; rank++)
        free(calls[rank]);
}
