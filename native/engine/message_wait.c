#include "engine/message_wait.h"

#include <sched.h>
#include <stdlib.h>

#include "engine/clock.h"
#include "engine/engine.h"
#include "os/doorbell.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define relax() _mm_pause()
#else
#define relax() sched_yield()
#endif

enum {
    SPIN_US = 60,
    PAUSE_MOST = 31,       /* waits without a spin, after spins in vain */
    SLEEP_MAX_US = 100000, /* a lost wake-up costs this much, never a hang */
};

struct cl_message_wait *cl_message_wait_create(struct cl_engine *engine, struct cl_group *group,
                                               struct cl_doorbell *doorbell, bool spin)
{
    struct cl_message_wait *wait = calloc(1, sizeof *wait);
    if (wait == NULL)
        return NULL;
    wait->engine = engine;
    wait->group = group;
    wait->doorbell = doorbell;
    wait->spins = spin;
    atomic_init(&wait->references, 1);
    return wait;
}

void cl_message_wait_retain(struct cl_message_wait *wait)
{
    atomic_fetch_add(&wait->references, 1);
}

void cl_message_wait_release(struct cl_message_wait *wait)
{
    if (wait != NULL && atomic_fetch_sub(&wait->references, 1) == 1)
        free(wait);
}

void cl_message_wait_close(struct cl_message_wait *wait)
{
    if (wait == NULL)
        return;
    atomic_store(&wait->closed, true);
    while (atomic_load(&wait->inside) > 0) {
        cl_doorbell_wake(wait->doorbell);
        sched_yield();
    }
    cl_message_wait_release(wait);
}

/* Whether this wait may spin. Where spins end in vain, as on a host with more threads than cores, few waits do. */
static bool may_spin(struct cl_message_wait *wait)
{
    uint32_t pause = atomic_load_explicit(&wait->pause, memory_order_relaxed);
    if (pause > 0) /* other threads that wait may write, too: no harm is done */
        atomic_store_explicit(&wait->pause, pause - 1, memory_order_relaxed);
    return wait->spins && pause == 0;
}

/* Spins until the doorbell has been rung more than `seen` times, or *done is not 0; false: in vain. */
static bool spin(struct cl_message_wait *wait, uint32_t seen, const _Atomic uint32_t *done)
{
    uint64_t end_us = cl_now_us() + SPIN_US;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&wait->doorbell->rings, memory_order_relaxed) != seen ||
                atomic_load_explicit(done, memory_order_relaxed) != 0) {
                atomic_store_explicit(&wait->failures, 0, memory_order_relaxed);
                return true;
            }
            relax();
        }
    } while (cl_now_us() < end_us);
    uint32_t failures = 2 * atomic_load_explicit(&wait->failures, memory_order_relaxed) + 1;
    failures = failures > PAUSE_MOST ? PAUSE_MOST : failures;
    atomic_store_explicit(&wait->failures, failures, memory_order_relaxed);
    atomic_store_explicit(&wait->pause, failures, memory_order_relaxed);
    return false;
}

/* Moves messages, until there is nothing to do at once, this thread's operation is done, or the deadline has passed. */
static void move(const struct cl_message_wait *wait, const _Atomic uint32_t *done, uint64_t deadline_us)
{
    bool more;
    do
        more = cl_engine_take_turn(wait->engine, wait->group);
    while (more && atomic_load(done) == 0 && cl_now_us() < deadline_us);
    if (more) /* for other operations */
        cl_engine_wake(wait->engine);
}

/* Attends to the doorbell. Returns how often it had been rung when this thread moved messages last. */
static uint32_t attend(struct cl_message_wait *wait, uint32_t seen, const _Atomic uint32_t *done, uint64_t deadline_us)
{
    struct cl_doorbell *doorbell = wait->doorbell;
    uint64_t now = cl_now_us();
    bool spins = may_spin(wait);
    while (atomic_load(done) == 0 && !atomic_load(&wait->closed) && now < deadline_us) {
        uint32_t rings = atomic_load(&doorbell->rings);
        if (rings != seen) {
            seen = rings;
            move(wait, done, deadline_us);
        } else if (spins) {
            spins = spin(wait, seen, done);
        } else {
            uint64_t left = deadline_us - now;
            cl_doorbell_sleep(doorbell, seen, done, left < SLEEP_MAX_US ? left : SLEEP_MAX_US);
        }
        now = cl_now_us();
    }
    return seen;
}

void cl_message_wait_for(struct cl_message_wait *wait, const _Atomic uint32_t *done, uint64_t deadline_us)
{
    atomic_fetch_add(&wait->inside, 1);
    if (!atomic_load(&wait->closed)) {
        struct cl_doorbell *doorbell = wait->doorbell;
        /* The order matters: whoever rings later either sees an attendant, or wakes the engine. */
        uint32_t seen = atomic_load(&doorbell->rings);
        atomic_fetch_add(&doorbell->attendants, 1);
        seen = attend(wait, seen, done, deadline_us);
        atomic_fetch_sub(&doorbell->attendants, 1);
        if (atomic_load(&doorbell->rings) != seen) /* perhaps for another operation, or a request */
            cl_engine_call(wait->engine);
    }
    atomic_fetch_sub(&wait->inside, 1);
}
