/* Chooses the kernels: of the best level that the CPU has, or of the one that a test selected. */
#include "kernels/level.h"

#include <stdatomic.h>

#if defined(__x86_64__)
#include <cpuid.h>

static int has_f16c(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & bit_F16C) != 0; /* __builtin_cpu_supports of clang 14 lacks it */
}

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") && has_f16c();
}

static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("popcnt") && has_f16c();
}
#endif

static int has_scalar(void)
{
    return 1;
}

/* Best first. */
static const struct {
    const struct cl_level *level;
    int (*is_supported)(void);
} levels[] = {
#if defined(__x86_64__)
    {&cl_level_avx512, has_avx512},
    {&cl_level_avx2, has_avx2},
#endif
    {&cl_level_scalar, has_scalar},
};

static _Atomic(const struct cl_level *) chosen; /* NULL until the first use */

const struct cl_level *cl_level_current(void)
{
    const struct cl_level *level = atomic_load(&chosen);
    if (level != NULL)
        return level;
    for (size_t i = 0; level == NULL; i++)
        if (levels[i].is_supported())
            level = levels[i].level;
    /* Two threads may come here: both store the same level, unless a test selected another one meanwhile, which stays.
     */
    const struct cl_level *none = NULL;
    return atomic_compare_exchange_strong(&chosen, &none, level) ? level : none;
}

const char *cl_kernels_level(void)
{
    return cl_level_current()->name;
}

int cl_kernels_select(const char *level)
{
    for (size_t i = 0; level != NULL && i < sizeof levels / sizeof *levels; i++) {
        if (strcmp(level, levels[i].level->name) == 0 && levels[i].is_supported()) {
            atomic_store(&chosen, levels[i].level);
            return CL_OK;
        }
    }
    return CL_EINVAL;
}
