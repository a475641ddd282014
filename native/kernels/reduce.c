/* Chooses the kernels: of the best level that the CPU has, or of the one that a test selected. */
#include "kernels/reduce.h"

#include <stdatomic.h>
#include <string.h>

#include "kernels/reduce_level.h"

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
    return __builtin_cpu_supports("avx2") && has_f16c();
}

static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_f16c();
}
#endif

static int has_scalar(void)
{
    return 1;
}

/* Best first. */
static const struct {
    const struct cl_reduce_level *level;
    int (*is_supported)(void);
} levels[] = {
#if defined(__x86_64__)
    {&cl_reduce_avx512, has_avx512},
    {&cl_reduce_avx2, has_avx2},
#endif
    {&cl_reduce_scalar, has_scalar},
};

static _Atomic(const struct cl_reduce_level *) chosen; /* NULL until the first use */

static const struct cl_reduce_level *current(void)
{
    const struct cl_reduce_level *level = atomic_load(&chosen);
    if (level != NULL)
        return level;
    for (size_t i = 0; level == NULL; i++)
        if (levels[i].is_supported())
            level = levels[i].level;
    /* Two threads may come here: both store the same level, unless a test selected another one meanwhile, which stays.
     */
    const struct cl_reduce_level *none = NULL;
    return atomic_compare_exchange_strong(&chosen, &none, level) ? level : none;
}

const char *cl_kernels_level(void)
{
    return current()->name;
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

cl_reduce_fn cl_reduce_kernel(enum cl_dtype dtype, enum cl_op op)
{
    return (size_t)dtype < CL_DTYPES && (size_t)op < CL_OPS ? current()->reduce[dtype][op] : NULL;
}

cl_scale_fn cl_scale_kernel(enum cl_dtype dtype)
{
    return (size_t)dtype < CL_DTYPES ? current()->scale[dtype] : NULL;
}

size_t cl_dtype_size(enum cl_dtype dtype)
{
    static const size_t sizes[CL_DTYPES] = {
        [CL_U8] = 1,   [CL_I8] = 1,  [CL_I16] = 2, [CL_I32] = 4, [CL_I64] = 8, [CL_F16] = 2,
        [CL_BF16] = 2, [CL_F32] = 4, [CL_F64] = 8, [CL_U16] = 2, [CL_U32] = 4, [CL_U64] = 8,
    };
    return (size_t)dtype < CL_DTYPES ? sizes[dtype] : 0;
}
