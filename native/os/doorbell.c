#include "os/doorbell.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

bool cl_doorbell_ring(struct cl_doorbell *doorbell, bool request)
{
    /* Sequentially consistent, as at the owner: either it sees the ring before it sleeps, or this rank sees it there.
     */
    if (request)
        atomic_fetch_add(&doorbell->requests, 1);
    atomic_fetch_add(&doorbell->rings, 1);
    if (atomic_load(&doorbell->sleepers) > 0) {
        futex(&doorbell->rings, FUTEX_WAKE, INT32_MAX, NULL);
        return false;
    }
    if (atomic_load(&doorbell->attendants) > 0)
        return false;
    /* Takes no wish but the one that it fulfils: an owner that now asks for requests only would never hear of one. */
    uint32_t wish = atomic_load(&doorbell->wish);
    while (wish >= (request ? CL_DOORBELL_REQUESTS : CL_DOORBELL_ALL))
        if (atomic_compare_exchange_weak(&doorbell->wish, &wish, CL_DOORBELL_NONE))
            return true;
    return false;
}

void cl_doorbell_wake(struct cl_doorbell *doorbell)
{
    if (atomic_load(&doorbell->sleepers) == 0)
        return;
    atomic_fetch_add(&doorbell->rings, 1);
    futex(&doorbell->rings, FUTEX_WAKE, INT32_MAX, NULL);
}

void cl_doorbell_sleep(struct cl_doorbell *doorbell, uint32_t seen, const _Atomic uint32_t *done, uint64_t timeout_us)
{
    struct timespec timeout = {.tv_sec = (time_t)(timeout_us / 1000000u),
                               .tv_nsec = (long)(timeout_us % 1000000u) * 1000};
    atomic_fetch_add(&doorbell->sleepers, 1);
    if (atomic_load(&doorbell->rings) == seen && atomic_load(done) == 0)
        futex(&doorbell->rings, FUTEX_WAIT, seen, &timeout);
    atomic_fetch_sub(&doorbell->sleepers, 1);
}
